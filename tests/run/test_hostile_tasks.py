"""Tasks that block, raise what nobody expects, or return nonsense: the run ends with the cause, or continues."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.base.threads import run_abandonable
from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.environments.play_loop import PlayLoop
from inflight.errors import TaskError
from inflight.rollouts.tasks import TaskSettings
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.scoring import ScoringPool
from inflight.wire import Completion, SamplingParams, VersionSpan
from tests.run.runs import ROOT, RunProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]

SAMPLED = Completion(
    index=0,
    token_ids=(101,),
    logprobs=(-1.0,),
    version_spans=(VersionSpan(version=0, start=0, end=1),),
    finish_reason="stop",
)


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess]) -> Callable[..., RunProcess]:
    def start(how: str, *overrides: str, **settings: Any) -> RunProcess:
        return start_run(*task(how), *overrides, **settings)

    return start


def task(how: str) -> tuple[str, ...]:
    return ("--task.name", "tests.run.tasks:hostile", "--task.params", f'{{ how = "{how}" }}')


RAISED = {
    "item exits": "failed to make item 2: SystemExit(3)",
    "no item": "failed to make item 2: it returned None, not a TaskItem",
    "another index": "failed to make item 2: it returned an item with index 3",
    "a number as prompt": "failed to make item 2: it returned TaskItem(index=2, prompt=7",
    "reward is cancelled": "raised on item 2: CancelledError()",
    "reward exits": "raised on item 2: SystemExit(3)",
    "reward interrupts": "raised on item 2: KeyboardInterrupt()",
    "reward stops an iteration": "raised on item 2: StopIteration()",
    "reward times out": "raised on item 2: TimeoutError()",
    "reward raises 10 MB": "characters left out",
}


@pytest.mark.parametrize("in_process", [False, True])
def test_whatever_a_task_raises_or_returns_is_an_error_of_the_task_that_names_the_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    byte_tokenizer().save_pretrained(tmp_path)

    async def fail(how: str) -> str:
        settings = TaskSettings(name="tests.run.tasks:hostile", params={"how": how})
        task: Any = settings.load(0)
        pool = ScoringPool(1, settings, 0, tmp_path, 120.0, how="together") if in_process else None
        work = Completions(task, byte_tokenizer(), SamplingParams(n=1, max_tokens=8), 512, 30.0, pool)
        try:
            await work.rewards(await work.item(1), [SAMPLED])
            with pytest.raises(TaskError) as raised:
                await work.rewards(await work.item(2), [SAMPLED])
        finally:
            await work.aclose()
        return str(raised.value)

    async def fail_all() -> list[str]:
        return await asyncio.gather(*map(fail, RAISED))

    for (how, expected), text in zip(RAISED.items(), asyncio.run(fail_all()), strict=True):
        assert expected in text, how
        assert len(text) < 3000, how


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, StopIteration])
def test_no_error_of_user_code_in_a_thread_stops_what_waits_for_it(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    async def play() -> None:
        fail()

    async def wait() -> None:
        with pytest.raises(RuntimeError, match=error.__name__):
            await asyncio.wait_for(run_abandonable(fail, "test"), 30)
        loop = PlayLoop()
        try:
            with pytest.raises(RuntimeError, match=error.__name__):
                await loop.run(play, 30.0)
        finally:
            await loop.aclose()

    asyncio.run(wait())


@pytest.mark.parametrize(
    "cases",
    [
        {"item holds the lock": signal.SIGINT, "reward holds the lock": signal.SIGTERM},
        pytest.param({"item blocks": signal.SIGTERM}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda cases: ", ".join(cases),
)
def test_a_run_whose_task_blocks_says_so_and_obeys_a_signal(
    tmp_path: Path, model_dir: Path, cases: dict[str, signal.Signals]
) -> None:
    """Runs side by side: each says so only after ten seconds."""
    with contextlib.ExitStack() as stack:
        runs = {how: RunProcess(tmp_path / how, model_dir, *task(how)) for how in cases}
        for run in runs.values():
            stack.callback(run.kill)
        for how, number in cases.items():
            waits = "the task has been working on item" if how.startswith("item") else "of them wait for rewards"
            runs[how].wait_for_output(waits)
            runs[how].process.send_signal(number)
        for run in runs.values():
            assert run.wait(30) == 130


def test_a_reward_that_holds_the_interpreter_is_late_and_ends_the_run(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("reward holds the lock", "--task.reward_timeout_s", "2")
    assert run.wait(60) == 1
    assert "took longer than 2 s" in run.output()
    assert "Traceback" not in run.output()


def test_prompts_with_lone_surrogates_are_dropped_and_the_run_goes_on(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("a lone surrogate", "--run.num_steps", "2")
    assert run.wait() == 0, run.output()
    assert run.summary()["ledger"]["dropped"]["unusable"] > 0
    dropped = run.events("item_dropped")
    assert any("has a lone surrogate at character 8" in event["what"] for event in dropped)


def test_a_run_ends_although_its_task_has_left_a_thread(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("a thread that never ends", "--run.num_steps", "1")
    assert run.wait() == 0, run.output()
    assert "these threads have not ended and are abandoned: left-by-the-task" in run.output()
