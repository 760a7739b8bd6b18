"""A simulated group from its offer to a step, and what the policies see of it: real groups without real tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from inflight.contracts import StalenessPolicy
from inflight.planning.servers import Job, Server, Span
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
class Request:
    """Completions of one group that an endpoint was given together, and that come back together."""

    item: int
    numbers: tuple[int, ...]
    server: Server
    num_left: int
    """Completions that run or wait for their environment."""
    began: float
    ended: dict[int, Spans] = field(default_factory=dict)
    """Spans of those that have ended, by number."""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was offered and has not been scored yet. Lists have one entry per completion."""

    item: int
    serial: int
    prompted: Prompted
    spans: list[Spans]
    """Of what the run has; what still runs has more."""
    is_finished: list[bool]
    begun: list[int | None]
    """Version served when it was issued, if nothing of it is there."""
    requests: dict[int, Request] = field(default_factory=dict)
    """By number of each completion that a request has."""
    first_version: int | None = None
    """When one of it was first issued."""
    is_scoring: bool = False

    @classmethod
    def of(cls, item: int, serial: int, prompted: Prompted) -> OpenGroup:
        size = len(prompted.lengths)
        return cls(item, serial, prompted, [[] for _ in range(size)], [False] * size, [None] * size)

    def num_tokens(self, completion: int) -> int:
        """Tokens of a completion that the run has."""
        spans = self.spans[completion]
        return spans[-1][1] if spans else 0

    def first_versions(self) -> list[int | None]:
        """Version of the first token of each completion; None before it is issued."""
        return [spans[0][2] if spans else begun for spans, begun in zip(self.spans, self.begun, strict=True)]

    def as_group(self) -> Group:
        """Return what the composer and the staleness policy are asked about."""
        prompt = range(self.prompted.num_prompt_tokens)
        rollouts = [
            Rollout(
                prompt,
                range(length),
                (),
                cast(Any, spans),
                "stop",
                self.prompted.reward(i),
                1.0,
            )
            for i, (length, spans) in enumerate(zip(self.prompted.lengths, self.spans, strict=True))
        ]
        return Group(self.serial, self.item, rollouts)


def continued(before: Spans, server: Server, job: Job, num_tokens: int) -> Spans:
    """Return the spans of a completion with what a server has added; neighbours of one version become one."""
    added = server.spans_of(job, num_tokens, before[-1].end if before else 0)
    if before and added and before[-1].version == added[0].version:
        return [*before[:-1], Span(before[-1].start, added[0].end, added[0].version), *added[1:]]
    return [*before, *added]


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
