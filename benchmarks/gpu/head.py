"""Logprobs from hidden states, forward and backward in bfloat16: this project's two heads and those of others.

Every head computes logprobs of the same targets and their gradients from the same upstream gradient. Errors are against
float64, over the first targets.

Shape suffixes: N targets, C targets of one tile, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import Contender, in_turns, in_words

from inflight.losses import chunked_logprobs, one_pass

SHAPES = {"0.5 B": (8_192, 896, 151_936), "7 B": (8_192, 3_584, 152_064)}
"""Targets, hidden size and vocabulary of a model of that size."""
QUICK_SHAPES = {"tiny": (48, 32, 512)}
OURS = ("inflight, two passes", "inflight, one pass")
_ANCHORS = {
    "torch linear_cross_entropy": ("torch_anchor", "torch_logprobs", {}),
    "TRL": ("trl_anchor", "trl_chunked_logprobs", {"chunk_size": 32_768}),
    "verl": ("verl_anchor", "verl_logprobs", {"chunk_size": 512}),
    "Liger, chunked": ("liger_anchor", "liger_logprobs", {"vocab_chunk_size": 4_096}),
    "Liger, fused": ("liger_anchor", "liger_scaled_logprobs", {}),
}
"""Module in tests/losses/anchors, function, and the settings that the frameworks have by default."""
_NUM_CHECKED = 32

Head = Callable[["Case"], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs of one shape, and the gradient that arrives at each logprob."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    targets_N: torch.Tensor
    temperature_N: torch.Tensor
    upstream_N: torch.Tensor

    @classmethod
    def of(cls, num_targets: int, hidden_size: int, vocab_size: int, device: str) -> Case:
        """Return random inputs in bfloat16."""
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": device}
        weight_VH = torch.randn(vocab_size, hidden_size, **options, dtype=torch.bfloat16)
        return cls(
            torch.randn(num_targets, hidden_size, **options, dtype=torch.bfloat16).requires_grad_(),
            weight_VH.mul_(hidden_size**-0.5).requires_grad_(),
            torch.randint(vocab_size, (num_targets,), **options),
            torch.ones(num_targets, device=device),
            torch.randn(num_targets, **options),
        )

    def clear(self) -> None:
        """Forget the gradients."""
        self.hidden_NH.grad = self.weight_VH.grad = None


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Return the figures of this section."""
    shapes = QUICK_SHAPES if settings.quick else SHAPES
    rows = []
    for i, (name, shape) in enumerate(shapes.items()):
        case = Case.of(*shape, settings.device)
        found: dict[str, Head | str] = {"naive": _naive, OURS[0]: _two_passes, OURS[1]: _one_pass, **_anchors()}
        runs: dict[str, Contender] = {k: v if isinstance(v, str) else partial(v, case) for k, v in found.items()}
        measured = in_turns(
            runs,
            settings,
            num_rounds=2 if settings.quick else 10,
            budget_s=0.6 * settings.left_s / (len(shapes) - i),
            before=case.clear,
            kept_bytes=case.hidden_NH.nbytes + case.weight_VH.nbytes,
        )
        exact_N = _exact_logprobs(case)
        for key, head in found.items():
            if "seconds" in measured[key] and not isinstance(head, str):
                case.clear()
                error_N = head(case)[: len(exact_N)].double() - exact_N
                measured[key]["largest_error"] = error_N.abs().max().item()
        case.clear()
        sizes = dict(zip(("num_targets", "hidden_size", "vocab_size"), shape, strict=True))
        rows.append({"model": name, **sizes, "dtype": "bfloat16", "heads": measured})
    return rows


def _naive(case: Case) -> torch.Tensor:
    logits_NV = (case.hidden_NH @ case.weight_VH.t()).float()
    logprobs_N = torch.log_softmax(logits_NV, 1).gather(1, case.targets_N[:, None]).squeeze(1)
    (logprobs_N * case.upstream_N).sum().backward()
    return logprobs_N.detach()


def _two_passes(case: Case) -> torch.Tensor:
    logprobs_N = chunked_logprobs(case.hidden_NH, case.weight_VH, case.targets_N, case.temperature_N)
    (logprobs_N * case.upstream_N).sum().backward()
    return logprobs_N.detach()


def _one_pass(case: Case) -> torch.Tensor:
    parts = []

    def loss_of(logprobs_C: torch.Tensor, rows: slice) -> torch.Tensor:
        parts.append(logprobs_C.detach())
        return (logprobs_C * case.upstream_N[rows]).sum()

    one_pass(case.hidden_NH, case.weight_VH, case.targets_N, case.temperature_N, loss_of).backward()
    return torch.cat(parts)


def _anchors() -> dict[str, Head | str]:
    """Return the heads of other frameworks, or why one of them is absent."""
    found: dict[str, Head | str] = {}
    for name, (module, function, options) in _ANCHORS.items():
        try:
            head = getattr(importlib.import_module(f"tests.losses.anchors.{module}"), function)
        except Exception as error:  # what a framework's import raises where something that it needs is missing
            found[name] = in_words(error)
        else:
            found[name] = partial(_other, head, options)
    return found


def _other(head: Callable[..., Any], options: dict[str, Any], case: Case) -> torch.Tensor:
    result = head(case.hidden_NH, case.weight_VH, case.targets_N, **options)
    logprobs_N: torch.Tensor = result[0] if isinstance(result, tuple) else result
    (logprobs_N * case.upstream_N).sum().backward()
    return logprobs_N.detach()


@torch.no_grad()
def _exact_logprobs(case: Case) -> torch.Tensor:
    """Return the logprobs of the first targets in float64."""
    logits_NV = case.hidden_NH[:_NUM_CHECKED].double() @ case.weight_VH.double().t()
    return torch.log_softmax(logits_NV, 1).gather(1, case.targets_N[:_NUM_CHECKED, None]).squeeze(1)
