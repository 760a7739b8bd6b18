"""Environments in ``inflight train``: real servers, real trainers."""

from __future__ import annotations

import functools
import json
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.run.runs import RunProcess

pytestmark = pytest.mark.timeout(300)

EPISODES = ("--task.name", "tests.environments.places:three_turns", "--sampling.max_tokens", "12")


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess]) -> Callable[..., RunProcess]:
    return functools.partial(start_run, *EPISODES)


@pytest.mark.parametrize(
    ("credit", "mode"),
    [
        ("episode", "pipeline"),
        *(pytest.param(credit, "pipeline", marks=pytest.mark.exhaustive) for credit in ("turn", "return")),
        ("critic", "conventional"),
    ],
)
def test_a_run_learns_from_episodes_of_three_turns(
    start_run: Callable[..., RunProcess], credit: str, mode: str
) -> None:
    settings = ("--task.params", '{ fault = "raises", every = 9 }', "--run.mode", mode, "--run.num_steps", "3")
    run = start_run("--rollouts.credit", credit, *settings)
    assert run.wait() == 0, run.output()
    rows, summary = run.rows(), run.summary()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert rows[0]["mismatch_k3"] < 1e-4  # the trainer sees what the engine saw, observations included
    assert summary["failed_episodes"]["raised"] >= 1
    assert "an episode failed (raised)" in run.output()
    assert summary["task"] == "three_turns"
    assert summary["rewritten_conversations"] == 0  # the template of tiny models keeps what was said
    ledger = summary["ledger"]
    assert ledger["trained"] >= 3


def test_settings_of_environments_are_refused_for_a_task(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--task.name", "tests.run.tasks:count_letters", "--rollouts.credit", "turn")
    assert run.wait() == 1
    assert "rollouts.credit is for environments" in run.output()
    assert not run.directory.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheduler", ["least_loaded", "over_provision", "probe_first"])
@pytest.mark.parametrize("num_extra", [0, 2])
def test_a_run_that_is_killed_loses_no_episode_and_trains_none_twice(
    start_run: Callable[..., RunProcess], scheduler: str, num_extra: int
) -> None:
    settings = ("--rollouts.scheduler", scheduler, "--task.extra_episodes", str(num_extra))
    often = ("--run.checkpoint_every_steps", "2", "--servers.count", "2", "--servers.max_concurrent", "16")
    run = start_run(*settings, *often, "--run.num_steps", "100000")
    run.wait_for_steps(4)
    time.sleep(random.Random(f"{scheduler} {num_extra}").random())
    run.kill()
    state = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())
    assert {int(item) for item in state["partials"]} <= {*state["ledger"]["unsettled"]}
    last = state["version"] + 4
    resumed = start_run(*settings, *often, "--run.num_steps", str(last), "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == [*range(1, last + 1)]
    after = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = after["num_trained"] + sum(after["num_dropped"].values())
    assert after["next_new"] == settled + len(after["unsettled"])
    items = [event["item"] for event in resumed.events("group")]
    assert max(Counter(items).values()) <= 2
