"""Sequences and requests of the embedded engine, as they grow. Knows nothing of models, slots' contents or threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from inflight.errors import InflightError
from inflight.local.slots import Slot
from inflight.wire import Completion, SamplingParams, VersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion in the making."""

    request: Request
    index: int
    uniform: Callable[[], float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of its first token), one per version."""
    slot: Slot | None = None
    drawn: float | None = None
    """Random number of the next token, kept until that token is there: a step that is repeated draws the same."""
    finish_reason: FinishReason | None = None

    def draw(self) -> float:
        """Return the random number of the next token."""
        if self.drawn is None:
            self.drawn = self.uniform()
        return self.drawn

    def all_ids(self) -> list[int]:
        """Prompt and tokens so far."""
        return [*self.request.prompt_token_ids, *self.token_ids]

    def completion(self) -> Completion:
        """What the contract says of it, once finished."""
        assert self.finish_reason is not None
        ends = [*(start for _, start in self.spans[1:]), len(self.token_ids)]
        spans = tuple(
            VersionSpan.model_construct(version=version, start=start, end=end)
            for (version, start), end in zip(self.spans, ends, strict=False)  # without a token there is no span
        )
        return Completion.model_construct(
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=spans,
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine; callbacks run in the engine's thread and must not block.

    Either ``on_finished`` is called or ``on_failed``, once.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    on_finished: Callable[[list[Completion]], None]
    on_failed: Callable[[InflightError], None]
    on_token: Callable[[Sequence], None] | None
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0

    @property
    def most(self) -> int:
        """Positions that one of its sequences may come to."""
        return len(self.prompt_token_ids) + self.max_tokens
