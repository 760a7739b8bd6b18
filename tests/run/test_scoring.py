"""Rewards from processes of their own are those of the run's process, and a process that fails costs what it must."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.errors import TaskError
from inflight.rollouts.tasks import AS_GIVEN
from inflight.run.sampling.scoring import ScoringPool
from tests.gates import Gate

ROOT = Path(__file__).parents[2]
COMPLETIONS = [tuple(b"eeee"), tuple(b"none at all, but some"), ()]
REWARDS = [text.count("e") / max(1, len(text)) for text in ("eeee", "none at all, but some", "")]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "src", ROOT))))


@contextlib.asynccontextmanager
async def pool(tmp_path: Path, **params: Any) -> AsyncIterator[ScoringPool]:
    byte_tokenizer().save_pretrained(tmp_path)
    made = ScoringPool(1, "tests.run.tasks:count_letters", params, 0, AS_GIVEN, tmp_path, start_timeout_s=120)
    try:
        yield made
    finally:
        await made.aclose()


def test_a_process_scores_as_the_run_does_and_goes_on_after_an_exception(tmp_path: Path) -> None:
    async def score() -> None:
        async with pool(tmp_path, fail_from=2) as rewards:
            assert await rewards.rewards(0, COMPLETIONS, 60) == REWARDS
            with pytest.raises(TaskError, match="raised on item 2: ZeroDivisionError"):
                await rewards.rewards(2, COMPLETIONS, 60)
            several = await asyncio.gather(*(rewards.rewards(1, COMPLETIONS, 60) for _ in range(20)))
            assert several == [REWARDS] * 20

    asyncio.run(score())


@pytest.mark.exhaustive
def test_a_process_that_hangs_or_is_killed_is_replaced(tmp_path: Path) -> None:
    async def score() -> None:
        gate = Gate(tmp_path / "gate").close()
        async with pool(tmp_path, hang_from=2, gate=str(gate.path)) as rewards:
            with pytest.raises(TimeoutError):
                await rewards.rewards(2, COMPLETIONS, 0.5)
            gate.close()  # nobody has come to it since
            assert await rewards.rewards(0, COMPLETIONS, 60) == REWARDS
            hanging = asyncio.ensure_future(rewards.rewards(3, COMPLETIONS, 60))
            await asyncio.to_thread(gate.wait_for_somebody)
            (process,) = rewards._all
            process.child.kill()
            with pytest.raises(TaskError, match="ended with status -9 while item 3 was scored"):
                await hanging
            assert await rewards.rewards(1, COMPLETIONS, 60) == REWARDS

    asyncio.run(score())
