"""Each of the ten causes of drift is planted, and the doctor names it; healthy pairs are not blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.conformance.models import make_tiny_model
from inflight.doctor.causes import diagnose
from tests.doctor.examined import CASES, MODELS, examined

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("doctor")
    return {
        "dense": make_tiny_model(directory / "dense"),
        "tied": make_tiny_model(directory / "tied", tied=True),
        "moe": make_tiny_model(directory / "moe", family="qwen3_moe"),
    }


@pytest.mark.parametrize(("cause", "number", "where"), CASES)
def test_a_planted_cause_is_named(cause: str, number: int, where: str, models: dict[str, Path]) -> None:
    model = models[MODELS.get(cause, "dense")]
    findings = diagnose(examined(model, cause))
    assert findings, "nothing was found"
    assert (findings[0].cause.number, where in findings[0].where) == (number, True), findings


@pytest.mark.parametrize(("model", "worker"), [("dense", None), ("tied", "inflight_fsdp:FSDP"), ("moe", None)])
def test_a_healthy_pair_is_not_blamed(model: str, worker: str | None, models: dict[str, Path]) -> None:
    assert diagnose(examined(models[model], "none", worker)) == []
