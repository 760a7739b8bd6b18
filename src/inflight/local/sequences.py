"""Growing sequences and requests of the embedded engine. Knows nothing of models, slots' contents or threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from inflight.errors import InflightError
from inflight.local.slots import Slot
from inflight.rollouts.drafts import Drafter
from inflight.wire import Completion, DraftCounts, FinishReason, PromptImage, SamplingParams, VersionSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """One unfinished completion."""

    request: Request
    index: int
    uniform: Callable[[], float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of its first token), one per version."""
    slot: Slot | None = None
    drawn: list[float] = field(default_factory=list)
    """Random numbers of the next tokens. Each is kept until its token is sampled, so that a repeated step, or a step
    after a rejected draft, draws with the same."""
    drafter: Drafter | None = None
    draft: list[int] = field(default_factory=list)
    """Tokens that the next step verifies."""
    num_verifications: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    def draw(self, num: int) -> list[float]:
        """Return the random numbers of the next ``num`` tokens."""
        while len(self.drawn) < num:
            self.drawn.append(self.uniform())
        return self.drawn[:num]

    def append(self, token: int, logprob: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        del self.drawn[0]
        if self.drafter is not None:
            self.drafter.sampled(token)

    def end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self.drafter is not None:
            self.drafter.finish()

    def all_ids(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.token_ids]

    def completion(self) -> Completion:
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
            draft_counts=None
            if self.drafter is None
            else DraftCounts.model_construct(num_verifications=self.num_verifications, num_accepted=self.num_accepted),
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine. Callbacks run in the engine's thread and must not block.

    Exactly one of ``on_finished`` and ``on_failed`` is called, once.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    on_finished: Callable[[list[Completion]], None]
    on_failed: Callable[[InflightError], None]
    on_token: Callable[[Sequence], None] | None
    num_continued: int = 0
    """As in `inflight.wire.GenerateRequest`."""
    images: tuple[PromptImage, ...] = ()
    image_tensors: Mapping[str, torch.Tensor] | None = None
    """What the vision tower takes of them; None without images."""
    sequences: list[Sequence] = field(default_factory=list)

    def image_rows(self) -> list[int]:
        """Return the indices of the prompt's tokens that images fill."""
        return [row for image in self.images for row in range(image.start, image.end)]

    @property
    def most(self) -> int:
        """The most positions that one of its sequences can take."""
        return len(self.prompt_token_ids) + self.max_tokens
