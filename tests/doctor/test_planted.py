"""Each of the ten causes of drift is planted, and the doctor names it; healthy pairs are not blamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inflight.conformance.models import make_tiny_model
from inflight.conformance.parity.opening import open_pair
from inflight.conformance.targets import EndpointTarget
from inflight.doctor.causes import diagnose
from inflight.doctor.experiments import Examination, examine

pytestmark = pytest.mark.timeout(300)
CASES = [
    ("stale prefix cache", 1, ""),
    ("lost tensor", 2, "model.layers.1.self_attn.o_proj.weight"),
    ("update not applied", 2, "all tensors"),
    ("transformed again", 3, ""),
    ("tied head", 4, "embed_tokens"),
    ("raw logprobs", 5, ""),
    ("rounded head", 6, "bfloat16"),
    ("misrouted", 7, "the router"),
    ("crowded", 8, "the batch"),
    ("quantised", 9, ""),
    ("stamped at admission", 10, ""),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("doctor")
    return {
        "dense": make_tiny_model(directory / "dense"),
        "tied": make_tiny_model(directory / "tied", tied=True),
        "moe": make_tiny_model(directory / "moe", family="qwen3_moe"),
    }


def examined(model: Path, cause: str, worker: str | None = None) -> Examination:
    target = EndpointTarget(factory="tests.doctor.planted:start", options={"cause": cause}, model=model, worker=worker)

    async def run() -> Examination:
        opening = open_pair(target, {}, prompts=4, tokens=64, start_s=60, report=lambda _: None)
        async with opening as pair:
            return await examine(pair, lambda _: None)

    return asyncio.run(run())


@pytest.mark.parametrize(("cause", "number", "where"), CASES)
def test_a_planted_cause_is_named(cause: str, number: int, where: str, models: dict[str, Path]) -> None:
    model = models[{"misrouted": "moe", "tied head": "tied"}.get(cause, "dense")]
    findings = diagnose(examined(model, cause))
    assert findings, "nothing was found"
    assert (findings[0].cause.number, where in findings[0].where) == (number, True), findings


@pytest.mark.parametrize(("model", "worker"), [("dense", None), ("tied", "inflight_fsdp:FSDP"), ("moe", None)])
def test_a_healthy_pair_is_not_blamed(model: str, worker: str | None, models: dict[str, Path]) -> None:
    assert diagnose(examined(models[model], "none", worker)) == []
