"""Assigns advantages to the tokens of a group, by episode or by turn.

The episodes of one group are compared with each other, separately for each role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inflight.rollouts.advantages import AdvantageEstimator, batch_advantages
from inflight.rollouts.critic import TurnCritic, turns_of
from inflight.types import Group, Rollout, Turn

Credit = Literal["episode", "turn", "return", "critic"]
"""How the advantage of a token is computed:

``episode``  the reward of its episode, the same for all tokens (GRPO)
``turn``     as ``episode``, plus the reward of its turn, compared with the same turn of the other episodes (MT-GRPO,
             arXiv 2505.11821, with both terms at weight 1)
``return``   the discounted sum of the rewards from its turn on; the episode's reward counts towards the last
             turn, and sums are compared at the same turn of the episodes
``critic``   that sum, or the next reward plus the next value, minus the value that a critic assigns to its context
             (ArCHer, arXiv 2402.19446); episodes are not compared, and no estimator is used
"""


@dataclass(slots=True)
class _RoleEpisode:
    """The rollouts of one role in one episode, by their index in the group; they share a reward."""

    reward: float
    rollouts: list[int] = field(default_factory=list)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """All turns in order, each with the index of its rollout."""
    num_tokens: int = 0


def token_advantages(
    groups: Sequence[Group],
    estimator: AdvantageEstimator,
    credit: Credit = "episode",
    discount: float = 1.0,
    critic: TurnCritic | None = None,
) -> list[list[list[float]]]:
    """Return advantages as ``[group][rollout][completion token]``; those of observations are 0.

    ``discount`` is the discount factor per turn for the credit ``return``. Raises the same errors as
    `batch_advantages`, and ``ValueError`` if ``credit`` is 'critic' and no critic is passed.
    """
    if credit == "critic":
        if critic is None:
            raise ValueError("credit 'critic' needs a critic: pass a TurnCritic")
        return [[_spread(rollout, critic.advantages(rollout)) for rollout in group.rollouts] for group in groups]
    compared = [(g, episodes) for g, group in enumerate(groups) for episodes in _compared(group)]
    table = _by_turn([episodes for _, episodes in compared], estimator, credit, discount)
    advantages = [[[0.0] * len(rollout.completion_token_ids) for rollout in group.rollouts] for group in groups]
    for (g, episodes), of_episodes in zip(compared, table, strict=True):
        for episode, of_turns in zip(episodes, of_episodes, strict=True):
            for (rollout, turn), advantage in zip(episode.turns, of_turns, strict=True):
                advantages[g][rollout][turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    return advantages


def teaches(group: Group, credit: Credit = "episode") -> bool:
    """Return whether any rewards that are compared with each other differ; always True with a critic."""
    if credit == "critic":
        return True
    own = [[(e.reward, *_turn_rewards(e, credit)) for e in episodes] for episodes in _compared(group)]
    return any(len(set(rewards)) > 1 for rewards in own)


def _turn_rewards(episode: _RoleEpisode, credit: Credit) -> list[float | None]:
    return [] if credit == "episode" else [turn.reward for _, turn in episode.turns]


def _compared(group: Group) -> list[list[_RoleEpisode]]:
    """Return the episodes of a group by role, in the order of their first rollouts."""
    roles: dict[str, dict[int, _RoleEpisode]] = {}
    for i, rollout in enumerate(group.rollouts):
        number = rollout.episode if rollout.episode is not None else -1 - i
        episode = roles.setdefault(rollout.role, {}).setdefault(number, _RoleEpisode(rollout.reward))
        episode.rollouts.append(i)
        episode.turns += [(i, turn) for turn in turns_of(rollout)]
        episode.num_tokens += rollout.num_sampled_tokens
    return [list(episodes.values()) for episodes in roles.values()]


def _spread(rollout: Rollout, of_turns: Sequence[float]) -> list[float]:
    advantages = [0.0] * len(rollout.completion_token_ids)
    for turn, advantage in zip(turns_of(rollout), of_turns, strict=True):
        advantages[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    return advantages


def _by_turn(
    compared: Sequence[Sequence[_RoleEpisode]], estimator: AdvantageEstimator, credit: Credit, discount: float
) -> list[list[list[float]]]:
    """Return advantages as ``[set of compared episodes][episode][turn]``."""
    if credit == "return":
        return _relative([[_returns(episode, discount) for episode in episodes] for episodes in compared], estimator)
    lengths = [[episode.num_tokens for episode in episodes] for episodes in compared]
    whole = batch_advantages([[episode.reward for episode in episodes] for episodes in compared], estimator, lengths)
    table = [
        [[advantage] * len(episode.turns) for advantage, episode in zip(of, episodes, strict=True)]
        for of, episodes in zip(whole, compared, strict=True)
    ]
    if credit == "turn":
        own = _relative([[[turn.reward for _, turn in e.turns] for e in episodes] for episodes in compared], estimator)
        table = [
            [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(of, of_own, strict=True)]
            for of, of_own in zip(table, own, strict=True)
        ]
    return table


def _returns(episode: _RoleEpisode, discount: float) -> list[float | None]:
    """Return, for each turn, the discounted sum of the rewards from that turn on."""
    total = episode.reward
    returns: list[float | None] = []
    for at, (_, turn) in enumerate(reversed(episode.turns)):
        total = (turn.reward or 0.0) + (total if at == 0 else discount * total)
        returns.insert(0, total)
    return returns


def _relative(
    values: Sequence[Sequence[Sequence[float | None]]], estimator: AdvantageEstimator
) -> list[list[list[float]]]:
    """Return the advantage of each value over the others at the same turn.

    A value of None is not compared and has the advantage 0.
    """
    table = [[[0.0] * len(of_turns) for of_turns in episodes] for episodes in values]
    for turn in range(max((len(of_turns) for episodes in values for of_turns in episodes), default=0)):
        having = [
            [e for e, of_turns in enumerate(episodes) if turn < len(of_turns) and of_turns[turn] is not None]
            for episodes in values
        ]
        present = [[float(values[s][e][turn] or 0.0) for e in those] for s, those in enumerate(having)]
        for s, of in enumerate(batch_advantages(present, estimator, [[1] * len(those) for those in having])):
            for e, advantage in zip(having[s], of, strict=True):
                table[s][e][turn] = advantage
    return table
