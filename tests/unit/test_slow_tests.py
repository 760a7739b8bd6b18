"""The list of slow tests names tests that exist, and their mark keeps them out of `make test`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.slow import FILE, NEVER_SLOW, mark_slow

ROOT = Path(__file__).parents[2]
SLOW = list(json.loads(FILE.read_text()))


def test_every_slow_test_exists() -> None:
    missing = []
    for test in SLOW:
        file, name = test.split("::")[:2]
        path = ROOT / file
        if not path.is_file() or name.split("[")[0] not in path.read_text():
            missing.append(test)
    assert missing == []


def test_what_make_test_always_runs_is_not_slow_and_exists() -> None:
    assert [test for test in SLOW if test.startswith(NEVER_SLOW)] == []
    for beginning in NEVER_SLOW:
        file, _, name = beginning.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_a_slow_test_is_marked_and_no_other_test_is(request: pytest.FixtureRequest) -> None:
    marks: list[str] = []
    listed = SimpleNamespace(nodeid=SLOW[0], add_marker=marks.append)
    mark_slow([request.node, cast("pytest.Item", listed)])
    assert marks == ["slow"]
    assert not request.node.get_closest_marker("slow")


def test_make_test_leaves_slow_tests_out() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not slow" in options["addopts"]
