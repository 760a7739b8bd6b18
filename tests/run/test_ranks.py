"""Several trainer ranks: what they meet over, and what a run indicates when one of them fails."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inflight.errors import CheckpointError, TrainerError, UnreachableError, WorkerDiedError
from inflight.launchers.launcher import ProcessEnd
from inflight.losses import decode_metrics, metric_values
from inflight.run.config import RunConfig, RunSection, load_config
from inflight.run.ranks.channel import encode
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.handshake import Meeting
from inflight.run.ranks.messages import Members, Train, Trained, tensors_of
from inflight.run.ranks.rank import blames_another_rank, collectives_backend
from tests.run import failing_workers
from tests.run.runs import CONFIG, RunProcess, ends_within
from tests.selection import first_of_each
from tests.worker.worker_cases import make_batch

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]
TWO_RANKS = ("--train.num_ranks", "2", "--run.num_steps", "2")


@pytest.mark.parametrize("transport", first_of_each(["gloo", "shm", "file", "http"], lambda _: "any"))
def test_ranks_train_together_however_weights_travel(
    start_run: Callable[..., RunProcess], tmp_path: Path, transport: str
) -> None:
    where = ("--updates.directory", str(tmp_path / "weights")) if transport == "file" else ()
    run = start_run(*TWO_RANKS, "--updates.transport", transport, *where)
    assert run.wait() == 0, run.output()
    assert [row["publish"]["version"] for row in run.rows()] == [1, 2]


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("cuda:3", "cpu:gloo,cuda:nccl")],
)
def test_collectives_of_ranks_are_chosen_by_their_device(device: str, backend: str) -> None:
    assert collectives_backend(device) == backend


def test_a_rank_that_has_not_connected_to_its_run_is_ended_by_a_signal(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_meeting = Meeting.open

    async def open_and_close(*arguments: Any, **named: Any) -> Meeting:
        meeting = await open_meeting(*arguments, **named)
        meeting.close()
        return meeting

    async def stopped() -> list[ProcessEnd | None]:
        group = TrainerGroup(Ranks(tmp_path, model_dir).config(), tmp_path, "token", print)
        await group.spawn()
        await group.stop()
        return [rank.process.ended for rank in group.ranks]

    monkeypatch.setattr(Meeting, "open", open_and_close)
    assert [ended and ended.status for ended in asyncio.run(stopped())] == [-signal.SIGTERM]


# ------------------------------------------------------------------------------------------------ ranks that fail


class Ranks:
    """Trainer ranks without servers: versions are stored, and nobody comes for them."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self._model = model
        self.told: list[str] = []
        self.seconds_failing = 0.0
        self.seconds_stopping = 0.0

    def config(self, *overrides: str) -> RunConfig:
        path = self.directory / "run.toml"
        path.write_text(CONFIG.format(directory=self.directory, model=self._model))
        servers = ("--updates.mode", "pull", "--updates.transport", "file")
        where = ("--updates.directory", str(self.directory / "weights"))
        return load_config(path, (*servers, *where, *overrides))

    def train(self, config: RunConfig, num_steps: int) -> list[list[Trained]]:
        """Return what the ranks answer to each step, or raise what ends the run; then nothing is left running."""
        return asyncio.run(self._train(config, num_steps))

    async def _train(self, config: RunConfig, num_steps: int) -> list[list[Trained]]:
        group = TrainerGroup(config, self.directory, "token", self.told.append)
        await group.spawn()
        started = time.monotonic()
        try:
            await group.load_and_connect(Members(), "run", None)
            answers = []
            for step in range(num_steps):
                started = time.monotonic()
                answers.append(
                    await group.train([frame(step, share, group.num_shares) for share in range(group.num_shares)])
                )
            return answers
        finally:
            failed = time.monotonic()
            await group.stop()
            self.seconds_failing, self.seconds_stopping = failed - started, time.monotonic() - failed
            assert all(rank.process.ended is not None for rank in group.ranks)


def frame(step: int, rank: int, num_ranks: int) -> bytes:
    """A step of one micro-batch."""
    batch = make_batch((9, 4, 17), seed=10 * step + rank)
    batch = dataclasses.replace(batch, group_ids_S=torch.zeros(3, dtype=torch.int64))
    lengths = (batch.segment_lengths,)
    step = Train(segment_lengths=lengths, num_groups=1, num_sequences=3 * num_ranks, publish=None)
    return encode(step, tensors_of([batch]))


@pytest.fixture
def group(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    for name, value in failing_workers.register(tmp_path / "python").items():
        monkeypatch.setenv(name, value)
    return Ranks(tmp_path, model_dir)


def failing(way: str, deaf: bool) -> tuple[str, ...]:
    options = f'{{ way = "{way}", deaf = {str(deaf).lower()} }}'
    return ("--train.num_ranks", "2", "--train.trainer", "failing", "--train.trainer_options", options)


@pytest.mark.parametrize(
    ("way", "deaf", "kind", "says"),
    [
        ("raise_an_error", True, TrainerError, "trainer-1: the worker of the test fails on purpose"),
        ("raise_what_nobody_expects", False, WorkerDiedError, "trainer-1 failed: ZeroDivisionError: .*in backward"),
        ("be_killed", False, WorkerDiedError, "trainer-1 was killed by signal 9"),
    ],
)
def test_a_rank_that_fails_ends_the_wait_at_once_and_is_named_with_what_it_did(
    group: Ranks, way: str, deaf: bool, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=f"(?s){says}") as caught:
        group.train(group.config(*failing(way, deaf)), 2)
    assert type(caught.value) is kind
    assert "trainer-0" not in str(caught.value)
    if kind is WorkerDiedError:
        assert str(caught.value).startswith("while running the backward pass of step 2: ")
    # Of the 900 of run.step_timeout_s, on a busy machine; the ranks that wait for it are not waited for.
    assert group.seconds_failing < 20
    assert group.seconds_stopping < 20


def test_a_rank_that_cannot_be_made_is_named_while_the_other_waits_for_it(group: Ranks) -> None:
    with pytest.raises(TrainerError, match="trainer-1: the worker of the test cannot be made on this rank"):
        group.train(group.config("--train.num_ranks", "2", "--train.trainer", "first-rank-only"), 1)
    assert group.seconds_failing < 100  # and not after run.start_timeout_s, which is 300


def test_a_rank_that_does_not_answer_is_named_with_what_it_does(group: Ranks) -> None:
    overrides = ("--run.step_timeout_s", "10", *failing("stand_still", deaf=False))
    with pytest.raises(
        WorkerDiedError, match=r"no answer within 10 s: .*while running the backward pass of step 2: trainer-1"
    ):
        group.train(group.config(*overrides), 2)


def test_a_rank_that_dies_while_nothing_is_asked_of_it_is_noticed_at_once(group: Ranks) -> None:
    async def kill_one() -> None:
        ranks = TrainerGroup(group.config("--train.num_ranks", "2"), group.directory, "token", print)
        await ranks.spawn()
        try:
            watching = asyncio.ensure_future(ranks.watch())
            await ranks.load_and_connect(Members(), "run", None)
            assert not watching.done()
            ranks.ranks[1].process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(20):
                await watching
        finally:
            await ranks.stop()

    with pytest.raises(WorkerDiedError, match=r"^trainer-1 was killed by signal 9"):
        asyncio.run(kill_one())


def test_the_last_words_of_a_rank_alone_are_its_own(group: Ranks) -> None:
    overrides = ("--train.trainer", "failing", "--train.trainer_options", '{ way = "raise_an_error" }')
    with pytest.raises(TrainerError, match=r"^the worker of the test fails on purpose$"):
        group.train(group.config(*overrides), 2)


def test_ranks_that_share_rows_train_as_one_rank_does(group: Ranks) -> None:
    alone = group.train(group.config(), 2)
    shared = ("--train.num_ranks", "2", "--train.trainer_options", "{ context_parallel = 2 }")
    together = group.train(group.config(*shared), 2)
    for [one], [first, second] in zip(alone, together, strict=True):
        assert first.gradient_norm == second.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)  # float32
        found, expected = (metric_values(decode_metrics(answer.metrics)) for answer in (first, one))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert second.metrics == {}


@pytest.mark.exhaustive
def test_the_run_is_told_which_share_of_updates_masters_in_bfloat16_lose(group: Ranks) -> None:
    overrides = ("--model.dtype", "bfloat16", "--train.master_dtype", "bfloat16", "--train.learning_rate", "1e-6")
    answers = group.train(group.config("--train.num_ranks", "2", *overrides), 4)
    values = [metric_values(decode_metrics(answer[0].metrics))["rounded_away"] for answer in answers]
    assert min(values) > 0.95
    attention, at_start, later = group.told
    assert attention.startswith("trainer's attention in bfloat16 on cpu: torch's")
    assert "an update smaller than 1/512 of its weight is rounded away" in at_start
    assert re.match(r"9\d\.\d% of the updates of 3 steps were rounded away", later)


def test_the_run_is_told_once_which_kernel_computes_the_trainer_s_attention(group: Ranks) -> None:
    group.train(group.config(), 1)
    (told,) = group.told
    assert told.startswith("trainer's attention in float32 on cpu: torch's")


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp: remote process exited"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (CheckpointError("no checkpoint was written to x: RuntimeError: [gloo/transport/tcp/pair.cc:553] x"), True),
        (RuntimeError("CUDA out of memory"), False),
        (UnreachableError("Connection reset by peer", "http://server"), False),
    ],
)
def test_an_error_of_a_collective_blames_another_rank(error: Exception, blames: bool) -> None:
    assert blames_another_rank(error) is blames


def test_all_ranks_start_again_from_the_last_checkpoint_while_the_servers_stay(
    start_run: Callable[..., RunProcess],
) -> None:
    settings = ("--run.restarts", "1", "--run.checkpoint_every_steps", "2", "--run.num_steps", "7")
    run = start_run("--train.num_ranks", "2", *settings)
    run.wait_for_steps(3)
    before = run.processes()
    os.kill(before["trainer-1"], signal.SIGKILL)
    run.wait_for_output("all trainer ranks restart from the last checkpoint")
    run.wait_for_steps(3)
    assert run.wait() == 0, run.output()
    assert "trainer-1 was killed by signal 9" in run.output()
    assert [row["version"] for row in run.rows()] == list(range(1, 8))
    assert run.servers() == [before["server-0"]]
    last = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = last["num_trained"] + sum(last["num_dropped"].values())
    assert last["next_new"] == settled + len(last["unsettled"])
    assert all(ends_within(pid, 5.0) for pid in run.servers())


def test_a_run_saves_after_a_time_and_survives_a_lost_rank_by_default(start_run: Callable[..., RunProcess]) -> None:
    assert (RunSection(directory=Path("run")).restarts, RunSection(directory=Path("run")).checkpoint_every_s) == (3, 60)
    settings = ("--run.checkpoint_every_steps", "100000", "--run.checkpoint_every_s", "0.001", "--run.restarts", "3")
    run = start_run("--run.num_steps", "100000", *settings)
    run.wait_for_events("checkpoint_saved", lambda event: True)
    os.kill(run.processes()["trainer-0"], signal.SIGKILL)
    run.wait_for_output("all trainer ranks restart from the last checkpoint")
    run.wait_for_events("run_started", lambda event: event["version"] > 0)
    run.interrupt()
    assert run.wait() == 130, run.output()


def test_a_rank_that_is_lost_before_the_first_step_ends_the_run(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.restarts", "3", "--task.name", "tests.run.tasks:always_zero", "--run.num_steps", "100000")
    run.wait_for_events("item_dropped", lambda event: event["reason"] == "equal rewards")
    os.kill(run.processes()["trainer-0"], signal.SIGKILL)
    assert run.wait() == 1, run.output()
    assert "restart from the last checkpoint" not in run.output()


def test_a_run_ends_at_once_when_a_rank_is_killed_that_the_others_wait_for(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    environment = failing_workers.register(tmp_path / "python")
    run = start_run(*failing("be_killed", deaf=True), "--run.num_steps", "100000", environment=environment)
    assert run.wait() == 1, run.output()
    first_step = (run.directory / "metrics.jsonl").stat().st_mtime
    assert time.time() - first_step < 60  # of the 900 of run.step_timeout_s, on a busy machine
    assert [row["version"] for row in run.rows()] == [1]
    assert "while running the backward pass of step 2: trainer-1 was killed by signal 9" in run.output()
    assert all(ends_within(pid, 5.0) for pid in run.servers())
