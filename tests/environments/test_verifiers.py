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

from inflight.contracts import Environment, Episode
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import play
from inflight.environments.recording import PlayedEpisode
from inflight.errors import TaskError
from inflight.types import TaskItem
from tests.environments.apart import need
from tests.environments.scripted import scripted_episode, text_of
from tests.environments.tokenizers import tokenizer

need("verifiers")

import verifiers.v1 as vf  # noqa: E402
from renderers import DefaultRendererConfig  # noqa: E402

from inflight.environments.adapters.verifiers import VerifiersEnvironment  # noqa: E402
from inflight.environments.proxy.run_server import ProxyServer  # noqa: E402

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


@pytest.mark.parametrize(
    ("taskset", "says", "reward"),
    [
        ("sums_v1", ["0"], 1.5),
        ("adding_v1", ['<tool_call>\n{"name": "adder_add", "arguments": {"a": 1, "b": 1}}\n</tool_call>', "2"], 1.0),
    ],
)
def test_verifiers_own_train_client_gets_the_tokens_and_logprobs_that_are_recorded_here(
    tmp_path: Path, taskset: str, says: list[str], reward: float
) -> None:
    tags = ("<tool_call>", "</tool_call>")
    made = tokenizer("qwen3")
    made.add_tokens([*tags])
    made.save_pretrained(tmp_path)
    environment, turns, seen = VerifiersEnvironment(0, taskset), iter(says), []

    class Trained(Environment):
        """The same environment, whose calls go through the client that verifiers trains with."""

        name = "trained"

        def item(self, index: int) -> TaskItem:
            return environment.item(index)

        async def play(self, item: TaskItem, episode: Episode) -> float:
            client = vf.TrainClientConfig(
                base_url=await episode.openai_url(),
                api_key_var="INFLIGHT_HAS_NO_KEY",
                renderer_model_name=str(tmp_path),
                renderer=DefaultRendererConfig(tool_parser="qwen3"),
            )
            served = vf.load_environment(environment._config)
            async with served.serving():
                ended = await served.run_episode(item.metadata["task"], vf.ModelContext("scripted", client))
            assert ended.ok, [trace.last_error for trace in ended.traces]
            seen.extend(ended.traces)
            return float(ended.traces[0].reward)

    async def run() -> PlayedEpisode:
        async with ProxyServer("scripted") as proxy, aclosing(PlayLoop()) as loop:
            episode = scripted_episode(lambda prompt: next(turns), added=tags)
            episode.proxy = proxy.serve
            return await play(Trained(), environment.item(0), episode, loop, 60.0)

    played = asyncio.run(run())
    assert played.failure is None, played.failure
    assert played.reward == reward
    assert len(played.calls) == len(says)
    (trace,) = seen
    (branch,) = trace.branches
    last = played.calls[-1]
    assert list(branch.token_ids) == [*last.prompt_token_ids, *last.completion.token_ids]
    sampled = [one for one, is_sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if is_sampled]
    assert sampled == [logprob for call in played.calls for logprob in call.completion.logprobs]
