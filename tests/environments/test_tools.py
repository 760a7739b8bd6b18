"""The loop of tools, and TRL's environments that are played with it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inflight.environments.adapters.trl import TrlEnvironment, tool_methods
from inflight.environments.recording import PlayedEpisode
from inflight.errors import TaskError
from inflight.rollouts import load_task
from tests.environments.guessing import ROWS, Guessing
from tests.environments.scripted import play_scripted, text_of

HERE = "tests.environments.guessing"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def guessing(*said: str, index: int = 0, **params: Any) -> PlayedEpisode:
    turns = iter(said)
    environment = load_task(
        "inflight.environments.adapters.trl:TrlEnvironment",
        {"factory": f"{HERE}:Guessing", "prompts": f"{HERE}:ROWS"} | params,
        0,
    )
    assert isinstance(environment, TrlEnvironment)
    return play_scripted(environment, index, lambda prompt: next(turns))


def results(played: PlayedEpisode) -> list[str]:
    """Return what the tools answered, as the model reads it."""
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text_of(played, -1), re.DOTALL)


def test_the_model_reads_what_its_tools_return_until_it_calls_none() -> None:
    played = guessing(call("guess", number=2), "Aha. " + call("guess", number=4), "It is 4.")
    assert played.failure is None
    assert (len(played.calls), played.num_rewritten, played.reward) == (3, 0, 0.5)
    assert results(played) == ["higher", "right"]
    (rollout,) = played.rollouts(0, 1.0)
    assert len(rollout.turns) == 3


def test_the_prompt_is_the_row_and_what_reset_returned_and_describes_the_tools_as_transformers_does() -> None:
    from transformers.utils import get_json_schema

    first = text_of(guessing("4"), 0)
    assert first.index("You guess.") < first.index("Which number? It is between 0 and 9.")
    described = [json.loads(line) for line in first.splitlines() if line.startswith('{"type": "function"')]
    assert described == [get_json_schema(tool) for tool in tool_methods(Guessing())]
    assert [tool["function"]["name"] for tool in described] == ["guess", "hint"]
    assert "Which one? It is between 0 and 7." in text_of(guessing("7", index=1), 0)


def test_several_calls_of_one_reply_are_carried_out_in_order() -> None:
    both = call("guess", number=9) + call("hint", words=["a", "b"])
    played = guessing(both, "done")
    assert results(played) == ["lower", str({"even": True, "words": ["a", "b"], "loud": False})]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("peek"), "{'error': 'unknown tool peek'}"),
        (call("get_reward"), "{'error': 'unknown tool get_reward'}"),
        (call("guess"), "missing a required argument: 'number'"),
        (call("guess", number=1, again=True), "unexpected keyword argument 'again'"),
        (call("guess", number="four"), "not supported between"),
        (call("guess", number=-1), "{'error': 'numbers are not negative'}"),
    ],
)
def test_the_model_reads_what_is_wrong_with_a_call(said: str, answer: str) -> None:
    played = guessing(said, call("guess", number=4), "4")
    assert played.failure is None
    wrong, right = results(played)
    assert answer in wrong
    assert right == "right"


def test_a_model_that_always_calls_is_cut_after_its_last_turn() -> None:
    played = guessing(*[call("guess", number=4)] * 9, max_turns=3)
    assert len(played.calls) == 3
    assert results(played) == ["right"] * 2
    assert played.reward == 0.5


def test_rewards_are_those_of_the_environment_and_of_functions() -> None:
    functions = [f"{HERE}:length_reward", f"{HERE}:column_reward"]
    assert guessing(call("guess", number=4), "12345", reward_funcs=functions).reward == 1.0 + len("right12345") + 4.0
    assert guessing("123", index=1, reward_funcs=functions).reward == 3.0
    assert guessing("4", factory=f"{HERE}:AsyncReward").reward == 0.5
    assert guessing("12", factory=f"{HERE}:NoReward", prompts=[{}], reward_funcs=functions[:1]).reward == 2.0


def test_an_object_is_used_again_if_its_episode_ended_well() -> None:
    Guessing.made = 0
    environment = TrlEnvironment(0, f"{HERE}:Guessing", f"{HERE}:ROWS")
    for _ in range(3):
        play_scripted(environment, 0, lambda prompt: "4")
    assert Guessing.made == 1

    def fails(prompt: str) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play_scripted(environment, 0, fails)
    play_scripted(environment, 0, lambda prompt: "4")
    assert Guessing.made == 2


def test_rows_come_from_a_file_too_and_begin_anew_after_the_last(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    environment = TrlEnvironment(0, f"{HERE}:Guessing", str(file))
    assert [environment.item(i).metadata["row"] for i in range(4)] == ROWS * 2
    assert environment.item(0).prompt != environment.item(1).prompt


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"factory": f"{HERE}:NoReset"}, "NoReset, has no method reset"),
        ({"factory": f"{HERE}:NoReward"}, "no method get_reward, and task.params has no reward_funcs"),
        ({"factory": f"{HERE}:Nobody"}, "cannot be imported"),
        ({"prompts": "no-such-file.jsonl"}, r"no-such-file.jsonl cannot be read"),
        ({"prompts": []}, "it is empty"),
        ({"prompts": f"{HERE}:WRONG_ROWS"}, "it contains 3"),
    ],
)
def test_what_is_no_environment_is_refused_before_the_run(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        guessing(**params)
