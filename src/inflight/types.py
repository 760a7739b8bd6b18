"""Values within one process: frozen dataclasses that all packages share.

Shape suffixes: T packed tokens of one micro-batch, S its segments, M its tokens that images fill, L layers, K the
experts that compute a token in a layer, or the tokens that are scored at one position. Importing this module does not
load torch, because only annotations refer to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from inflight.wire import (
        Encoding,
        PromptImage,
        RoutedExperts,
        SentBytes,
        TensorSpec,
        UpdateRef,
        UpdateTimings,
        VersionSpan,
    )


# ---------------------------------------------------------------------------------------------------------------
# Training data


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn of a rollout, as a range of its completion tokens."""

    start: int
    end: int
    reward: float | None = None
    """The environment's reward for this turn alone; None if there is none."""


FREE_EXPERT = -1
"""Marks an expert that the router chooses itself."""

OBSERVED = -1
"""Recorded as the version of a token that was not sampled, but came from the environment."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's logprobs (natural log) of a rollout's completion tokens, given the preceding tokens.

    ``logprobs`` has one entry, and ``top_token_ids`` and ``top_logprobs`` one row, per completion token; all rows have
    the same length.
    """

    teacher: int
    """Index of the teacher in ``distillation.teachers``."""
    logprobs: Sequence[float] | None = None
    """None if the trainer ranks compute them."""
    top_token_ids: Sequence[Sequence[int]] = ()
    """The teacher's most likely tokens at each position; empty unless the loss needs them."""
    top_logprobs: Sequence[Sequence[float]] = ()
    """The logprobs of those tokens."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One token sequence to train on: a prompt and its continuation.

    For a task, the continuation is one finished completion. For an environment, sampled turns alternate with
    observations: ``turns`` contains the ranges of the turns, and the other completion tokens have a logprob of 0.0 and
    no version span.
    """

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    """Natural log, one per completion token."""
    version_spans: Sequence[VersionSpan]
    """Spans of completion tokens by version."""
    finish_reason: str
    """The finish reason of the last turn."""
    reward: float
    temperature: float
    turns: Sequence[Turn] = ()
    """If empty, all completion tokens are one turn."""
    episode: int | None = None
    """The rollout's episode within its group, if an episode may consist of several rollouts; None if the rollout is a
    whole episode.
    """
    role: str = ""
    """The role that the model plays, in episodes with several roles; rewards are compared within a role."""
    images: Sequence[PromptImage] = ()
    """The positions of the images are indices into the prompt and completion tokens together."""
    routed_experts: RoutedExperts | None = None
    """The experts of all tokens, starting with the prompt's; None if they are unknown."""
    teacher: TeacherScores | None = None
    """None if no teacher scores the rollout."""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens: prompt, turns and observations."""
        return len(self.prompt_token_ids) + len(self.completion_token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens in turns."""
        return sum(span.end - span.start for span in self.version_spans)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the prompt and in observations, which are never targets of a loss."""
        return self.num_tokens - self.num_sampled_tokens

    def token_versions(self) -> list[int]:
        """Return the version that sampled each completion token, or `OBSERVED` for tokens of observations."""
        versions = [OBSERVED] * len(self.completion_token_ids)
        for span in self.version_spans:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        return versions


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt, or the episodes of one start state.

    ``item_index`` is the item's position in the order of the task or environment.
    """

    group_id: int
    item_index: int
    rollouts: Sequence[Rollout]
    endpoint: str = ""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in all rollouts, including their prompts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion that is ready for packing: it has advantages, and tokens that are too old are masked.

    ``loss_mask``, ``advantages`` and ``reference_logprobs`` (if present) have one entry per completion token.
    """

    rollout: Rollout
    advantages: Sequence[float]
    loss_mask: Sequence[bool]
    reference_logprobs: Sequence[float] | None = None
    group_index: int = 0
    """The index of the completion's prompt among the prompts of the optimizer step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The packed tokens of one forward and backward pass on one rank, aligned with the targets.

    Index t holds token t, and every per-token field at t describes token t as a target: its logprob is
    log p(token t | earlier tokens of the same segment). The first token of a segment is never a target. Segments follow
    one another without padding; their lengths are ``segment_lengths`` and sum to T.
    """

    token_ids_T: torch.Tensor
    """int64 [T]"""
    position_ids_T: torch.Tensor
    """int64 [T], 0 at the start of each segment"""
    segment_ids_T: torch.Tensor
    """int64 [T], 0, 1, 2, ..."""
    segment_lengths: tuple[int, ...]
    loss_mask_T: torch.Tensor
    """bool [T], true where the token is a target of the loss"""
    behaviour_logprobs_T: torch.Tensor
    """float32 [T], natural log, 0.0 where there is no target"""
    advantages_T: torch.Tensor
    """float32 [T]"""
    temperature_T: torch.Tensor
    """float32 [T], above 0"""
    versions_T: torch.Tensor
    """int64 [T], version that sampled the token, -1 in prompts and observations"""
    reference_logprobs_T: torch.Tensor | None = None
    """float32 [T], logprobs under the frozen reference; or None"""
    teacher_logprobs_T: torch.Tensor | None = None
    """float32 [T], logprobs under the teacher of each segment, NaN where the trainer ranks still have to compute them;
    or None
    """
    teacher_top_ids_TK: torch.Tensor | None = None
    """int64 [T, K], the teacher's K most likely tokens at position t, 0 at tokens that are not targets; or None"""
    teacher_top_logprobs_TK: torch.Tensor | None = None
    """float32 [T, K], logprobs of those tokens under the teacher, 0.0 at tokens that are not targets; or None"""
    teacher_ids_S: torch.Tensor | None = None
    """int64 [S], the index of the teacher that scores each segment, -1 for none; or None"""
    proximal_logprobs_T: torch.Tensor | None = None
    """float32 [T], logprobs under the trainer's weights at the start of the optimizer step; None if the current weights
    are still the same
    """
    group_ids_S: torch.Tensor | None = None
    """int64 [S], the index of each segment's prompt among the prompts of the optimizer step, -1 for a segment that is
    not a completion; or None
    """
    image_rows_M: torch.Tensor | None = None
    """int64 [M], the indices of the packed tokens that images fill, in order; None without images"""
    image_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The output of the model's processor for the images, by name, such as ``pixel_values``; images are concatenated
    along the first dimension, in the order of the segments
    """
    prefix_ids_T: torch.Tensor | None = None
    """int64 [T]: tokens with equal ids have equal prefixes and therefore the same hidden states. Up to and including
    these tokens, their segments have the same tokens, images and recorded experts. A worker that shares prefixes
    computes them once. ``image_rows_M`` and ``image_tensors`` then contain the images of a shared prefix only once, at
    its first token. None: no two tokens are known to have equal prefixes
    """
    target_ids_TK: torch.Tensor | None = None
    """int64 [T, K]: the tokens that are scored at the position of token t, possibly with repetitions; logprobs are then
    [T, K]. None: token t itself is scored, and logprobs are [T]
    """
    routed_experts_TLK: torch.Tensor | None = None
    """int16 [T, L, K], the experts that compute token t as an input; where it is -1, the router chooses. None: the
    router chooses for all tokens
    """

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.segment_lengths)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The settings of one step of AdamW. Raises ``ValueError`` if one is out of range."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled: weights are multiplied by ``1 - learning_rate * weight_decay``."""
    max_gradient_norm: float | None = None
    """Largest norm of all parameters' gradients; larger gradients are scaled down to this norm. None: no limit."""

    def __post_init__(self) -> None:
        for name, value, is_in_range in (
            ("learning_rate", self.learning_rate, self.learning_rate >= 0),
            ("betas[0]", self.betas[0], 0 <= self.betas[0] < 1),
            ("betas[1]", self.betas[1], 0 <= self.betas[1] < 1),
            ("eps", self.eps, self.eps >= 0),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0),
            ("max_gradient_norm", self.max_gradient_norm, (self.max_gradient_norm or 1.0) > 0),
        ):
            if not (is_in_range and math.isfinite(value or 0.0)):
                raise ValueError(f"{name} is {value}, which is outside the range that AdamW supports")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The version after an optimizer step, its gradient norm before clipping, and the learning rate that it used."""

    version: int
    gradient_norm: float
    learning_rate: float
    rounded_away: float | None = None
    """Share of updates that left a weight unchanged because its dtype cannot represent the change, if measured."""


# ---------------------------------------------------------------------------------------------------------------
# Weight updates


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Whole tensors in manifest order, gathered to full shape, in the wire dtype. Ranks other than 0 hold no tensors.

    If the source is sharded, each rank instead holds its own boxes of these tensors.
    """

    index: int
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    encoding: Encoding = "raw"
    """How the bucket's bytes encode the weights; unless this is ``raw``, the bytes are one ``uint8`` tensor"""
    checksum: str | None = None
    """The checksum as in `inflight.wire.BucketTransfer`; None if it was not computed"""
    ref: UpdateRef | None = None
    """The update that the bucket belongs to; senders refuse a bucket of a different update. None: not checked"""
    ready: torch.cuda.Event | None = None
    """The event after which the bytes are ready. Readers on another stream wait for it. None: the bytes are ready"""
    others: tuple[SentBytes, ...] = ()
    """The parts of the bucket that the other ranks send, in rank order, starting with rank 1"""


class EndpointOutcome(StrEnum):
    """The outcome of one publish for one endpoint."""

    APPLIED = "applied"
    """The endpoint serves the new version."""
    REFUSED = "refused"
    """The endpoint refused before any byte was sent and serves the old version."""
    ABORTED = "aborted"
    """The update ended early, and the endpoint serves the old version."""
    TIMED_OUT = "timed_out"
    """The endpoint did not answer in time: its version is unknown, so do not route requests to it."""
    UNREACHABLE = "unreachable"
    """The endpoint cannot be reached, or its answers break the contract: its version is unknown, so do not route
    requests to it.
    """
    POISONED = "poisoned"
    """The endpoint's weights are torn (only partly updated), and it refuses to generate."""


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """How one publish ended for one endpoint."""

    endpoint: str
    outcome: EndpointOutcome
    serves: int | None
    """The version that the endpoint serves now; None if it serves none or the version is unknown."""
    detail: str = ""
    timings: UpdateTimings | None = None


@dataclass(frozen=True, slots=True)
class PublishSpans:
    """The durations of the phases of one publish in seconds, as measured by the publisher.

    ``pause_s`` runs from the request to the first endpoint to pause until the last one has resumed; ``gather_s`` and
    ``wire_s`` overlap; ``load_s`` and ``first_token_s`` are the slowest endpoint's own measurements.
    """

    gather_s: float
    pause_s: float
    wire_s: float
    load_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What each endpoint serves after a publish, and how long the publish took."""

    run_id: str
    version: int
    size_bytes: int
    endpoints: tuple[EndpointReport, ...]
    spans: PublishSpans
    num_needed: int
    """Number of endpoints that had to apply the update."""
    sent_bytes: int
    """Number of bytes sent or stored, counted once for all endpoints; less than ``size_bytes`` if the buckets are
    encoded.
    """

    @property
    def succeeded(self) -> bool:
        """Whether at least ``num_needed`` endpoints serve the new version."""
        return sum(e.outcome is EndpointOutcome.APPLIED for e in self.endpoints) >= self.num_needed

    @property
    def applied_everywhere(self) -> bool:
        """Whether every endpoint serves the new version."""
        return all(e.outcome is EndpointOutcome.APPLIED for e in self.endpoints)

    def summary(self) -> str:
        """Return one line with every endpoint's outcome, grouping endpoints with the same outcome and detail."""
        alike: dict[tuple[EndpointOutcome, str], list[str]] = {}
        for endpoint in self.endpoints:
            alike.setdefault((endpoint.outcome, endpoint.detail), []).append(endpoint.endpoint)
        parts = [f"{', '.join(names)} {it}{f' ({detail})' if detail else ''}" for (it, detail), names in alike.items()]
        return f"version {self.version}: " + "; ".join(parts)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine since its start, and its current load."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_tokens: int
    num_prompt_tokens: int
    num_finished: int
    num_updates: int
    paused_s: float
    num_drafted: int = 0
    """Number of tokens in all drafts."""
    num_accepted: int = 0
    """Number of drafted tokens that were accepted."""
    num_verifications: int = 0
    """Number of drafts verified. Each yielded its accepted tokens and one more."""
    num_scored_tokens: int = 0
    """Number of tokens scored for score requests."""


# ---------------------------------------------------------------------------------------------------------------
# Tasks


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem or start state: a prompt, a known answer if there is one, and any data that its rewards need."""

    index: int
    prompt: str
    answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------
# Episodes

Message = Mapping[str, Any]
"""One message in the format of OpenAI's chat completions: ``role``, ``content`` and possibly ``tool_calls``.

The content is a string, or a list of parts, each ``{"type": "text", "text": ...}`` or, for models that take images,
``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``.
"""


Tool = Mapping[str, Any] | Callable[..., Any]
"""A function that the model may call: either a description in OpenAI's format, or a Python function with type hints and
a docstring in Google's style.
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model requests."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    """The text, without special tokens and tool calls."""
    tool_calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version_spans: Sequence[VersionSpan]
    finish_reason: str
