"""Tasksets of verifiers, played through the recording proxy."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import play
from inflight.environments.recording import PlayedEpisode
from inflight.errors import TaskError
from tests.environments.apart import need
from tests.environments.scripted import scripted_episode, text_of

need("verifiers")

from inflight.environments.proxy_server import ProxyServer  # noqa: E402
from inflight.environments.verifiers import VerifiersEnvironment  # noqa: E402

# Of the libraries that verifiers speaks to tools with.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _tasksets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = str(Path(__file__).parent / "tasksets")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # of servers of tools
    return


def played(environment: VerifiersEnvironment, index: int, *said: str) -> PlayedEpisode:
    turns = iter(said)

    async def run() -> PlayedEpisode:
        async with ProxyServer("scripted") as proxy, aclosing(PlayLoop()) as loop:
            episode = scripted_episode(lambda prompt: next(turns))
            episode.proxy = proxy.serve
            return await play(environment, environment.item(index), episode, loop, 60.0)

    return asyncio.run(run())


def test_a_task_is_played_and_scored_by_verifiers_and_recorded_here() -> None:
    environment = VerifiersEnvironment(0, "sums_v1")
    right = played(environment, 2, "4")
    assert right.failure is None, right.failure
    assert right.reward == 1.5
    assert "Answer in digits." in text_of(right, 0)
    assert "What is 2 + 2?" in text_of(right, 0)
    (rollout,) = right.rollouts(0, 1.0)
    assert len(rollout.turns) == 1
    assert played(environment, 2, "I think it is 5").reward == 0.0


def test_the_model_calls_the_tools_of_a_taskset() -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    right = played(
        VerifiersEnvironment(0, "adding_v1"),
        0,
        call % ("adder_add", '{"a": 1, "b": 1}'),
        call % ("subtract", "{}"),
        "2",
    )
    assert right.failure is None, right.failure
    assert right.reward == 1.0
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text_of(right, -1), re.DOTALL)
    assert answers == ["2", "error: unknown tool 'subtract'"]
    (rollout,) = right.rollouts(0, 1.0)
    assert len(rollout.turns) == 3


def test_a_finite_taskset_begins_anew_and_takes_options() -> None:
    environment = VerifiersEnvironment(0, {"id": "sums_v1", "num_sums": 2})
    assert [environment.item(i).prompt for i in range(3)] == ["What is 0 + 0?", "What is 1 + 1?", "What is 0 + 0?"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"taskset": "no_such_taskset"}, "no_such_taskset"),
        ({"taskset": {"id": "sums_v1", "colour": "red"}}, "colour"),
        ({"taskset": "sums_v1", "agent": {"harness": {"id": "no_such_harness"}}}, "no_such_harness"),
    ],
)
def test_what_verifiers_refuses_is_refused_before_the_run(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        VerifiersEnvironment(0, **params)
