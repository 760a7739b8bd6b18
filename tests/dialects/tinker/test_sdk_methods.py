"""Every public method of the real SDK has a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dialects.tinker.sdk_methods import CLIENTS, METHODS, REFUSED, SDK_VERSION, SUPPORTED
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402

PUBLIC = [
    f"{client}.{name}"
    for client in CLIENTS
    for name in sorted(vars(getattr(tinker, client)))
    if not name.startswith("_")
]
TESTS = {
    name
    for path in Path(__file__).parent.glob("test_sdk_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("method", PUBLIC)
def test_every_public_method_has_a_test(method: str) -> None:
    assert METHODS[method] in TESTS, f"{method} names a test that does not exist"


def test_the_table_names_the_methods_of_this_release() -> None:
    assert tinker.__version__ == SDK_VERSION
    assert sorted(METHODS) == sorted(PUBLIC)
    assert not SUPPORTED.keys() & REFUSED.keys()
