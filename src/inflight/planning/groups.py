"""Simulated groups. To policies, they look like real groups whose tokens have no contents."""

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
    """The simulated outcome of one item, with one entry per completion."""

    lengths: tuple[int, ...]
    prompt: str
    """Identifies the prompt: items with equal strings share a prompt."""
    num_prompt_tokens: int = 0
    rewards: tuple[float, ...] = ()
    """If empty, all rewards are 0."""
    waits: tuple[float, ...] = ()
    """Time that each completion spends in its environment, holding its slot. If empty, there is no environment."""

    def reward(self, completion: int) -> float:
        return self.rewards[completion] if self.rewards else 0.0


@dataclass(slots=True, eq=False)
class SimulatedCompletion:
    """The part of one completion that has been sampled so far."""

    spans: Spans
    is_whole: bool

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def first_version(self) -> int | None:
        return self.spans[0].version if self.spans else None


def continue_spans(partial: Any, server: SimulatedServer, job: Job, num_tokens: int) -> Spans:
    """Return a completion's earlier spans and those that a server added; adjacent spans of one version are merged."""
    before: Spans = partial.spans if partial is not None else []
    added = server.spans_of(job, num_tokens, before[-1].end if before else 0)
    if before and added and before[-1].version == added[0].version:
        return [*before[:-1], Span(before[-1].start, added[0].end, added[0].version), *added[1:]]
    return [*before, *added] if before else added


def scored_group(prompted: Prompted, sampled: Sequence[SimulatedCompletion]) -> ScoredGroup:
    """Return the rollouts and rewards of a group. The rollouts have no token ids, which policies do not read."""
    prompt = range(prompted.num_prompt_tokens)
    rollouts = [
        Rollout(prompt, range(prompted.lengths[i]), (), cast(Any, one.spans), "stop", prompted.reward(i), 1.0)
        for i, one in enumerate(sampled)
    ]
    return ScoredGroup(rollouts, prompted.lengths, prompted.rewards or (0.0,) * len(rollouts))


def kept_tokens(rollout: Rollout, staleness: StalenessPolicy, version: int) -> Sequence[bool]:
    """Return, for each span of a rollout, whether a step trains on it. The policy is asked about one token of each
    span."""
    return staleness.mask([span.version for span in rollout.version_spans], version)


def num_kept_tokens(group: Group, staleness: StalenessPolicy, version: int) -> int:
    """Return the result of `inflight.rollouts.staleness.num_trained_tokens`, in time that does not depend on
    lengths."""
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
    """Return 1 if a step trains on any token of a group, and 0 otherwise, for steps that are measured in groups."""
    return int(any(any(kept_tokens(rollout, staleness, version)) for rollout in group.rollouts))
