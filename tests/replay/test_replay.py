"""Recorded runs again: trained to the same bits, or sampled again to the same tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.observe.trace.records import (
    EarlierIncarnation,
    RecordManifest,
    RecordWriter,
    WeightsFile,
    read_manifest,
    read_step,
    record_of,
    versions_of,
)
from inflight.observe.trace.steps import RecordedStep, StepOutcome
from inflight.replay.differences import LogprobDifference, StepDifference, step_difference
from inflight.replay.report import described, first_beyond_rounding, first_unequal
from inflight.replay.sampling import compared
from inflight.replay.training import Replayed, check_record, check_tokens, replay_config, replay_incarnations
from inflight.types import Group, Sample
from inflight.wire import Completion, VersionSpan
from tests.replay.test_importing import slime_dump, slime_sample
from tests.replay.test_records import example, spans
from tests.run.runs import CONFIG, RunProcess
from tests.servers import ServerProcess

pytestmark = pytest.mark.timeout(300)


def replay(capsys: pytest.CaptureFixture[str], directory: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """The exit status, what was printed, and the report."""
    file = directory / "replay.json"
    status = main(["replay", str(directory), *words, "--json", str(file)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err, json.loads(file.read_text())


@pytest.mark.usefixtures("forks")
def test_a_run_that_was_killed_records_each_step_once_and_is_trained_again_to_the_same_bits(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--run.record", "true", "--run.num_steps", "4", "--run.checkpoint_every_steps", "2")
    run = RunProcess(tmp_path, model_dir, *words)
    record = run.directory / "record"
    run.wait_until(lambda: (record / "step-000003.safetensors").exists())
    os.kill(run.processes()["controller"], signal.SIGKILL)
    run.wait()
    before = read_step(record, 2)
    resumed = RunProcess(tmp_path, model_dir, *words, "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert versions_of(record) == [1, 2, 3, 4]
    assert repr(read_step(record, 2)) == repr(before)
    items = [group.item_index for version in versions_of(record) for group in read_step(record, version).groups]
    assert len({*items}) == len(items)
    status, told, report = replay(capsys, run.directory)
    assert status == 0, told
    assert report["is_bit_equal"], told
    assert report["final_sha256"] == report["recorded_final_sha256"]
    assert "bit-equal: every metric, gradient norm and trainer logprob of every step" in told
    step = read_step(record, 1)
    assert step.trainer_logprobs is not None
    for sample, logprobs in zip(step.samples, step.trainer_logprobs, strict=True):
        pairs = zip(logprobs, sample.rollout.behaviour_logprobs, strict=True)
        assert all(abs(a - b) < 1e-4 for a, b in pairs)  # float32 on both sides, at lag 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks")
def test_two_ranks_are_bit_equal_and_another_layout_or_trainer_differs_by_rounding(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunProcess(tmp_path, model_dir, "--run.record", "true", "--train.num_ranks", "2", "--run.num_steps", "4")
    assert run.wait() == 0, run.output()
    status, told, report = replay(capsys, run.directory)
    assert (status, report["is_bit_equal"]) == (0, True), told
    for words in (["--ranks", "1"], ["--trainer", "torchtitan"]):
        status, told, report = replay(capsys, run.directory, *words)
        assert status == 0, told
        assert not report["is_bit_equal"]
        assert report["first_unequal"] == 1
        assert "which starts from the same weights" in told
        if report["weights"] is None:  # only the gradient norm was summed in another order, and nothing is clipped
            assert f"final weights: equal, with SHA-256 {report['recorded_final_sha256']}" in told
        else:
            assert report["weights"]["relative"] < 1e-3


@pytest.mark.exhaustive
def test_an_endpoint_with_the_start_weights_samples_the_same_tokens(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunProcess(tmp_path, model_dir, "--run.record", "true", "--run.num_steps", "2")
    assert run.wait() == 0, run.output()
    server = ServerProcess(model_dir, tmp_path / "server")
    try:
        server.wait_until_ready()
        status, told, _ = replay(capsys, run.directory, "--engine", server.url, "--groups", "4")
        assert status == 0, told
        assert "diverge from them" in told
        assert " 0 diverge from them" in told
        assert "completions scored: logprobs of their" in told
        manifest = json.loads((run.directory / "record" / "manifest.json").read_text())
        manifest["config"]["run"]["seed"] = 1
        (run.directory / "record" / "manifest.json").write_text(json.dumps(manifest))
        status, told, rows = replay(capsys, run.directory, "--engine", server.url, "--groups", "4")
        assert status == 1
        assert all(row["parts_at"] is not None for row in rows["sampled"]), told
        # Other seeds, but the recorded tokens have the recorded logprobs.
        assert rows["scored"] and all(row["differs_at"] is None for row in rows["scored"]), told
    finally:
        server.kill()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks")
def test_a_run_that_started_its_ranks_again_is_trained_again_to_the_same_bits(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--run.record", "true", "--run.restarts", "1", "--run.checkpoint_every_steps", "2")
    run = RunProcess(tmp_path, model_dir, *words, "--run.num_steps", "5")
    run.wait_until(lambda: (run.directory / "record" / "step-000003.safetensors").exists())
    os.kill(run.processes()["trainer-0"], signal.SIGKILL)
    assert run.wait() == 0, run.output()
    assert "restart from the last checkpoint" in run.output()
    assert versions_of(run.directory / "record") == [1, 2, 3, 4, 5]
    status, told, report = replay(capsys, run.directory)
    assert (status, report["is_bit_equal"]) == (0, True), told


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks")
def test_an_imported_record_is_trained_on_with_the_configuration_of_a_run(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [*b"spell", *b"lleps"]
    samples = [
        slime_sample(tokens=tokens, response_length=5, reward=reward, rollout_log_probs=[-5.5] * 5)
        for reward in (0.0, 1.0)
    ]
    files = [slime_dump(tmp_path / f"{number}.pt", number, *samples) for number in range(2)]
    assert main(["import", "slime", *files, "--to", str(tmp_path / "imported")]) == 0
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    status, told, report = replay(capsys, tmp_path / "imported", "--config", str(config))
    assert status == 0, told
    assert "cannot be compared" in told
    assert [step["version"] for step in report["steps"]] == [1, 2]
    assert all(step["gradient_norm"] > 0 for step in report["steps"])


# ---------------------------------------------------------------------------------------------------------------
# The parts


def of_run(**changes: Any) -> RecordManifest:
    config = {
        "run": {"directory": "old", "num_steps": 7, "mode": "conventional", "record": True, "restarts": 3},
        "model": {"path": "model"},
        "task": {"name": "spell_backward"},
        "sampling": {"group_size": 80},
        "servers": {"urls": ["http://gone:1"]},
        "rollouts": {"max_lag": 1},
        "train": {"trainer_options": {"cpu_offload": True}, "devices": [3], "num_ranks": 1, "learning_rate": 1.0},
    }
    return RecordManifest(config=config, num_ranks=1, **changes)


def test_a_replay_keeps_what_trains_and_leaves_out_the_rest(tmp_path: Path) -> None:
    config = replay_config(of_run(), tmp_path)
    assert (config.run.num_steps, config.train.learning_rate) == (7, 1.0)
    assert config.train.trainer_options == {"cpu_offload": True}
    assert not config.run.record
    assert config.servers.attach.urls == ()
    assert config.train.devices is None
    other = replay_config(
        of_run(), tmp_path, trainer="torchtitan", num_ranks=2, model=Path("m"), options={"a": 1, "device": "cpu"}
    )
    assert other.train.device == "cpu"
    assert (other.train.trainer_options, other.train.num_ranks, other.model.path) == ({"a": 1}, 2, Path("m"))
    with pytest.raises(
        ConfigError, match=r"not valid for this release or machine: train\.num_ranks: Input should be greater"
    ):
        replay_config(of_run(), tmp_path, num_ranks=0)


def test_training_again_needs_the_start_weights_and_every_step(tmp_path: Path, model_dir: Path) -> None:
    writer = RecordWriter(tmp_path / "record")
    config = replay_config(of_run(), tmp_path, model=model_dir)
    manifest = of_run(start=WeightsFile(path="gone", sha256="0" * 64, size_bytes=1))
    writer.begin(manifest)
    with pytest.raises(ConfigError, match="has no step"):
        check_record(writer.directory, manifest, config)
    writer.write_step(example(1))
    with pytest.raises(ConfigError, match="begins with the step to version 2"):
        check_record(writer.directory, manifest, config)
    writer.write_step(example(0))
    with pytest.raises(ConfigError, match=r"the run began with 0000000000000000\.\.\.: pass the directory"):
        check_record(record_of(tmp_path), read_manifest(writer.directory), config)
    check_record(writer.directory, of_run(), config)
    with pytest.raises(ConfigError, match="ends with the step to version 2, but the run ended with version 3"):
        check_record(writer.directory, of_run(final_version=3), config)
    writer.write_step(example(3))
    with pytest.raises(ConfigError, match="has no step between versions 2 and 4"):
        check_record(writer.directory, of_run(), config)
    check_record(writer.directory, of_run(), config, num_steps=2)
    path = writer.directory / "step-000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"step-000002\.safetensors' is not a recorded step, or is damaged"):
        check_record(writer.directory, of_run(), config, num_steps=2)


def test_each_incarnation_of_a_run_is_trained_as_it_was_configured(tmp_path: Path) -> None:
    last = of_run()
    assert last.config is not None
    earlier = {**last.config, "train": {"learning_rate": 0.5}}
    manifest = of_run(earlier=(EarlierIncarnation(until=3, config=earlier),))
    incarnations = replay_incarnations(manifest, tmp_path, num_ranks=2)
    assert [(incarnation.until, incarnation.config.train.learning_rate) for incarnation in incarnations] == [
        (3, 0.5),
        (None, 1.0),
    ]
    assert {incarnation.config.train.num_ranks for incarnation in incarnations} == {2}
    assert [incarnation.until for incarnation in replay_incarnations(manifest, tmp_path, base=earlier)] == [None]


def test_a_relative_path_of_the_model_starts_from_where_the_run_was(tmp_path: Path, model_dir: Path) -> None:
    manifest = of_run(start=WeightsFile(path=str(model_dir), sha256="0" * 64, size_bytes=1))
    assert replay_config(manifest, tmp_path).model.path == model_dir
    assert replay_config(manifest, tmp_path, model=Path("m")).model.path == Path("m")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "{run}"), "contains a run or a record: choose another directory with --to"),
        (("--to", "{run}/record"), "contains a run or a record: choose another directory with --to"),
        (("--to", "{run}/file"), "cannot be created: Not a directory; choose another directory with --to"),
        (("--json", "{run}/nowhere/x.json"), "cannot be written: its directory does not exist"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_trained(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], says: str
) -> None:
    writer = RecordWriter(tmp_path / "record")
    writer.begin(of_run())
    writer.write_step(example(0))
    (tmp_path / "file").touch()
    arguments = [word.format(run=tmp_path) for word in words]
    assert main(["replay", str(tmp_path), "--model", str(model_dir), *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("forks")
def test_ctrl_c_ends_a_replay_at_once_and_says_so(tmp_path: Path, model_dir: Path) -> None:
    writer = RecordWriter(tmp_path / "record")
    writer.begin(of_run())
    for version in range(500):
        rollout = replace(example().groups[0].rollouts[0], version_spans=spans((0, 3, version)))
        sample = Sample(rollout, [1.0, -1.0, 1.0], [True] * 3)
        writer.write_step(RecordedStep(version, [Group(1, 1, [rollout])], [sample]))
    words = [sys.executable, "-m", "inflight", "replay", str(tmp_path), "--model", str(model_dir)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "step to version" in line)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 130, said + rest
    assert "interrupted: stopping the trainer ranks" in rest
    assert "Traceback" not in rest


def test_tokens_that_the_model_does_not_have_are_told() -> None:
    step = example(1)
    largest = max(max(it.prompt_token_ids + it.completion_token_ids) for group in step.groups for it in group.rollouts)
    check_tokens(step, largest + 1)
    with pytest.raises(ConfigError, match=f"version 2 has token {largest} in item .* vocabulary has {largest}"):
        check_tokens(step, largest)


def outcome(gradient_norm: float, ratio: float = 2.0) -> StepOutcome:
    return StepOutcome(gradient_norm=gradient_norm, learning_rate=1e-3, metrics=({"ratio": [ratio, 2.0]},))


def test_a_difference_says_what_differs_and_by_how_much() -> None:
    step = example()
    assert step_difference(step, outcome(0.1), [[-0.5, 9.0, -0.125]]).is_bit_equal  # the second is no target
    moved = step_difference(step, outcome(0.2, 3.0), [[-0.5, 0.0, -0.25]])
    assert moved.figures == {"gradient_norm": (0.1, 0.2), "ratio": (1.0, 1.5)}
    assert moved.gradient_norm_difference == pytest.approx(0.5)
    assert moved.logprobs == LogprobDifference(num_targets=2, largest=0.125, mean=0.0625, num_equal=1)
    assert moved.exceeds(1e-4)
    assert not moved.exceeds(0.6)


def replayed(*steps: StepDifference) -> Replayed:
    final = WeightsFile(path="b", sha256="1" * 64, size_bytes=1)
    recorded = WeightsFile(path="a", sha256="2" * 64, size_bytes=1)
    return Replayed("torchtitan", 2, "fsdp", 1, "float32", steps, final, recorded, None)


def test_the_report_names_the_first_difference_and_the_first_beyond_rounding() -> None:
    numbered = [example(version) for version in range(5)]
    norms = [0.1, 0.1 + 1e-7, 0.1 + 1e-6, 0.12, 0.3]
    again = replayed(
        *(
            step_difference(step, outcome(norm), [[-0.5, 0.0, -0.125]])
            for step, norm in zip(numbered, norms, strict=True)
        )
    )
    assert (first_unequal(again), first_beyond_rounding(again)) == (2, 4)
    text = described(again)
    assert "5 steps on torchtitan with 2 ranks; recorded on fsdp with 1 rank" in text
    assert "first difference: the step to version 2, after bit-equal steps" in text
    assert (
        "first difference beyond rounding in float32 (0.0001): the step to version 4\n  by gradient norm 0.1 -> 0.12"
        in text
    )
    assert re.findall(r"^(\d)  ", text, re.MULTILINE) == ["1", "2", "4", "5"]


def test_a_completion_parts_where_its_tokens_do() -> None:
    recorded = example().groups[0].rollouts[0]

    def again(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
        spans = (VersionSpan(version=0, start=0, end=len(token_ids)),)
        return Completion(index=0, token_ids=token_ids, logprobs=logprobs, version_spans=spans, finish_reason="stop")

    same = compared(1, 0, recorded, again((72, 105, 33), (-0.5, -0.01, -0.25)), tolerance=1e-3)
    assert (same.parts_at, same.parts_by_logprob_at) == (None, 1)
    other = compared(1, 0, recorded, again((72, 9), (-0.5, -3.0)), tolerance=1e-3)
    assert (other.parts_at, other.recorded_token, other.token, other.logprob) == (1, 105, 9, -3.0)
    shorter = compared(1, 0, recorded, again((72,), (-0.5,)), tolerance=1e-3)
    assert (shorter.parts_at, shorter.recorded_token, shorter.token) == (1, 105, None)
