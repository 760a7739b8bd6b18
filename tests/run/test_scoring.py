"""Rewards from processes of their own are those of the run's process, and a process that fails costs what it must."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.errors import TaskError
from inflight.rollouts.curriculum import Curriculum
from inflight.rollouts.tasks import TaskSettings
from inflight.run.sampling.scoring import _HEAD, ScoringPool, _Answering
from inflight.types import TaskItem
from tests.gates import Gate

pytestmark = pytest.mark.usefixtures("forks")

ROOT = Path(__file__).parents[2]
COMPLETIONS = [tuple(b"eeee"), tuple(b"none at all, but some"), ()]
REWARDS = [text.count("e") / max(1, len(text)) for text in ("eeee", "none at all, but some", "")]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "src", ROOT))))


@contextlib.asynccontextmanager
async def pool(tmp_path: Path, **params: Any) -> AsyncIterator[ScoringPool]:
    byte_tokenizer().save_pretrained(tmp_path)
    task = TaskSettings(name="tests.run.tasks:count_letters", params=params)
    made = ScoringPool(1, task, 0, tmp_path, start_timeout_s=120)
    try:
        yield made
    finally:
        await made.aclose()


def test_a_process_scores_as_the_run_does_and_goes_on_after_an_exception(tmp_path: Path) -> None:
    async def score() -> None:
        async with pool(tmp_path, fail_from=2) as rewards:
            assert await rewards.rewards(TaskItem(0, ""), COMPLETIONS, 60, "the reward") == REWARDS
            with pytest.raises(TaskError, match="raised on item 2: ZeroDivisionError"):
                await rewards.rewards(TaskItem(2, ""), COMPLETIONS, 60, "the reward")
            several = await asyncio.gather(
                *(rewards.rewards(TaskItem(1, ""), COMPLETIONS, 60, "the reward") for _ in range(20))
            )
            assert several == [REWARDS] * 20

    asyncio.run(score())


def test_an_answer_that_is_ready_after_the_run_has_ended_is_dropped_without_a_traceback() -> None:
    here, there = socket.socketpair()
    task = TaskSettings(name="tests.run.tasks:count_letters").load(0)
    with there:
        here.close()
        _Answering(there, task, byte_tokenizer()).answer_calls(io.BytesIO(_HEAD.pack(1, 0, 0, 0)), "in turn")


def test_a_run_that_ends_before_it_has_read_every_answer_ends_the_process_without_a_traceback() -> None:
    here, there = socket.socketpair()
    task = TaskSettings(name="tests.run.tasks:count_letters").load(0)
    with there, there.makefile("rb") as stream:
        there.sendall(b"an answer")
        here.close()  # with bytes that were not read, which resets the connection
        _Answering(there, task, byte_tokenizer()).answer_calls(stream, "in turn")


@pytest.mark.exhaustive
def test_a_process_that_hangs_or_is_killed_is_replaced(tmp_path: Path) -> None:
    async def score() -> None:
        gate = Gate(tmp_path / "gate").close()
        async with pool(tmp_path, hang_from=2, gate=str(gate.path)) as rewards:
            with pytest.raises(TaskError, match=r"the reward took longer than 0.5 s"):
                await rewards.rewards(TaskItem(2, ""), COMPLETIONS, 0.5, "the reward")
            gate.close()  # nobody has come to it since
            assert await rewards.rewards(TaskItem(0, ""), COMPLETIONS, 60, "the reward") == REWARDS
            hanging = asyncio.ensure_future(rewards.rewards(TaskItem(3, ""), COMPLETIONS, 60, "the reward"))
            await asyncio.to_thread(gate.wait_for_somebody)
            (process,) = rewards._all
            process.child.kill()
            with pytest.raises(TaskError, match="ended with status -9: the reward"):
                await hanging
            assert await rewards.rewards(TaskItem(1, ""), COMPLETIONS, 60, "the reward") == REWARDS

    asyncio.run(score())


def test_a_process_makes_the_items_of_a_curriculum_at_their_level(tmp_path: Path) -> None:
    async def score() -> None:
        byte_tokenizer().save_pretrained(tmp_path)
        settings = TaskSettings(name="chain_sum", levels=5)
        made, task = ScoringPool(1, settings, 0, tmp_path, start_timeout_s=120), settings.load(0)
        assert isinstance(task, Curriculum)
        try:
            for level in (0, 4):
                item = task.item_at(level, 7)
                assert await made.rewards(item, [tuple((item.answer or "").encode())], 60, "it") == [1.0]
        finally:
            await made.aclose()

    asyncio.run(score())
