"""Attention over packed segments, forward and backward: `segment_attention` and what one would use instead.

The others are torch's kernels called for one segment after the other, torch's attention over segments of several
lengths, and flash-attn's, where they are installed and take the dtype.

Shape suffixes: T packed tokens, A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import Contender, in_turns
from torch.nn.attention import SDPBackend, sdpa_kernel

from inflight.model.attention import SegmentPlan, segment_attention

OURS = "inflight"
ONE_BY_ONE = "torch, one by one"


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model and the segments of a row."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


class Case:
    """Inputs of one shape, laid out as a layer's projections give them, and the gradient of the output."""

    def __init__(self, shape: Shape, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        num_tokens = sum(shape.lengths)
        self.shape = shape
        self.plan = SegmentPlan.build(shape.lengths, device)
        self.bounds = tuple(accumulate(shape.lengths, initial=0))
        self.starts = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        self.query_TAD, self.key_TKD, self.value_TKD, self.upstream_TAD = (
            torch.randn(num_tokens, heads, shape.head_dim, generator=generator, device=device, dtype=shape.dtype)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
        )
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query_TAD, self.key_TKD, self.value_TKD

    @property
    def heads_first(self) -> tuple[torch.Tensor, ...]:
        """[1, heads, T, D]"""
        return tuple(leaf.transpose(0, 1).unsqueeze(0) for leaf in self.leaves)

    def clear(self) -> None:
        """Forget the gradients."""
        for leaf in self.leaves:
            leaf.grad = None


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Return the figures of this section."""
    rows = []
    shapes = _shapes(settings)
    for i, shape in enumerate(shapes):
        case = Case(shape, settings.device)
        forwards = {OURS: _ours(case), ONE_BY_ONE: _one_by_one(case), **_others(case, settings)}
        runs: dict[str, Contender] = {
            name: forward if isinstance(forward, str) else _with_backward(case, forward)
            for name, forward in forwards.items()
        }
        measured = in_turns(
            runs,
            settings,
            num_rounds=2 if settings.quick else 10,
            budget_s=0.6 * settings.left_s / (len(shapes) - i),
            before=case.clear,
            kept_bytes=sum(leaf.nbytes for leaf in case.leaves),
        )
        case.clear()
        with torch.no_grad():
            expected_TAD = _one_by_one(case)().float()
            for name, forward in forwards.items():
                if "seconds" in measured[name] and not isinstance(forward, str):
                    difference = (forward().float() - expected_TAD).abs().max().item()
                    measured[name]["largest_difference"] = difference
        rows.append(
            {
                "shape": shape.name,
                "heads": [shape.num_heads, shape.num_kv_heads, shape.head_dim],
                "num_tokens": sum(shape.lengths),
                "num_segments": len(shape.lengths),
                "longest": max(shape.lengths),
                "dtype": str(shape.dtype).removeprefix("torch."),
                "kernels": measured,
            }
        )
    return rows


def _shapes(settings: Settings) -> list[Shape]:
    if settings.quick:
        return [Shape("bfloat16", 4, 2, 16, (5, 9, 33)), Shape("float32", 4, 2, 16, (24, 24), torch.float32)]
    rng = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < 16_384:
        length = round(rng.lognormvariate(6.3, 0.9))
        lengths.append(min(max(16, length), 16_384 - sum(lengths)))
    return [
        Shape("7 B, equal lengths", 28, 4, 128, (1_024,) * 16),
        Shape("7 B, log-normal lengths", 28, 4, 128, tuple(lengths)),
        Shape("0.5 B, log-normal lengths", 14, 2, 64, tuple(lengths)),
        Shape("7 B, one long segment, float32", 28, 4, 128, (8_192,), torch.float32),
    ]


Forward = Callable[[], torch.Tensor]
"""Returns the output, [T, A, D]."""


def _with_backward(case: Case, forward: Forward) -> Callable[[], None]:
    return lambda: forward().backward(case.upstream_TAD)


def _ours(case: Case) -> Forward:
    return lambda: segment_attention(*case.heads_first, case.plan)[0]


def _one_by_one(case: Case) -> Forward:
    """On a GPU with the flash kernel, which takes 16 bits only; float32 with the memory-efficient one."""
    is_wide = case.shape.dtype == torch.float32
    backend = SDPBackend.EFFICIENT_ATTENTION if is_wide else SDPBackend.FLASH_ATTENTION

    def forward() -> torch.Tensor:
        query, key, value = case.heads_first
        if is_wide:  # its kernel knows no grouped heads
            key, value = (it.repeat_interleave(case.shape.num_heads // it.shape[1], 1) for it in (key, value))
        outputs = []
        with sdpa_kernel(backend) if query.is_cuda else contextlib.nullcontext():
            for start, stop in pairwise(case.bounds):
                part = slice(start, stop)
                outputs.append(
                    F.scaled_dot_product_attention(
                        query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, enable_gqa=not is_wide
                    )
                )
        return torch.cat(outputs, 2)[0].transpose(0, 1)

    return forward


def _others(case: Case, settings: Settings) -> dict[str, Forward | str]:
    """Return the kernels for segments of several lengths, or why one is absent."""
    names = ("torch varlen", "flash-attn varlen")
    if not settings.on_gpu:
        return dict.fromkeys(names, "it needs CUDA")
    if case.shape.dtype == torch.float32:
        return dict.fromkeys(names, "it takes 16 bits only")
    return {names[0]: _torch_varlen(case), names[1]: _flash_attn(case)}


def _torch_varlen(case: Case) -> Forward | str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"this torch has none: {error}"
    known = inspect.signature(varlen_attn).parameters
    # Releases differ in how they are told to be causal, and in whether they have to be told of grouped heads.
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    longest = max(case.shape.lengths)
    return lambda: varlen_attn(*case.leaves, case.starts, case.starts, longest, longest, **options)


def _flash_attn(case: Case) -> Forward | str:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        return f"flash-attn is not installed: {error}"
    longest = max(case.shape.lengths)
    return lambda: flash_attn_varlen_func(*case.leaves, case.starts, case.starts, longest, longest, causal=True)
