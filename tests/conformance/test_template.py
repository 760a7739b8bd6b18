"""The package from which docs/backend-tutorial.md starts: it conforms, and a planted fault is found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.conformance import CheckOutcome, EndpointTarget, Kit, endpoint_checks
from inflight.conformance.models import make_tiny_model
from tests.selection import first_of_each

pytestmark = pytest.mark.usefixtures("forks")
TEMPLATE = Path(__file__).parents[2] / "examples" / "backend_template"


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TEMPLATE))
        with Kit(EndpointTarget(factory="my_engine:MyEndpoint")) as kit:
            yield kit


@pytest.mark.parametrize("check", first_of_each(endpoint_checks(), lambda check: check.level), ids=str)
def test_the_template_conforms(kit, check):
    kit.run(check).raise_unless_good()


def test_the_fault_of_the_tutorial_is_found(tmp_path, monkeypatch):
    shutil.copytree(TEMPLATE / "my_engine", tmp_path / "faulty_engine")
    source = tmp_path / "faulty_engine" / "__init__.py"
    sound = source.read_text()
    assert "self.version = update.version\n" in sound
    source.write_text(sound.replace("self.version = update.version\n", "self.version = update.version + 1\n"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = [check for check in endpoint_checks() if check.id == "U-21"]
    model = make_tiny_model(tmp_path / "model", max_model_len=192)  # of which requests sample half while they run
    with Kit(EndpointTarget(factory="faulty_engine:MyEndpoint", model=model)) as kit:
        verdict = kit.run(check)
    assert verdict.outcome is CheckOutcome.FAILED, verdict
    assert "spans name versions [2, 3" in verdict.message
