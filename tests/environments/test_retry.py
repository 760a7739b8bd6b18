"""Tasks with further tries."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.environments.adapters.retry import Retry
from inflight.environments.recording import PlayedEpisode
from inflight.errors import TaskError
from tests.environments.scripted import play_scripted, text_of

TASK: dict[str, Any] = {"task": "spell_backward", "params": {"min_word_len": 4, "max_word_len": 4}}


def said(*answers: str, **params: Any) -> PlayedEpisode:
    environment = Retry(0, **TASK, **params)
    turns = iter(answer.replace("RIGHT", environment.item(0).answer or "") for answer in answers)
    return play_scripted(environment, 0, lambda prompt: next(turns))


def test_the_first_right_answer_ends_the_episode() -> None:
    played = said("RIGHT")
    assert (played.failure, played.reward, [call.reward for call in played.calls]) == (None, 1.0, [1.0])


def test_a_wrong_answer_is_told_so_and_a_later_one_is_worth_less() -> None:
    played = said("#", "##", "RIGHT", discount=0.5, says="Once more!")
    assert text_of(played, 2).count("Once more!") == 2
    assert played.reward == 0.25
    assert [call.reward for call in played.calls] == [0.0, 0.0, 0.25]


def test_there_are_as_many_tries_as_the_run_says() -> None:
    played = said("#", "#", "RIGHT", tries=2)
    assert len(played.calls) == 2
    assert played.reward == 0.0


def test_the_turns_of_an_answer_that_gets_worse_earn_nothing_more() -> None:
    environment = Retry(0, **TASK)
    answer = environment.item(0).answer or ""
    almost = answer[:-1] + "#"
    first = environment._task.score(environment.item(0), almost)
    assert 0 < first < 1
    played = said(almost, "#", almost)
    assert [call.reward for call in played.calls] == [first, 0.0, 0.0]
    assert played.reward == pytest.approx(first * 0.64)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"task": "tests.environments.places:ThreeTurns"}, "is an environment"),
        ({"task": "spell_backwards"}, "unknown task"),
        ({"task": "spell_backward", "tries": 0}, "at least 1"),
        ({"task": "spell_backward", "discount": 1.5}, "discount"),
    ],
)
def test_what_cannot_be_asked_again_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        Retry(0, **params)
