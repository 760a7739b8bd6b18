"""Each shape of the difference is named, on synthetic tokens; healthy runs are not blamed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.doctor.levels import MIN_TOKENS, figures_of, level_of
from inflight.doctor.records import Floats, Observations, RunSettings, StepAggregate, StepRecords, TokenRecords
from inflight.doctor.shapes import EXPERIMENTS, Diagnosis, diagnose
from inflight.wire import InFlightPolicy

LENGTH = 48
NOISE = {"bfloat16": 0.008, "float32": 1e-6}

Fault = Callable[[Observations, np.random.Generator], Floats]
"""What is added to the differences."""


def tokens(
    num_versions: int = 12,
    completions: int = 10,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    fault: Fault | None = None,
    policy: InFlightPolicy = InFlightPolicy.RECOMPUTE,
    learning_rate: float = 1e-5,
    has_boundaries: bool = False,
    temperatures: tuple[float, ...] = (1.0,),
) -> TokenRecords:
    """Return healthy tokens of two endpoints, with zero-mean noise, and a fault."""
    rng = np.random.default_rng(seed)
    num = num_versions * completions * LENGTH
    sequence = np.repeat(np.arange(num_versions * completions), LENGTH)
    position = np.tile(np.arange(LENGTH), num_versions * completions)
    since = np.where((sequence % 2 == 1) & has_boundaries & (position >= 20), position - 20, -1)
    seen = Observations(
        difference_N=rng.normal(0, NOISE[dtype], num),
        behaviour_N=-rng.exponential(1.5, num),
        version_N=sequence // completions,
        position_N=position,
        since_boundary_N=since,
        endpoint_N=sequence % 3 % 2,
        temperature_N=np.array(temperatures)[sequence % len(temperatures)],
        sequence_N=sequence,
        endpoints=("http://a", "http://b"),
    )
    if fault is not None:
        seen = dataclasses.replace(seen, difference_N=seen.difference_N + fault(seen, rng))
    rates = dict.fromkeys(range(num_versions), learning_rate)
    return TokenRecords(RunSettings(dtype, policy, rates), seen, num_stale=0, num_unusable=0)


def noise(seen: Observations, rng: np.random.Generator, size: Any) -> Floats:
    values: Floats = rng.normal(0, 1, len(seen)) * size
    return values


FAULTS: Mapping[str, tuple[Fault, dict[str, Any], int]] = {
    "present before any update": (lambda it, rng: noise(it, rng, 0.2), {}, 5),
    "jumps at the first update and stays": (lambda it, rng: noise(it, rng, 0.2 * (it.version_N > 0)), {}, 2),
    "jumps at version 6 and stays": (lambda it, rng: noise(it, rng, 0.2 * (it.version_N > 5)), {}, 2),
    "grows with training steps": (lambda it, rng: noise(it, rng, 0.05 * it.version_N), {}, 2),
    "grows with updates without learning": (
        lambda it, rng: noise(it, rng, 0.05 * it.version_N),
        {"learning_rate": 1e-30},
        1,
    ),
    "saw-tooth of period 3": (lambda it, rng: noise(it, rng, 0.1 * (it.version_N % 3)), {"num_versions": 14}, 2),
    "saw-tooth of period 4": (lambda it, rng: noise(it, rng, 0.3 * (it.version_N % 4 == 1)), {"num_versions": 17}, 2),
    "one endpoint": (lambda it, rng: noise(it, rng, 0.2 * (it.endpoint_N == 1)), {}, 2),
    "only after span boundaries": (
        lambda it, rng: noise(it, rng, 0.2 * (it.since_boundary_N >= 0)),
        {"has_boundaries": True},
        1,
    ),
    "grows along the completion": (lambda it, rng: noise(it, rng, 0.01 * it.position_N), {}, 8),
    "few tokens huge": (lambda it, rng: noise(it, rng, 4.0 * (rng.random(len(it)) < 0.01)), {}, 7),
    "one sign": (lambda it, rng: np.full(len(it), np.log(0.8)), {}, 5),
    "proportional to the logprob": (lambda it, rng: (1 / 0.7 - 1) * (it.behaviour_N + 1.5), {}, 5),
    "depends on the temperature": (
        lambda it, rng: noise(it, rng, 0.3 * (it.temperature_N != 1)),
        {"temperatures": (1.0, 0.7)},
        5,
    ),
    "varies from version to version": (lambda it, rng: noise(it, rng, 0.3 * (it.version_N == 7)), {}, 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", FAULTS)
def test_each_shape_is_named_first_with_its_suspects(shape: str, dtype: str, seed: int) -> None:
    fault, options, suspect = FAULTS[shape]
    diagnosis = diagnose(tokens(dtype=dtype, seed=seed, fault=fault, **options))
    assert diagnosis.verdict == "drift"
    first = diagnosis.findings[0]
    assert (first.shape, first.suspects[0], first.severity) == (shape, suspect, "fault"), diagnosis.findings
    assert all(name in EXPERIMENTS for finding in diagnosis.findings for name in finding.experiments)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("has_boundaries", [False, True])
def test_a_healthy_run_is_not_blamed(dtype: str, seed: int, has_boundaries: bool) -> None:
    for num_versions, completions in ((2, 30), (12, 10), (60, 8), (60, 1)):
        records = tokens(num_versions, completions, dtype=dtype, seed=seed, has_boundaries=has_boundaries)
        diagnosis = diagnose(records)
        if completions > 1:
            assert (diagnosis.verdict, diagnosis.findings) == ("no drift", ()), diagnosis
        assert not diagnosis.findings
        assert diagnosis.parts["all tokens at lag 0"].num_tokens == len(records.observations)


@pytest.mark.parametrize("seed", range(4))
def test_heavy_tails_and_certain_tokens_of_a_healthy_run_are_not_blamed(seed: int) -> None:
    """Differences in bfloat16 have heavy tails, and vanish where the policy is certain, as it becomes in training."""

    def uneven(it: Observations, rng: np.random.Generator) -> Floats:
        spread = -np.expm1(it.behaviour_N) * (1 - it.version_N / 40) * rng.lognormal(0, 0.7, len(it))
        return noise(it, rng, 0.008 * spread)

    diagnosis = diagnose(tokens(30, seed=seed, fault=uneven))
    assert (diagnosis.verdict, diagnosis.findings) == ("no drift", ()), diagnosis


def test_the_documentation_lists_each_shape_with_its_suspects() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    listed = dict(re.findall(r"^\| `(.+)` \| ([\d, ]+) \|", page, re.MULTILINE))
    general = {"saw-tooth of period 3": "saw-tooth of period k", "saw-tooth of period 4": "saw-tooth of period k"}
    for shape, (fault, options, _) in FAULTS.items():
        if shape != "jumps at version 6 and stays":
            finding = diagnose(tokens(fault=fault, **options)).findings[0]
            assert listed[general.get(shape, shape)] == ", ".join(map(str, finding.suspects))


def test_huge_tokens_of_one_endpoint_are_attributed_to_it() -> None:
    def huge(it: Observations, rng: np.random.Generator) -> Floats:
        return noise(it, rng, 4.0 * ((rng.random(len(it)) < 0.02) & (it.endpoint_N == 1)))

    first = diagnose(tokens(fault=huge)).findings[0]
    assert first.shape == "few tokens huge"
    assert first.evidence.endswith("all of them are from http://b")


def test_too_little_data_is_refused() -> None:
    diagnosis = diagnose(tokens(1, 6, fault=lambda it, rng: noise(it, rng, 0.5)))
    assert (diagnosis.verdict, diagnosis.findings) == ("too little data", ())
    assert "288 tokens at lag 0" in diagnosis.notes[0]
    nothing = tokens(1, 6)
    nothing = dataclasses.replace(nothing, observations=nothing.observations.select(np.full(288, False)))
    assert diagnose(nothing).verdict == "too little data"


@pytest.mark.parametrize("completions", [6, 20])
def test_a_run_with_too_little_data_is_advised_according_to_its_mode(completions: int) -> None:
    records = tokens(1, completions)
    for mode, advice in (("conventional", "run.num_steps"), ("pipeline", "run.mode"), (None, "run.mode")):
        changed = dataclasses.replace(records, settings=dataclasses.replace(records.settings, mode=mode))
        (note,) = (it for it in diagnose(changed).notes if "too few" in it and "run." in it)
        assert advice in note and ("run.mode" in note) == (advice == "run.mode")


def test_agreement_before_the_first_update_alone_does_not_clear_a_run() -> None:
    diagnosis = diagnose(tokens(1, 20))
    assert (diagnosis.verdict, diagnosis.findings) == ("too little data", ())
    assert "Before the first update both sides agree" in diagnosis.notes[-1]


def test_a_difference_after_boundaries_is_expected_under_keep_and_near_ones_are_a_wrong_label() -> None:
    def stale(it: Observations, rng: np.random.Generator) -> Floats:
        return noise(it, rng, 0.2 * (it.since_boundary_N >= 0))

    def mislabelled(it: Observations, rng: np.random.Generator) -> Floats:
        return noise(it, rng, 0.5 * ((it.since_boundary_N >= 0) & (it.since_boundary_N < 4)))

    options: dict[str, Any] = {"has_boundaries": True, "num_versions": 20}
    expected = diagnose(tokens(fault=stale, policy=InFlightPolicy.KEEP, **options))
    assert (expected.verdict, [it.severity for it in expected.findings]) == ("no drift", ["note"])
    for policy in (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE):
        wrong = diagnose(tokens(fault=mislabelled, policy=policy, **options))
        assert (wrong.verdict, wrong.findings[0].suspects) == ("drift", (10, 1)), wrong.findings


def test_growth_below_the_limits_is_a_warning_from_three_times_the_baseline() -> None:
    def grown(factor: float) -> Diagnosis:
        def scaled(it: Observations, rng: np.random.Generator) -> Floats:
            return -it.difference_N + noise(it, rng, 0.002 * np.where(it.version_N > 5, factor, 1.0))

        return diagnose(tokens(fault=scaled))

    assert grown(2.0).verdict == "no drift"
    assert grown(5.0).verdict == "warning"
    assert grown(12.0).verdict == "drift"


def test_one_huge_token_is_a_warning_at_most() -> None:
    diagnosis = diagnose(tokens(fault=lambda it, rng: 10.0 * (np.arange(len(it)) == 1000)))
    assert (diagnosis.verdict, [it.shape for it in diagnosis.findings]) == ("warning", ["few tokens huge"])


def test_tokens_without_a_logprob_are_a_fault() -> None:
    diagnosis = diagnose(dataclasses.replace(tokens(), num_unusable=3))
    assert (diagnosis.verdict, diagnosis.findings[0].shape) == ("drift", "tokens without logprobs")


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, *FAULTS]))
@settings(max_examples=40, deadline=None)
def test_the_order_of_tokens_within_a_step_changes_nothing(seed: int, shape: str | None) -> None:
    fault, options, _ = (None, {}, 0) if shape is None else FAULTS[shape]
    records = tokens(fault=fault, **options)
    order = np.random.default_rng(seed).permutation(len(records.observations))
    order = order[np.argsort(records.observations.version_N[order], kind="stable")]
    permuted = dataclasses.replace(records, observations=records.observations.select(order))
    assert diagnose(permuted) == diagnose(records)


@pytest.mark.parametrize(("course", "shape"), [
    (lambda version: 1e-7, None),
    (lambda version: 0.2, "present before any update"),
    (lambda version: 0.2 * (version > 0), "jumps at the first update and stays"),
    (lambda version: 0.03 * version, "grows with training steps"),
    (lambda version: 0.3 * (version % 4 == 1), "saw-tooth of period 4"),
])  # fmt: skip
def test_metrics_of_steps_show_the_course_over_versions(course: Callable[[int], float], shape: str | None) -> None:
    steps = tuple(StepAggregate(version, 500, 0.0, course(version) ** 2 / 2) for version in range(17))
    records = StepRecords(RunSettings("float32", InFlightPolicy.KEEP, dict.fromkeys(range(17), 1e-5)), steps, 3)
    diagnosis = diagnose(records)
    assert [finding.shape for finding in diagnosis.findings] == ([] if shape is None else [shape])
    assert "cannot be judged" in diagnosis.notes[0]
    assert diagnose(dataclasses.replace(records, steps=())).verdict == "too little data"


def test_figures_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(0)
    difference = rng.normal(0, 0.1, 1000)
    difference[0] = 10.0
    found = figures_of(difference)
    weights = [np.exp(d) for d in difference]
    assert found.k3 == pytest.approx(np.mean([np.exp(d) - 1 - d for d in difference]), rel=1e-9)  # float64
    assert found.k3_reverse == pytest.approx(np.mean([np.exp(-d) - 1 + d for d in difference]), rel=1e-9)
    assert found.effective_sample_size == pytest.approx(sum(weights) ** 2 / (1000 * sum(w * w for w in weights)))
    assert found.trimmed == level_of(difference) == pytest.approx(np.mean(sorted(abs(difference))[:950]))
    assert np.isfinite(figures_of(np.array([1e6, -1e6])).k3)
    assert MIN_TOKENS == 300
