"""A simulated group from its offer to a step, and what the policies see of it: real groups without real tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from inflight.contracts import StalenessPolicy
from inflight.planning.servers import Job, SimulatedServer, Span
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.types import Group, Rollout

Spans = list[Span]


@dataclass(frozen=True, slots=True)
class Prompted:
    """What will be sampled for one item. One entry per completion."""

    lengths: tuple[int, ...]
    prompt: str
    """Identifies the prompt: items with the same text have the same one."""
    num_prompt_tokens: int = 0
    rewards: tuple[float, ...] = ()
    """Empty: all are 0."""
    waits: tuple[float, ...] = ()
    """Time that the environment of each takes, in which it holds its slot and samples nothing. Empty: none."""

    def reward(self, completion: int) -> float:
        return self.rewards[completion] if self.rewards else 0.0


@dataclass(slots=True, eq=False)
class SimulatedCompletion:
    """What a simulated request has sampled of one completion, from its first token on."""

    spans: Spans
    is_whole: bool

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def first_version(self) -> int | None:
        return self.spans[0].version if self.spans else None


def continue_spans(partial: Any, server: SimulatedServer, job: Job, num_tokens: int) -> Spans:
    """Return the spans of a completion with what a server has added; neighbours of one version become one."""
    before: Spans = partial.spans if partial is not None else []
    added = server.spans_of(job, num_tokens, before[-1].end if before else 0)
    if before and added and before[-1].version == added[0].version:
        return [*before[:-1], Span(before[-1].start, added[0].end, added[0].version), *added[1:]]
    return [*before, *added] if before else added


def scored_group(prompted: Prompted, sampled: Sequence[SimulatedCompletion]) -> ScoredGroup:
    """Return the rollouts and rewards of a group: rollouts without tokens, as the policies look at none."""
    prompt = range(prompted.num_prompt_tokens)
    rollouts = [
        Rollout(prompt, range(prompted.lengths[i]), (), cast(Any, one.spans), "stop", prompted.reward(i), 1.0)
        for i, one in enumerate(sampled)
    ]
    return ScoredGroup(rollouts, prompted.lengths, prompted.rewards or (0.0,) * len(rollouts))


def kept_tokens(rollout: Rollout, staleness: StalenessPolicy, version: int) -> Sequence[bool]:
    """Return for each span of a rollout whether a step trains on it; the policy is shown one token of each."""
    return staleness.mask([span.version for span in rollout.version_spans], version)


def num_kept_tokens(group: Group, staleness: StalenessPolicy, version: int) -> int:
    """Return what `inflight.rollouts.staleness.num_trained_tokens` does, in time that does not depend on lengths."""
    total = 0
    for rollout in group.rollouts:
        kept = kept_tokens(rollout, staleness, version)
        if any(kept):
            total += len(rollout.prompt_token_ids)
            total += sum(
                span.end - span.start for span, is_kept in zip(rollout.version_spans, kept, strict=True) if is_kept
            )
    return total


def whole_groups(group: Group, staleness: StalenessPolicy, version: int) -> int:
    """Return 1 if a step trains on any token of a group: steps are then so many groups."""
    return int(any(any(kept_tokens(rollout, staleness, version)) for rollout in group.rollouts))
