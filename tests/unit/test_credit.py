"""Advantages of tokens, by episode and by turn, against plain arithmetic."""

from __future__ import annotations

import statistics

import pytest

from inflight.rollouts import batch_advantages, teaches, token_advantages
from inflight.types import Group, Rollout, Turn
from inflight.wire import VersionSpan


def rollout(
    reward: float, *turn_rewards: float | None, episode: int | None = None, role: str = "", observed: int = 2
) -> Rollout:
    """Turns of three tokens each, with observations between them."""
    turns, spans, length = [], [], 0
    for turn_reward in turn_rewards:
        turns.append(Turn(length, length + 3, turn_reward))
        spans.append(VersionSpan(version=0, start=length, end=length + 3))
        length += 3 + observed
    length -= observed
    return Rollout([1], [0] * length, [0.0] * length, spans, "stop", reward, 1.0, turns, episode, role)


def whole(reward: float, length: int) -> Rollout:
    return Rollout(
        [1], [0] * length, [0.0] * length, [VersionSpan(version=0, start=0, end=length)], "stop", reward, 1.0
    )


def at(advantages: list[float], turn: int) -> float:
    """The advantage of one turn; that of the observation behind it must be 0."""
    here = advantages[5 * turn : 5 * turn + 3]
    assert len(set(here)) == 1
    assert set(advantages[5 * turn + 3 : 5 * turn + 5]) <= {0.0}
    return here[0]


@pytest.mark.parametrize("estimator", ["mean", "leave_one_out", "std", "batch_std", "opo", "maxrl"])
def test_completions_of_one_turn_have_the_advantages_of_their_groups_bit_for_bit(estimator: str) -> None:
    groups = [
        Group(0, 0, [whole(reward, 3 + i) for i, reward in enumerate(rewards)])
        for rewards in ([0.1, 0.7, 0.2], [1.0, 0.0, 0.3, 0.3])
    ]
    expected = batch_advantages(
        [[one.reward for one in group.rollouts] for group in groups],
        estimator,  # type: ignore[arg-type]
        [[len(one.completion_token_ids) for one in group.rollouts] for group in groups],
    )
    for credit in ("episode", "turn", "return"):
        if (credit, estimator) == ("return", "opo"):
            continue  # whose lengths are those of turns
        got = token_advantages(groups, estimator, credit)  # type: ignore[arg-type]
        assert got == [
            [[value] * len(one.completion_token_ids) for value, one in zip(of, group.rollouts, strict=True)]
            for of, group in zip(expected, groups, strict=True)
        ]


def test_rollouts_of_one_episode_share_a_reward_that_counts_once() -> None:
    split = [rollout(1.0, None, episode=0), rollout(1.0, None, episode=0), rollout(0.0, None, episode=1)]
    ((first, second, third),) = token_advantages([Group(0, 0, split)], "mean")
    assert at(first, 0) == at(second, 0) == 0.5
    assert at(third, 0) == -0.5


def test_roles_are_compared_apart() -> None:
    played = [
        rollout(1.0, None, episode=0, role="white"),
        rollout(-1.0, None, episode=0, role="black"),
        rollout(0.0, None, episode=1, role="white"),
        rollout(0.0, None, episode=1, role="black"),
    ]
    (advantages,) = token_advantages([Group(0, 0, played)], "mean")
    assert [at(of, 0) for of in advantages] == [0.5, -0.5, -0.5, 0.5]


def test_turn_credit_adds_what_a_turn_was_given_for_itself() -> None:
    played = [rollout(1.0, 0.2, None), rollout(0.0, 0.6, 1.0), rollout(0.5, 0.1, 3.0, 9.0)]
    (advantages,) = token_advantages([Group(0, 0, played)], "mean", "turn")
    of_episode = [0.5, -0.5, 0.0]
    first = [value - statistics.fmean([0.2, 0.6, 0.1]) for value in (0.2, 0.6, 0.1)]
    second = [0.0, -1.0, 1.0]  # the first episode was given nothing there
    assert [at(of, 0) for of in advantages] == pytest.approx([a + b for a, b in zip(of_episode, first, strict=True)])
    assert [at(of, 1) for of in advantages] == pytest.approx([a + b for a, b in zip(of_episode, second, strict=True)])
    assert at(advantages[2], 2) == 0.0  # nothing to compare the third turn with


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_return_credit_discounts_what_comes_later(discount: float) -> None:
    played = [rollout(1.0, 0.2, 0.4), rollout(0.0, 0.6, None)]
    (advantages,) = token_advantages([Group(0, 0, played)], "mean", "return", discount)
    returns = [[0.2 + discount * (0.4 + 1.0), 0.4 + 1.0], [0.6 + discount * 0.0, 0.0]]
    for turn in (0, 1):
        middle = (returns[0][turn] + returns[1][turn]) / 2
        assert [at(of, turn) for of in advantages] == pytest.approx([one[turn] - middle for one in returns])


def test_a_group_teaches_if_what_is_compared_differs() -> None:
    equal = [rollout(1.0, 0.2, None), rollout(1.0, 0.6, None)]
    assert not teaches(Group(0, 0, equal))
    assert teaches(Group(0, 0, equal), "turn")
    assert not teaches(Group(0, 0, [rollout(1.0, 0.2, 0.7), rollout(1.0, 0.2, 0.7)]), "turn")
    apart = [rollout(1.0, None, episode=i, role=role) for i in (0, 1) for role in ("white",)]
    assert not teaches(Group(0, 0, [*apart, rollout(0.0, None, episode=0, role="black")]))
