"""Each of the ten causes of drift is planted, and the doctor names it; healthy pairs are not blamed."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from inflight.conformance.models import make_tiny_model
from inflight.conformance.parity.figures import Figures, Limits
from inflight.conformance.parity.opening import open_pair
from inflight.conformance.parity.served import check_served
from inflight.conformance.targets import EndpointTarget
from inflight.doctor.causes import diagnose
from inflight.errors import ConfigError
from tests.doctor.examined import CASES, MODELS, examined
from tests.selection import first_of_each

pytestmark = pytest.mark.timeout(300)
SHORT = {"tokens": 24, "context": 512}
"""Enough tokens to tell the causes of the planted faults apart; while versions change, half the context is sampled."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("doctor")
    return {
        "dense": make_tiny_model(directory / "dense"),
        "tied": make_tiny_model(directory / "tied", tied=True),
        "moe": make_tiny_model(directory / "moe", family="qwen3_moe"),
    }


@pytest.mark.parametrize(("cause", "number", "where"), first_of_each(CASES, lambda case: case[1] % 5))
def test_a_planted_cause_is_named(cause: str, number: int, where: str, models: dict[str, Path]) -> None:
    model = models[MODELS.get(cause, "dense")]
    findings = diagnose(examined(model, cause, **SHORT))
    assert findings, "nothing was found"
    assert (findings[0].cause.number, where in findings[0].where) == (number, True), findings


@pytest.mark.parametrize(
    ("model", "worker"),
    first_of_each(
        [("moe", None), ("dense", None), ("tied", "inflight_fsdp:FSDP")],
        lambda case: case[1],  # and test_command.py has a dense model
    ),
)
def test_a_healthy_pair_is_not_blamed(model: str, worker: str | None, models: dict[str, Path]) -> None:
    assert diagnose(examined(models[model], "none", worker, **SHORT)) == []


def test_only_what_start_and_published_weights_both_show_raises_the_limits() -> None:
    small, large = (Figures(768, 0.0, mean**2, 1.0, 10 * mean, mean) for mean in (1e-6, 1.5e-4))
    assert Limits.of("float32", large, large).mean == pytest.approx(1.5e-3)
    for baselines in ((large, small), (small, large)):
        assert Limits.of("float32", *baselines) == Limits.of("float32")
    faulty = Figures(768, 0.0, 3.1, 0.003, 6.9, 3.9)
    assert Limits.of("float32", faulty, faulty) == Limits.of("float32")


@pytest.mark.parametrize(
    ("cause", "is_accepted"),
    [("none", True), ("rounded head", True), ("started elsewhere", False), ("quantized", False)],
)
def test_a_server_that_others_started_is_published_to_only_if_it_serves_the_checkpoint(
    cause: str, is_accepted: bool, models: dict[str, Path]
) -> None:
    target = EndpointTarget(factory="tests.doctor.planted:start", options={"cause": cause}, model=models["dense"])

    async def check() -> None:
        opening = open_pair(target, {}, prompts=2, tokens=32, start_s=60, report=lambda _: None)
        async with opening as pair:
            pair.subject.opened = dataclasses.replace(pair.subject.opened, is_ours=False)
            if is_accepted:
                await check_served(pair)
            else:
                with pytest.raises(ConfigError, match="nats on average"):
                    await check_served(pair)
            assert not pair.subject.publisher.touched

    asyncio.run(check())
