"""A real run is healthy, and faults that are planted in its record are named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.cli import main
from inflight.doctor.records import StepRecords, TokenRecords, read_differences
from inflight.errors import ConfigError
from inflight.observe.trace.records import RecordManifest, RecordWriter, read_step, read_steps
from inflight.observe.trace.steps import RecordedStep
from inflight.types import Group, Rollout, Sample, Turn
from inflight.wire import VersionSpan
from tests.run.runs import RunProcess
from tests.sharing import made_once

pytestmark = pytest.mark.timeout(300)

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def finished(forks: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a recorded run with two servers, in which every token has lag 0 and no weight changes."""
    words: tuple[str, ...] = (
        "--run.record",
        "true",
        "--run.mode",
        "conventional",
        "--run.num_steps",
        "4",
        "--servers.count",
        "2",
    )
    words += ("--train.tokens_per_worker", "1200")  # few large steps: servers wait between steps
    words += ("--train.learning_rate", "1e-30", "--sampling.temperature", str(TEMPERATURE))

    def make(directory: Path) -> None:
        run = RunProcess(directory, model_dir, *words)
        assert run.wait() == 0, run.output()

    return made_once(tmp_path_factory, "recorded-run", make) / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def diagnose(capsys: pytest.CaptureFixture[str], directory: Path) -> tuple[int, str, dict[str, Any]]:
    """Return the exit status, what was printed, and the diagnosis."""
    file = directory / "diagnosis.json"
    status = main(["doctor", str(directory), "--json", str(file)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err, json.loads(file.read_text())


def plant(directory: Path, change: Callable[[RecordedStep, Rollout, str], Rollout]) -> None:
    """Replace the rollouts of a record."""
    writer = RecordWriter(directory / "record")
    for step in [*read_steps(writer.directory)]:
        changed = {id(it): change(step, it, group.endpoint) for group in step.groups for it in group.rollouts}
        groups = [dataclasses.replace(it, rollouts=[changed[id(one)] for one in it.rollouts]) for it in step.groups]
        samples = [dataclasses.replace(it, rollout=changed[id(it.rollout)]) for it in step.samples]
        writer.write_step(dataclasses.replace(step, groups=groups, samples=samples))


def with_logprobs(rollout: Rollout, logprobs: Any) -> Rollout:
    return dataclasses.replace(rollout, behaviour_logprobs=np.asarray(logprobs).tolist())


def test_a_run_is_healthy(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, diagnosis = diagnose(capsys, finished)
    assert (status, diagnosis["verdict"], diagnosis["findings"]) == (0, "no drift", []), printed
    figures = diagnosis["parts"]["all tokens at lag 0"]
    assert figures["num_tokens"] > 3000
    assert figures["mean"] < 1e-5  # float32, the same kernels on both sides
    assert len([name for name in diagnosis["parts"] if name.startswith("from http")]) == 2
    assert "No drift" in printed.splitlines()[0]


def test_what_is_read_is_what_was_recorded(finished: Path) -> None:
    records = read_differences(finished)
    assert isinstance(records, TokenRecords)
    seen, steps = records.observations, [*read_steps(finished / "record")]
    assert len(seen) == sum(sum(sample.loss_mask) for step in steps for sample in step.samples)
    assert (records.num_stale, records.num_unusable, records.settings.dtype) == (0, 0, "float32")
    assert records.settings.mode == "conventional"
    assert {*seen.temperature_N.tolist()} == {TEMPERATURE}
    assert {*seen.version_N.tolist()} == {*range(4)} == {*records.settings.learning_rates}
    assert {seen.endpoints[i] for i in seen.endpoint_N} == {it.endpoint for step in steps for it in step.groups}
    first, trained = steps[0].samples[0], steps[0].trainer_logprobs
    assert trained is not None
    difference = np.float64(trained[0][5]) - np.float64(first.rollout.behaviour_logprobs[5])
    assert (seen.difference_N[5], seen.position_N[5], seen.since_boundary_N[5]) == (difference, 5, -1)


def test_a_run_without_a_record_is_judged_by_its_metrics(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = read_differences(copied)
    shutil.rmtree(copied / "record")
    steps = read_differences(copied)
    assert isinstance(steps, StepRecords)
    assert isinstance(tokens, TokenRecords)
    assert sum(step.num_tokens for step in steps.steps) == len(tokens.observations)
    status, printed, diagnosis = diagnose(capsys, copied)
    assert (status, diagnosis["verdict"]) == (0, "no drift"), printed
    assert "endpoints, positions, span boundaries, signs and single tokens cannot be judged" in printed


def test_logprobs_of_one_endpoint_that_are_shifted_are_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, bad = np.random.default_rng(0), read_step(copied / "record", 1).groups[0].endpoint

    def shift(_: RecordedStep, rollout: Rollout, endpoint: str) -> Rollout:
        noise = rng.normal(0, 0.05, len(rollout.behaviour_logprobs)) * (bad in endpoint)
        return with_logprobs(rollout, rollout.behaviour_logprobs + noise)

    plant(copied, shift)
    status, printed, diagnosis = diagnose(capsys, copied)
    first, *others = diagnosis["findings"]
    assert (status, first["shape"], first["suspects"], others) == (1, "one endpoint", [2, 10], []), printed
    assert f"{bad} 0.0" in first["evidence"]
    assert "2. weights are not loaded" in printed


def test_raw_logprobs_of_a_lower_temperature_are_named(
    copied: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine sampled at 0.7, and its logprobs are those at temperature 1; weights are the same in each version."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def raw(_: RecordedStep, rollout: Rollout, endpoint: str) -> Rollout:
        prompt, completion = [*rollout.prompt_token_ids], [*rollout.completion_token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        at = torch.tensor(completion).unsqueeze(1)
        scaled = (logits / TEMPERATURE).log_softmax(-1).gather(1, at).squeeze(1).numpy()
        assert np.abs(scaled - rollout.behaviour_logprobs).max() < 1e-4  # float32
        return with_logprobs(rollout, logits.log_softmax(-1).gather(1, at).squeeze(1).numpy())

    plant(copied, raw)
    status, printed, diagnosis = diagnose(capsys, copied)
    assert status == 1, printed
    assert diagnosis["findings"][0]["suspects"] == [5, 3], printed
    assert "1.43 times as large" in diagnosis["findings"][0]["evidence"]


def test_a_difference_after_span_boundaries_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)

    def split(step: RecordedStep, rollout: Rollout, endpoint: str) -> Rollout:
        length = len(rollout.completion_token_ids)
        if step.version == 0 or length < 12 or rollout.completion_token_ids[0] % 2:
            return rollout
        spans = (
            VersionSpan(start=0, end=10, version=step.version - 1),
            VersionSpan(start=10, end=length, version=step.version),
        )
        noise = rng.normal(0, 0.05, length) * (np.arange(length) >= 10)
        return dataclasses.replace(with_logprobs(rollout, rollout.behaviour_logprobs + noise), version_spans=spans)

    plant(copied, split)
    for policy, severity, verdict in (("keep", "note", "no drift"), ("recompute", "fault", "drift")):
        manifest = json.loads((copied / "record" / "manifest.json").read_text())
        manifest["config"]["updates"] = {"in_flight": policy}
        (copied / "record" / "manifest.json").write_text(json.dumps(manifest))
        _, printed, diagnosis = diagnose(capsys, copied)
        (finding,) = diagnosis["findings"]
        assert (finding["shape"], finding["severity"]) == ("only after span boundaries", severity), printed
        assert diagnosis["verdict"] == verdict, printed


def test_fillers_in_place_of_logprobs_are_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fill(_: RecordedStep, rollout: Rollout, endpoint: str) -> Rollout:
        return with_logprobs(rollout, [-9999.0, *rollout.behaviour_logprobs[1:]])

    plant(copied, fill)
    status, printed, diagnosis = diagnose(capsys, copied)
    assert (status, diagnosis["findings"][0]["shape"]) == (1, "tokens without logprobs"), printed
    assert diagnosis["parts"]["all tokens at lag 0"]["mean"] < 1e-5


@pytest.mark.parametrize(
    ("spans", "turns", "distances"),
    [
        ([(0, 5, 3)], (), [-1] * 5),
        ([(0, 2, 2), (2, 5, 3)], (), [0, 1, 2]),
        ([(0, 2, 2), (3, 5, 3)], (), [-1, -1]),  # an observation lies between them
        ([(0, 2, 2), (2, 5, 3)], (Turn(0, 2, None), Turn(2, 5, None)), [-1] * 3),
        ([(0, 1, 1), (1, 2, 2), (2, 4, 3), (4, 5, 3)], (), [0, 1, 2]),
    ],
)
def test_a_boundary_is_a_change_of_version_within_a_turn(
    tmp_path: Path, spans: list[tuple[int, int, int]], turns: tuple[Turn, ...], distances: list[int]
) -> None:
    version_spans = [VersionSpan(start=start, end=end, version=version) for start, end, version in spans]
    rollout = Rollout([1], [2] * 5, [-1.0] * 5, version_spans, "stop", 0.0, 1.0, turns=turns)
    sample = Sample(rollout, [1.0] * 5, [True] * 5)
    writer = RecordWriter(tmp_path)
    writer.begin(RecordManifest())
    step = RecordedStep(3, [Group(0, 0, [rollout], "a,b")], [sample])
    writer.write_step(step)
    with pytest.raises(ConfigError, match="has no trainer logprobs"):
        read_differences(tmp_path)
    writer.write_step(dataclasses.replace(step, trainer_logprobs=[[-1.5] * 5]))
    records = read_differences(tmp_path)
    assert isinstance(records, TokenRecords)
    assert records.observations.since_boundary_N.tolist() == distances
    assert records.num_stale == sum(end - start for start, end, version in spans if version < 3)
    assert {*records.observations.endpoint_N.tolist()} == {-1}
    assert {*records.observations.difference_N.tolist()} == {-0.5}


def test_the_exit_status_for_damaged_records_is_2(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged record is not treated as healthy or as missing."""

    def refusal(directory: Path) -> str:
        assert main(["doctor", str(directory)]) == 2
        return capsys.readouterr().err

    record = copied / "record"
    (record / "step-000004.safetensors").unlink()
    assert "it ends at version 3, but the run ended at version 4" in refusal(copied)
    (record / "manifest.json").unlink()
    assert "is damaged: it has 3 recorded steps but no manifest.json" in refusal(copied)
    assert "is damaged" in refusal(record)
    shutil.rmtree(record)
    for damaged in ('{"updates": {"in_flight": "later"}}', '{"run": 3}', "[]"):
        (copied / "config.json").write_text(damaged)
        assert "does not contain the configuration of a run" in refusal(copied)


def test_directories_without_a_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="contains neither a run nor a record"):
        read_differences(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 2
    assert main(["doctor", str(tmp_path / "missing")]) == 2
    assert "is not a directory: specify the directory of a run" in capsys.readouterr().err
