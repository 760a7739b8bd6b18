"""The weights that a worker gathers, and how two sets of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from inflight.conformance.checks import fail, skip
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.weights.encode.buckets import plan_buckets

Weights = Mapping[str, torch.Tensor]


def gathered(worker: TrainerWorker, bucket_bytes: int = 1) -> dict[str, torch.Tensor]:
    """Return copies of the full weights on the CPU, by name; the result is empty on ranks other than 0. All ranks call
    this."""
    found: dict[str, torch.Tensor] = {}
    for bucket in worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes)):
        if bucket.tensors:
            names = [spec.name for spec in bucket.specs]
            found |= {n: _copied(t) for n, t in zip(names, bucket.tensors, strict=True)}
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy on the CPU, because yielded tensors may have any strides."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def differing(one: Weights, other: Weights) -> list[str]:
    """Return the names of tensors that are not bitwise equal."""
    names = [*one, *(name for name in other if name not in one)]
    return [n for n in names if n not in one or n not in other or not same_bits(one[n], other[n])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes, shape and dtype."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def distance(one: Weights, other: Weights) -> float:
    """Return the 2-norm of the differences of all tensors together."""
    return math.sqrt(sum(float((one[n].double() - other[n].double()).square().sum()) for n in one))


def compare_changes(
    subject: WorkerSubject,
    start: Weights,
    expected: Weights,
    found: Weights,
    what: str,
    *,
    by_the_same_worker: bool = False,
) -> None:
    """Fail unless ``found`` is close to ``expected``, relative to the distance of ``expected`` from ``start``.

    The maximum relative difference is the tolerance for two ways to compute the same number. It is smaller if both were
    computed ``by_the_same_worker``, so that it reveals moments in bfloat16, which make a difference of 1e-3. The check
    is skipped if the steps changed the weights so little that rounding hides the change.
    """
    moved, apart = distance(expected, start), distance(found, expected)
    size = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in start.values()))
    tolerance = subject.tolerance
    relative = min(tolerance.change, 2 * tolerance.update) if by_the_same_worker else tolerance.change
    allowed = relative * moved + 0.5 * tolerance.rounding * size
    subject.note(weights_moved=moved, weights_apart=apart, allowed_apart=allowed)
    if not moved > 8 * tolerance.rounding * size:
        skip(f"the steps move weights by {moved:.1e} of {size:.1e}, near rounding; give a larger learning rate")
    if not apart <= allowed:
        fail(f"{what}: the weights differ by {apart:.2e} after moving by {moved:.2e}")
