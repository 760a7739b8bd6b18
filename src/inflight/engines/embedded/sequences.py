"""Unfinished sequences and requests of the embedded engine."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from inflight.engines.embedded.slots import Slot
from inflight.errors import InflightError
from inflight.model.routing import Experts
from inflight.rollouts.drafts import Drafter
from inflight.wire import (
    Completion,
    DraftCounts,
    FinishReason,
    PromptImage,
    RoutedExperts,
    SamplingParams,
    VersionSpan,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """One unfinished completion."""

    request: EngineRequest
    index: int
    uniform: Callable[[], float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """A pair (version, index of the version's first token) for each version."""
    slot: Slot | None = None
    drawn: list[float] = field(default_factory=list)
    """Random numbers for the next tokens. Each is kept until its token is sampled, so that a repeated step, or a step
    after a rejected draft, uses the same number.
    """
    drafter: Drafter | None = None
    draft: list[int] = field(default_factory=list)
    """The drafted tokens that the next step verifies."""
    num_verifications: int = 0
    num_accepted: int = 0
    routed: list[Experts] = field(default_factory=list)
    """The experts of the sequence's tokens from the first token on, in parts of shape [T, L, K]; filled only if the
    request asks for routed experts.
    """
    finish_reason: FinishReason | None = None

    def draw(self, num: int) -> list[float]:
        """Return the random numbers for the next ``num`` tokens."""
        while len(self.drawn) < num:
            self.drawn.append(self.uniform())
        return self.drawn[:num]

    def append(self, token: int, logprob: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        del self.drawn[0]
        if self.drafter is not None:
            self.drafter.sampled(token)

    def note_routed(self, start: int, experts_TLK: Experts) -> None:
        """Store the experts of tokens ``start``, ``start + 1``, ... where they are not known yet."""
        num_known = sum(map(len, self.routed))
        if self.request.routed_experts and len(experts_TLK) > num_known - start:
            self.routed.append(experts_TLK[num_known - start :])

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
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> RoutedExperts | None:
        if not self.routed:
            return None
        num_computed = len(self.request.prompt_token_ids) + len(self.token_ids) - 1
        experts_TLK = np.concatenate(self.routed)[:num_computed]  # a stop may fall within an accepted draft
        num_tokens, num_layers, num_chosen = experts_TLK.shape
        little_endian = experts_TLK.astype(experts_TLK.dtype.newbyteorder("<"), copy=False)
        return RoutedExperts.model_construct(
            num_tokens=num_tokens,
            num_layers=num_layers,
            num_chosen=num_chosen,
            dtype=experts_TLK.dtype.name,
            data=b64encode(little_endian.tobytes()).decode("ascii"),
        )


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request inside the engine. Callbacks run in the engine's thread and must not block.

    Either ``on_finished`` or ``on_failed`` is called, exactly once.
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
    """The vision tower's inputs for the images; None without images."""
    routed_experts: bool = False
    """As in `inflight.wire.GenerateRequest`."""
    sequences: list[Sequence] = field(default_factory=list)

    def image_rows(self) -> list[int]:
        """Return the indices of the prompt's tokens that are placeholders for images."""
        return [row for image in self.images for row in range(image.start, image.end)]

    @property
    def most(self) -> int:
        """The maximum number of positions that one of the request's sequences can use."""
        return len(self.prompt_token_ids) + self.max_tokens
