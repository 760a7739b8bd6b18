"""The critic of turns against plain dynamic programming."""

from __future__ import annotations

import random

import pytest

from inflight.errors import CheckpointError
from inflight.rollouts import TurnCritic, teaches, token_advantages
from inflight.types import Group, Rollout, Turn
from inflight.wire import VersionSpan


def played(states: list[int], rewards: list[float]) -> Rollout:
    """One token is said in each state, and the next state is one observed token."""
    token_ids = [token for state in states[1:] for token in (7, state)] + [7]
    turns = [Turn(2 * i, 2 * i + 1, rewards[i]) for i in range(len(states))]
    spans = [VersionSpan(version=0, start=turn.start, end=turn.end) for turn in turns]
    return Rollout([states[0]], token_ids, [0.0] * len(token_ids), spans, "stop", 0.0, 1.0, turns)


def chain(rng: random.Random) -> Rollout:
    """From state 20 with even chances to 30 or 31; 30 gives 1, and 31 gives 0 or 0.5."""
    second = rng.choice([30, 31])
    return played([20, second], [0.2, 1.0 if second == 30 else rng.choice([0.0, 0.5])])


@pytest.mark.parametrize("target", ["monte_carlo", "td"])
def test_values_become_what_dynamic_programming_gives(target: str) -> None:
    rng = random.Random(0)
    critic = TurnCritic(target, discount=0.5, rate=0.05)  # type: ignore[arg-type]
    for _ in range(4000):
        critic.learn([chain(rng)])
    first, good, bad = 0.2 + 0.5 * (1.0 + 0.25) / 2, 1.0, 0.25
    assert critic.value(played([20, 30], [0.0, 0.0]), 0) == pytest.approx(first, abs=0.08)
    assert critic.value(played([20, 30], [0.0, 0.0]), 1) == pytest.approx(good, abs=0.08)
    assert critic.value(played([20, 31], [0.0, 0.0]), 1) == pytest.approx(bad, abs=0.12)


def test_advantages_are_targets_minus_values() -> None:
    rollout = played([20, 30, 31], [0.2, 0.0, 1.0])
    new = TurnCritic(discount=0.5)
    assert new.advantages(rollout) == pytest.approx([0.2 + 0.25, 0.5, 1.0])
    new.learn([rollout] * 200)
    assert new.advantages(rollout) == pytest.approx([0.0, 0.0, 0.0], abs=0.02)
    assert TurnCritic("td").advantages(rollout) == pytest.approx([0.2, 0.0, 1.0])  # all values are 0 yet


def test_a_critic_gives_a_turn_its_advantage_and_observations_none() -> None:
    group = Group(0, 0, [played([20, 30], [0.5, 1.0])])
    assert token_advantages([group], "std", "critic", critic=TurnCritic()) == [[[1.5, 0.0, 1.0]]]
    assert teaches(group, "critic")
    assert not teaches(group)


def test_a_critic_goes_on_after_a_checkpoint() -> None:
    critic, rollout = TurnCritic(), played([20, 30], [0.5, 1.0])
    critic.learn([rollout])
    other = TurnCritic()
    other.restore(critic.state())
    assert other.advantages(rollout) == critic.advantages(rollout) != TurnCritic().advantages(rollout)
    with pytest.raises(CheckpointError, match="critic"):
        other.restore({"weights": "AAAA"})
