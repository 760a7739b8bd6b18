"""Publishes that overlap training: forward and backward passes run during a publish, and the optimizer waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.errors import ConfigError, FencedError, WorkerDiedError
from inflight.http.client import HttpEndpoint
from inflight.run.config import load_config
from inflight.run.ranks.channel import encode
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import Members, PublishResult, Start, Train, Trained, tensors_of
from inflight.run.ranks.publishing import publishing_of
from inflight.run.servers.checks import needs_of
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import BucketSpec, Sharding, WeightVersion
from tests.gates import GatedServer, until
from tests.run import noted_calls
from tests.run.runs import CONFIG, RunProcess
from tests.servers import TOKEN, ServerProcess
from tests.worker.worker_cases import make_batch

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]

OVERLAP = ("--updates.overlap", "true")
LORA = ("--train.lora.rank", "4", "--train.lora.alpha", "8", "--train.lora.targets", "all-linear")
TWO_RANKS = ("--train.num_ranks", "2", "--updates.sharded", "true")


@pytest.fixture
def server(tmp_path: Path, model_dir: Path) -> Iterator[GatedServer]:
    made = GatedServer(model_dir, tmp_path / "server")
    made.wait_until_ready()
    yield made
    made.kill()


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    return path


# ------------------------------------------------------------------------------------------------- the trainer's ranks


class Trainer:
    """The ranks of a run with one server, which train as often as a test says."""

    def __init__(self, group: TrainerGroup, url: str) -> None:
        self.group = group
        self.members = Members(urls=(url,))
        self._num_steps = 0

    async def step(self) -> Trained:
        """Return rank 0's answer to one step."""
        self._num_steps += 1
        frames = []
        for share in range(self.group.num_shares):
            batch = make_batch((9, 4, 17), seed=10 * self._num_steps + share)
            batch = replace(batch, group_ids_S=torch.zeros(3, dtype=torch.int64))
            request = Train(
                segment_lengths=(batch.segment_lengths,),
                num_groups=1,
                num_sequences=3 * self.group.num_shares,
                publish=self.members,
            )
            frames.append(encode(request, tensors_of([batch])))
        return (await self.group.train(frames))[0]

    async def publish(self) -> PublishResult:
        published = (await self.group.publish(self.members)).published
        assert published is not None
        return published

    async def until_it_waits(self, version: int, training: asyncio.Future[Any]) -> None:
        """Return once every rank waits for a publish; fail if a rank takes the next step instead."""
        waits, steps = f"publishing version {version}", f"running the optimizer for step {version + 1}"
        await until(lambda: training.done() or all(rank.doing in (waits, steps) for rank in self.group.ranks))
        assert [rank.doing for rank in self.group.ranks] == [waits] * len(self.group.ranks)


def with_trainer(config_file: Path, url: str, call: Callable[[Trainer], Awaitable[None]], *overrides: str) -> None:
    """Make a call with ranks whose publishes overlap training and that have published version 0."""

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[Trainer]:
        config = load_config(config_file, ["--servers.attach.urls", json.dumps([url]), *OVERLAP, *overrides])
        group = TrainerGroup(config, config_file.parent, TOKEN, print)
        await group.spawn()
        try:
            trainer = Trainer(group, url)
            await group.load_and_connect(trainer.members, "overlap", None)
            yield trainer
        finally:
            await group.stop()

    async def conversation() -> None:
        async with started() as trainer:
            await call(trainer)

    asyncio.run(conversation())


async def version_of(server: ServerProcess) -> WeightVersion:
    endpoint = HttpEndpoint(server.url, token=TOKEN)
    try:
        return await endpoint.weight_version()
    finally:
        await endpoint.aclose()


@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one rank", "two ranks"])
def test_forward_and_backward_run_during_a_publish_and_the_step_waits_for_it(
    config_file: Path, server: GatedServer, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    notes, num_ranks = tmp_path / "calls", 2 if ranks else 1

    async def scene(trainer: Trainer) -> None:
        server.gate.close()
        first = await trainer.step()
        assert (first.version, first.published) == (1, None)
        await asyncio.to_thread(server.gate.wait_for_somebody)
        training = asyncio.create_task(trainer.step())
        await trainer.until_it_waits(1, training)
        assert (await version_of(server)).version == 0
        for rank in range(num_ranks):
            assert noted_calls.calls(notes, rank)[-2:] == ["forward at version 1", "backward at version 1"]
        server.gate.open()
        second = await training
        assert noted_calls.calls(notes)[-1] == "step at version 1"
        assert second.version == 2
        assert second.published is not None
        assert (second.published.version, second.published.endpoints) == (1, (server.url,))
        assert (await trainer.publish()).version == 2
        assert (await version_of(server)).version == 2

    with_trainer(config_file, server.url, scene, *ranks, *noted_calls.settings(notes))


def test_a_save_waits_for_a_publish_whose_result_comes_with_the_next_step(
    config_file: Path, server: GatedServer, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"

    async def scene(trainer: Trainer) -> None:
        server.gate.close()
        await trainer.step()
        saving = asyncio.create_task(trainer.group.save(checkpoint))
        await trainer.until_it_waits(1, saving)
        assert not checkpoint.exists()
        server.gate.open()
        (saved,) = await saving
        assert (saved.saved, saved.published) == (1, None)
        second = await trainer.step()
        assert second.published is not None
        assert second.published.version == 1

    with_trainer(config_file, server.url, scene)


def test_the_error_of_a_publish_is_raised_by_the_next_step(
    config_file: Path, server: GatedServer, model_dir: Path
) -> None:
    """The servers belong to a later incarnation of the trainer, which this one learns from its publish."""

    def take_over() -> None:
        weights = ModuleWeights(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), version=7)
        with WeightPublisher.connect([server.url], run_id="overlap", token=TOKEN, transport="shm") as publisher:
            publish_weights(weights, publisher)

    async def scene(trainer: Trainer) -> None:
        await asyncio.to_thread(take_over)
        assert (await trainer.step()).version == 1
        with pytest.raises(FencedError, match="incarnation 2 has taken over"):
            await trainer.step()

    with_trainer(config_file, server.url, scene)


def test_a_publish_that_reaches_nobody_is_reported_by_the_next_step(config_file: Path, server: GatedServer) -> None:
    async def scene(trainer: Trainer) -> None:
        server.gate.close()
        await trainer.step()
        await asyncio.to_thread(server.gate.wait_for_somebody)
        server.kill()
        second = await trainer.step()
        assert second.published is not None
        assert (second.published.version, second.published.is_published) == (1, False)
        assert second.published.removed == (server.url,)

    with_trainer(config_file, server.url, scene)


@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_rank_that_is_killed_during_a_publish_is_named_with_it(
    config_file: Path, server: GatedServer, ranks: tuple[str, ...]
) -> None:
    async def scene(trainer: Trainer) -> None:
        server.gate.close()
        await trainer.step()
        await asyncio.to_thread(server.gate.wait_for_somebody)
        training = asyncio.create_task(trainer.step())
        await trainer.until_it_waits(1, training)
        trainer.group.ranks[-1].process.send_signal(signal.SIGKILL)
        last = len(trainer.group.ranks) - 1
        with pytest.raises(WorkerDiedError, match=f"while publishing version 1: trainer-{last} was killed by signal 9"):
            await training
        server.gate.open()

    with_trainer(config_file, server.url, scene, *ranks)


# ------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(
    "more",
    [
        ("--run.record", "true", "--run.background_saves", "true", "--evaluation.num_items", "2"),
        (*TWO_RANKS, "--updates.delta", "true", "--updates.transport", "http"),
        pytest.param(LORA, marks=pytest.mark.exhaustive),
        pytest.param(("--updates.encoding", "float8", "--updates.transport", "shm"), marks=pytest.mark.exhaustive),
    ],
    ids=["one rank", "two ranks", "lora", "float8"],
)
def test_a_run_publishes_every_version_once_and_the_last_one_before_it_ends(
    start_run: Callable[..., RunProcess], more: tuple[str, ...]
) -> None:
    # Caches of older versions would change the logprobs of running completions, by more the longer a step takes.
    run = start_run(*OVERLAP, "--updates.in_flight", "recompute", *more)
    assert run.wait() == 0, run.output()
    rows, summary = run.rows(), run.summary()
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["publish"] and row["publish"]["version"] for row in rows] == [None, 1, 2, 3, 4, 5]
    assert [event["version"] for event in run.events("publish")] == [0, 1, 2, 3, 4, 5, 6]
    assert all(0 <= row["lag_max"] <= 8 for row in rows)
    exact = 1e-2 if "float8" in more else 1e-10  # float32 on both sides
    assert all(row.get("mismatch_k3", 0.0) < exact for row in rows)
    state = json.loads((run.directory / "checkpoints" / "version-000006.json").read_text())
    ledger = state["ledger"]
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])
    assert summary["ledger"]["trained"] == ledger["num_trained"] >= 6


@pytest.mark.parametrize("ranks", [(), pytest.param(TWO_RANKS, marks=pytest.mark.exhaustive)], ids=["one", "two"])
def test_a_run_whose_rank_is_killed_during_a_publish_restarts_from_its_checkpoint(
    start_run: Callable[..., RunProcess], server: GatedServer, ranks: tuple[str, ...]
) -> None:
    words = ("--servers.attach.urls", json.dumps([server.url]), "--run.restarts", "1", "--run.num_steps", "8")
    run = start_run(*OVERLAP, *words, *ranks, environment={"INFLIGHT_TOKEN": TOKEN})
    run.wait_for_steps(3)
    server.gate.close()
    run.wait_until(lambda: server.gate.waiting() is not None)
    os.kill(run.processes()["trainer-1" if ranks else "trainer-0"], signal.SIGKILL)
    run.wait_for_output("all trainer ranks restart from the last checkpoint")
    server.gate.open()
    assert run.wait() == 0, run.output()
    assert [row["version"] for row in run.rows()] == list(range(1, 9))
    assert asyncio.run(version_of(server)).version == 8


def test_an_interrupted_run_has_published_its_last_version(
    start_run: Callable[..., RunProcess], server: GatedServer
) -> None:
    words = ("--servers.attach.urls", json.dumps([server.url]), "--run.num_steps", "100000")
    run = start_run(*OVERLAP, *words, environment={"INFLIGHT_TOKEN": TOKEN})
    run.wait_for_steps(2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert asyncio.run(version_of(server)).version == run.summary()["version"]


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("--run.mode", "conventional"), "leave out updates.overlap, or set run.mode to 'pipeline'"),
        (("--train.num_ranks", "2"), "set updates.sharded to true, or leave out updates.overlap"),
        (
            (*TWO_RANKS, *LORA),
            "updates.overlap is not supported for a LoRA with train.num_ranks 2",
        ),
        (
            ("--updates.mode", "pull", "--updates.transport", "file", "--updates.directory", "/x"),
            "updates.mode 'pull' stores versions before the next step: leave out updates.overlap",
        ),
    ],
    ids=str,
)
def test_training_that_cannot_run_during_a_publish_is_refused(
    config_file: Path, overrides: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(config_file, [*OVERLAP, *overrides])


def test_servers_must_receive_parts_if_several_ranks_publish_while_they_train(config_file: Path) -> None:
    assert needs_of(load_config(config_file, [*OVERLAP, *TWO_RANKS]), 258).sharded
    assert not needs_of(load_config(config_file, OVERLAP), 258).sharded
    assert not needs_of(load_config(config_file, TWO_RANKS), 258).sharded


class GatheredWeights(ModuleWeights):
    """Weights of two ranks that cannot send what they hold, as of a trainer that permutes a parameter."""

    def shardings(self) -> tuple[Sharding, ...]:
        return ()

    def local_weights(self, buckets: Sequence[BucketSpec]) -> NoReturn:
        raise AssertionError("the shardings are empty")

    exchange = local_weights


@pytest.mark.parametrize(
    ("worker", "overrides", "expected"),
    [
        (ModuleWeights(torch.nn.Linear(2, 2)), (), "ModuleWeights is not a ShardedWeightSource"),
        (
            GatheredWeights(torch.nn.Linear(2, 2), world_size=2),
            TWO_RANKS,
            "the ranks of GatheredWeights cannot send the weights of this model that they .*leave out updates.overlap",
        ),
    ],
    ids=["no parts", "permuted"],
)
def test_a_worker_whose_weights_cannot_be_read_while_it_trains_is_refused(
    config_file: Path, worker: Any, overrides: tuple[str, ...], expected: str
) -> None:
    config = load_config(config_file, [*OVERLAP, *overrides])
    start = Start(config=config, run_id="overlap", members=Members(), checkpoint=None, rendezvous="")
    with pytest.raises(ConfigError, match=expected):
        publishing_of(worker, start, 60.0)
