"""Causal attention over packed segments, as an attention function of transformers.

Segments of similar length form a class. Each class is gathered into one right-padded batch, attended, and put back in
place. A token attends only to earlier tokens, so padding on the right has no effect and needs no mask.

Segments may share prefixes. The row then contains each shared token once, and every segment is gathered with all of its
tokens. The result for a shared token is taken from the first of its segments, because all of them compute the same
result. Attention is thus computed for every whole segment, and everything else in a layer once for each token of the
row.

Shape suffixes: S tokens of all segments, T packed tokens (S without those that repeat a shared prefix), P padded slots,
N segments of one class, L tokens of the longest segment of a class, A heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from inflight.errors import UnsupportedError
from inflight.model.head_exchange import HeadExchange

SEGMENT_ATTENTION = "inflight_segments"
"""Name to pass to transformers as ``attn_implementation``, after `register_segment_attention`."""

_MAX_PADDING = 1.25
"""A segment joins a class if the longest segment in it is at most this many times as long. Finer classes need more
calls. On a CPU, values between 1.1 and 1.5 are equally fast, and 2 is at least a fifth slower."""
_SMALL = 32
"""Segments up to this length share one class: the kernels work on blocks of this size anyway."""

_LONG = 384
"""On a CPU, segments of at least this length are attended in their own dtype, see `computes_wider`."""

_Classes = tuple[tuple[int, int], ...]
Function = TypeVar("Function", bound=Callable[..., object])

_REFUSED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")

_HEAD_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_mup_width_multiplier")
_SOFT_CAPS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "attn_logit_softcapping",
    "attention_logit_cap",
)
_KERNELS = {
    SDPBackend.MATH: "torch's math kernel, which holds the scores of all pairs of tokens",
    SDPBackend.FLASH_ATTENTION: "torch's flash kernel",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's kernel",
}

_RECURRENT_FIELDS = ("layers_block_type", "block_types", "hybrid_override_pattern", "attn_layer_period", "state_size")


@dataclass(frozen=True, slots=True)
class SlotIndex:
    """The slot of each packed token in the padded batches, and the packed token of each slot."""

    token_of_slot_P: torch.Tensor
    """int64 [P]. Padding repeats the last token of its segment."""
    slot_of_token_T: torch.Tensor
    """int64 [T]"""
    is_shared: bool = False
    """Whether several segments have slots for the same token."""

    @staticmethod
    def padded(lengths: Sequence[int], width: int, device: torch.device) -> SlotIndex:
        """Return the index for one batch [len(lengths), width]."""
        starts = [0, *itertools.accumulate(lengths)]
        token_of_slot = [
            start + min(i, length - 1) for start, length in zip(starts, lengths, strict=False) for i in range(width)
        ]
        slot_of_token = [row * width + i for row, length in enumerate(lengths) for i in range(length)]
        return SlotIndex(torch.tensor(token_of_slot, device=device), torch.tensor(slot_of_token, device=device))


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of all segments, and which of them the packed row contains."""

    first_T: torch.Tensor
    """int64 [T], ascending: for each token of the row, the index of the first segment token that it stands for."""
    token_S: torch.Tensor
    """int64 [S]: for each token of the segments, the index of the row's token that stands for it."""

    @staticmethod
    def of(prefix_ids_S: torch.Tensor) -> SharedTokens:
        """Return the tokens to compute. Tokens with equal ids must be equal, and so must all tokens before them."""
        _, ids_S = torch.unique(prefix_ids_S, return_inverse=True)
        places_S = torch.arange(len(ids_S), device=ids_S.device)
        first_of_id = places_S.new_full((len(ids_S),), len(ids_S)).scatter_reduce(0, ids_S, places_S, "amin")
        first_S = first_of_id[ids_S]
        is_first_S = first_S == places_S
        return SharedTokens(is_first_S.nonzero().squeeze(1), (is_first_S.cumsum(0) - 1)[first_S])

    def padded(self, num_tokens: int) -> SharedTokens:
        """Return these tokens followed by ``num_tokens`` more, which are not shared."""
        added = torch.arange(num_tokens, device=self.first_T.device)
        return SharedTokens(
            torch.cat([self.first_T, added + len(self.token_S)]), torch.cat([self.token_S, added + len(self.first_T)])
        )


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How the segments of one packed row are grouped; created once, and used by every layer."""

    num_tokens: int
    """T"""
    max_length: int
    """Tokens of the longest segment."""
    classes: _Classes
    """(N, L) of each class; the slots of one class follow those of the previous one, P in total."""
    index: SlotIndex | None
    """None if all segments have the same length: the padded batch is then a view of the packed row."""
    exchange: HeadExchange | None = None
    """The exchange among ranks that each compute an equal part of the row; None if this rank computes all of it."""

    @property
    def num_rows(self) -> int:
        """The number of tokens of the row that this rank computes."""
        return self.num_tokens if self.exchange is None else self.num_tokens // self.exchange.num_ranks

    @staticmethod
    def build(
        segment_lengths: Sequence[int],
        device: torch.device | str = "cpu",
        exchange: HeadExchange | None = None,
        shared: SharedTokens | None = None,
    ) -> SegmentPlan:
        """Return the plan for segments of these lengths (each at least 1), with its indices on ``device``.

        ``shared`` specifies which of the segments' tokens are in the row (default: all).
        """
        lengths = torch.tensor(segment_lengths, dtype=torch.int64)
        num_tokens, max_length = int(lengths.sum()), max(segment_lengths)
        if min(segment_lengths) == max_length and shared is None:
            return SegmentPlan(num_tokens, max_length, ((len(segment_lengths), max_length),), None, exchange)
        order = sorted(range(len(segment_lengths)), key=lambda i: -segment_lengths[i])
        classes = _length_classes([segment_lengths[i] for i in order])
        # For each segment in order of its class: the first token, and for each of its slots the place in the segment.
        sorted_lengths = lengths[order]
        starts = (lengths.cumsum(0) - lengths)[order]
        widths = torch.tensor([length for count, length in classes for _ in range(count)])
        slot_starts = widths.cumsum(0) - widths
        place_P = torch.arange(int(widths.sum())) - slot_starts.repeat_interleave(widths)
        last_P = (sorted_lengths - 1).repeat_interleave(widths)
        token_of_slot_P = starts.repeat_interleave(widths) + torch.minimum(place_P, last_P)
        slot_of_token_T = torch.empty(num_tokens, dtype=torch.int64)
        is_token_P = place_P <= last_P
        slot_of_token_T[token_of_slot_P[is_token_P]] = is_token_P.nonzero().squeeze(1)
        if shared is not None:
            token_of_slot_P = shared.token_S.cpu()[token_of_slot_P]
            slot_of_token_T = slot_of_token_T[shared.first_T.cpu()]
            num_tokens = len(slot_of_token_T)
        index = SlotIndex(token_of_slot_P.to(device), slot_of_token_T.to(device), shared is not None)
        return SegmentPlan(num_tokens, max_length, classes, index, exchange)


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SegmentPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention [1, T, A, D] within each segment of a packed row.

    ``query`` is [1, A, T, D]; ``key`` and ``value`` may have fewer heads. If ``scaling`` is None, it is 1 / sqrt(D). If
    ranks share the row, T counts only this rank's tokens, and the call is collective.
    """
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    if plan.exchange is not None:
        heads = [plan.exchange.to_heads(x) for x in plan.exchange.with_divisible_heads(*heads)]
    padded = [_to_padded(x, plan) for x in heads]
    outputs = [_attend(q, k, v, scaling, dropout) for q, k, v in zip(*padded, strict=True)]
    packed_TAD = _to_packed(outputs, plan)
    return (packed_TAD if plan.exchange is None else plan.exchange.to_tokens(packed_TAD)).unsqueeze(0)


def repeats_heads(device_type: str, dtype: torch.dtype, *, grouped: bool) -> bool:
    """Return whether key-value heads are repeated for their query heads, instead of passed to the kernel in groups.

    On CUDA, only the flash kernel and cuDNN's support groups (torch 2.13, aten's ``cuda/sdp_utils.cpp``), and both only
    in 16 bits. In float32, groups would require the math kernel, which stores all scores: 120 GB for 28 heads and
    32,768 tokens. The memory-efficient kernel supports repeated heads. On other devices, groups avoid a copy of keys
    and values, which makes attention 10 % faster in float32 on a CPU.
    """
    return grouped and device_type == "cuda" and dtype.itemsize > 2


def computes_wider(query_NALD: torch.Tensor) -> bool:
    """Return whether 16-bit attention that needs gradients is computed in float32.

    On a CPU, the backward pass of torch's flash kernel (2.13) takes twice as long in bfloat16 as in float32 for
    segments of 96 tokens, and equally long for 512 tokens, conversion included.
    """
    is_narrow = query_NALD.device.type == "cpu" and query_NALD.dtype.itemsize == 2
    return is_narrow and query_NALD.requires_grad and query_NALD.shape[2] < _LONG


def describe_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *, is_causal: bool
) -> str:
    """Return which kernel torch uses for attention with such tensors; their contents are not read."""
    grouped = key.shape[1] != query.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, enable_gqa=grouped)
    return _KERNELS.get(SDPBackend(choice), "a kernel specific to the device")


def describe_segment_kernel(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    """Return how `segment_attention` computes attention when a model with this transformers configuration trains."""
    num_heads, num_kv_heads, head_dim = heads_of(config)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    repeated = repeats_heads(device.type, dtype, grouped=num_heads != num_kv_heads)
    query = torch.empty(1, num_heads, 64, head_dim, **options)
    key = query if repeated else torch.empty(1, num_kv_heads, 64, head_dim, **options)
    groups = f", its {num_kv_heads} key-value heads repeated for {num_heads} query heads" if repeated else ""
    wider = f", in float32 for segments of less than {_LONG} tokens" if computes_wider(query) else ""
    return describe_kernel(query, key, key, is_causal=True) + groups + wider


def heads_of(config: Any) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and the dimension of a head."""
    config = getattr(config, "text_config", None) or config
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def register_segment_attention(*, in_graphs: bool = True) -> str:
    """Register segment attention with transformers in this process; return its name. Idempotent.

    Models built with that name accept a ``segment_plan`` keyword. No mask function is registered under the name, so
    transformers makes no mask. If ``in_graphs`` is False, torch's compiler leaves the attention out of its graphs,
    because its shapes depend on the segments, which differ from batch to batch.
    """
    from transformers import AttentionInterface  # takes a second to import, needed only with a model

    if in_graphs:
        AttentionInterface.register(SEGMENT_ATTENTION, _attention_of_layer)
        return SEGMENT_ATTENTION
    name = f"{SEGMENT_ATTENTION}_outside_of_graphs"
    AttentionInterface.register(name, exclude_from_graphs(_attention_of_layer))
    return name


def exclude_from_graphs(function: Function) -> Function:
    """Return a function that torch's compiler calls without tracing it."""
    disabled = torch.compiler.disable(function, reason="segments differ from batch to batch")  # type: ignore[no-untyped-call]
    return cast(Function, disabled)


def check_model_is_supported(config: Any) -> None:
    """Raise `UnsupportedError` unless a transformers configuration describes a decoder with full causal attention.

    Models that scale or cap their logits are refused too, because inflight computes the logits outside the model.
    """
    config = getattr(config, "text_config", None) or config
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder; only decoders can be trained")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if other := sorted(layer_types - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(f"{name} has layers of type {', '.join(other)}; only full attention is supported")
    if fields := [field for field in _RECURRENT_FIELDS if getattr(config, field, None) is not None]:
        raise UnsupportedError(f"{name} has recurrent layers ({fields[0]}); only full attention is supported")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types if layer_types else window is not None
    longest = getattr(config, "max_position_embeddings", None)
    if slides and (window is None or longest is None or window < longest):
        raise UnsupportedError(
            f"{name} attends over a sliding window of {window} tokens, shorter than its context of {longest}; "
            "only full attention is supported"
        )
    if caps := [field for field in _SOFT_CAPS if getattr(config, field, None) is not None]:
        raise UnsupportedError(f"{name} caps its logits ({caps[0]}={getattr(config, caps[0])}), which is not supported")
    if factors := [field for field in _HEAD_FACTORS if getattr(config, field, None) not in (None, 1)]:
        value = getattr(config, factors[0])
        raise UnsupportedError(f"{name} scales its logits ({factors[0]}={value}), which is not supported")


def _attention_of_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_plan: SegmentPlan | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Call `segment_attention` for a layer of transformers. Raises `UnsupportedError` for other kinds of attention."""
    layer = type(module).__name__
    if segment_plan is None:
        raise UnsupportedError(
            f"{layer} received no segment_plan: pass segment_plan= to the model; if it was passed, this model does "
            "not pass it to its attention and cannot be trained on packed segments"
        )
    if attention_mask is not None or any(others.get(name) is not None for name in _REFUSED_ARGUMENTS):
        raise UnsupportedError(f"{layer} needs an attention mask, or one of {', '.join(_REFUSED_ARGUMENTS)}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(f"{layer} is not causal")
    if sliding_window is not None and sliding_window < segment_plan.max_length:
        raise UnsupportedError(
            f"{layer} has a sliding window of {sliding_window} tokens, shorter than a segment of "
            f"{segment_plan.max_length}"
        )
    if query.shape[0] != 1 or query.shape[2] != segment_plan.num_rows or key.shape[2] != query.shape[2]:
        raise UnsupportedError(
            f"{layer} attends from {tuple(query.shape)} to {tuple(key.shape)}, but the plan covers one row of "
            f"{segment_plan.num_rows} tokens, without a cache"
        )
    return segment_attention(query, key, value, segment_plan, scaling, dropout), None


def _attend(
    query_NALD: torch.Tensor, key_NALD: torch.Tensor, value_NALD: torch.Tensor, scaling: float | None, dropout: float
) -> torch.Tensor:
    dtype, groups = query_NALD.dtype, query_NALD.shape[1] // key_NALD.shape[1]
    grouped = groups > 1
    if computes_wider(query_NALD):
        query_NALD, key_NALD, value_NALD = query_NALD.float(), key_NALD.float(), value_NALD.float()
    if repeats_heads(query_NALD.device.type, query_NALD.dtype, grouped=grouped):
        key_NALD, value_NALD = (x.repeat_interleave(groups, dim=1) for x in (key_NALD, value_NALD))
        grouped = False
    return F.scaled_dot_product_attention(
        query_NALD, key_NALD, value_NALD, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    ).to(dtype)


def _length_classes(lengths_descending: Sequence[int]) -> _Classes:
    """Cut sorted lengths into (count, longest) classes with little padding."""
    classes: list[tuple[int, int]] = []
    for length in lengths_descending:
        if classes and classes[-1][1] <= max(_SMALL, _MAX_PADDING * length):
            classes[-1] = (classes[-1][0] + 1, classes[-1][1])
        else:
            classes.append((1, length))
    return tuple(classes)


def _to_padded(x_TAD: torch.Tensor, plan: SegmentPlan) -> tuple[torch.Tensor, ...]:
    """Return [N, A, L, D] for each class."""
    if plan.index is None:
        ((count, length),) = plan.classes
        return (x_TAD.reshape(count, length, *x_TAD.shape[1:]).transpose(1, 2),)
    padded: tuple[torch.Tensor, ...] = _ToPadded.apply(x_TAD, plan.index, plan.classes)  # type: ignore[no-untyped-call]
    return tuple(x_NLAD.transpose(1, 2) for x_NLAD in padded)


def _to_packed(classes_NALD: list[torch.Tensor], plan: SegmentPlan) -> torch.Tensor:
    """Pack the padded [N, A, L, D] tensors of all length classes into one [T, A, D] tensor."""
    classes_NLAD = [x.transpose(1, 2) for x in classes_NALD]
    if plan.index is None:
        return classes_NLAD[0].reshape(plan.num_tokens, *classes_NLAD[0].shape[2:])
    packed: torch.Tensor = _ToPacked.apply(plan.index, plan.classes, *classes_NLAD)  # type: ignore[no-untyped-call]
    return packed


class _ToPadded(torch.autograd.Function):
    """Copies a packed row to padded classes.

    Padding has no gradient, so the backward pass is also a plain gather; for shared tokens it is the sum over their
    slots.
    """

    @staticmethod
    def forward(ctx: Any, x_TAD: torch.Tensor, index: SlotIndex, classes: _Classes) -> tuple[torch.Tensor, ...]:
        ctx.index = index
        return _split(x_TAD.index_select(0, index.token_of_slot_P), classes)

    @staticmethod
    def backward(ctx: Any, *grads_NLAD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        index, grad_PAD = ctx.index, _join(grads_NLAD)
        if not index.is_shared:
            return grad_PAD.index_select(0, index.slot_of_token_T), None, None
        wide = torch.promote_types(grad_PAD.dtype, torch.float32)
        sums_TAD = grad_PAD.new_zeros(len(index.slot_of_token_T), *grad_PAD.shape[1:], dtype=wide)
        sums_TAD.index_add_(0, index.token_of_slot_P, grad_PAD.to(wide))
        return sums_TAD.to(grad_PAD.dtype), None, None


class _ToPacked(torch.autograd.Function):
    """Copies padded classes to the packed row; padding receives a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, index: SlotIndex, classes: _Classes, *classes_NLAD: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.classes = index, classes
        return _join(classes_NLAD).index_select(0, index.slot_of_token_T)

    @staticmethod
    def backward(ctx: Any, grad_TAD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_PAD = grad_TAD.new_zeros(ctx.index.token_of_slot_P.shape[0], *grad_TAD.shape[1:])
        grad_PAD.index_copy_(0, ctx.index.slot_of_token_T, grad_TAD)
        return None, None, *_split(grad_PAD, ctx.classes)


def _split(x_PAD: torch.Tensor, classes: _Classes) -> tuple[torch.Tensor, ...]:
    parts = torch.split(x_PAD, [count * length for count, length in classes])
    return tuple(
        part.view(count, length, *x_PAD.shape[1:]) for part, (count, length) in zip(parts, classes, strict=True)
    )


def _join(classes_NLAD: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [x.reshape(-1, *x.shape[2:]) for x in classes_NLAD]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
