"""Checks of a step's arithmetic against float64: clipping, AdamW, and the learning rate of the schedule.

Each step is compared separately: its gradient is computed at the weights that the worker itself had reached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import accumulate, make_batch
from inflight.conformance.worker.gathering import Weights, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.errors import ConfigError, UnsupportedError

LEVEL = "step"
_RATE, _DECAY, _MAX_NORM, _WARMUP, _TOTAL = 1e-2, 0.1, 1.0, 2, 9
_OPTIMIZER = {"learning_rate": _RATE, "weight_decay": _DECAY, "max_gradient_norm": _MAX_NORM}
_SCHEDULE = {"warmup_steps": _WARMUP, "schedule": "linear", "total_steps": _TOTAL}
_SCALES = (8.0, 2.0**-9, 0.0, 1.0, 2.0**-13, 2.0**-8)
"""Factors of the loss at each step. They give gradient norms of about 1,000, 0.3, 0, 100, 0.02 and 0.6; those of 1,000
and 100 are clipped to 1."""
_TRUSTED = 20.0
"""An element is compared only if its gradient exceeds the root mean square of the tensor's gradient, multiplied by this
factor and by the tolerance of gradients; the product of factor and tolerance is at most 1. AdamW divides by small
gradients, which magnifies their rounding errors."""
_BETAS = tuple(itertools.product((0.9, 0.95), (0.999, 0.95, 0.99, 0.98)))
"""The usual values; a worker may use any of these pairs."""
_EPSILON = 1e-8
"""This is too small to affect the elements that are compared."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step as the worker took it, recorded on rank 0, with its gradient before clipping."""

    before: Weights
    after: Weights
    gradients: Mapping[str, torch.Tensor]
    rate: float


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to take a step: the correct one, or one with a single fault, which ``fault`` names."""

    fault: str = ""
    betas: tuple[float, float] = _BETAS[0]
    decayed_dims: int = 0
    """Tensors with fewer dimensions do not decay."""
    weight_decay: float | None = None
    """None stands for the configured weight decay."""
    clipping: str = "all"
    moment_dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    factor_of_tied: float = 1.0
    rate_shift: int = 0
    is_coupled: bool = False


_FAULTS = (
    _Variant("gradients were never clipped", clipping="none"),
    _Variant("each tensor's gradient was clipped by its own norm", clipping="each"),
    _Variant("each element of the gradient was clipped", clipping="elements"),
    _Variant("the moments had the dtype bfloat16", moment_dtype=torch.bfloat16),
    _Variant("the weights had the dtype bfloat16", weight_dtype=torch.bfloat16),
    _Variant("tied weights were stepped twice", factor_of_tied=2.0),
    _Variant("the learning rate was that of the next step", rate_shift=1),
    _Variant("the learning rate was that of the step before", rate_shift=-1),
    _Variant("weight decay was part of the gradient", is_coupled=True),
    _Variant("weights decayed by torch's default of 0.01", weight_decay=0.01),
)


@check("W-74", deadline_s=40)
@look_at(
    "clipping by the norm over all parameters and ranks, dtypes of moments and weights, parameters that the optimizer "
    "has twice or not at all, the learning rate at the time of the step, a norm of 0"
)
def a_step_is_one_of_adamw(subject: WorkerSubject) -> None:
    """step() limits the gradient's norm over all parameters to max_gradient_norm, and takes a step of AdamW with the
    reported learning rate: each tensor changes as it would in float64, whether gradients are small, zero, large or
    clipped."""
    if subject.target.options.get("optimizer", "adamw") != "adamw":
        skip(f"the option optimizer is {subject.target.options['optimizer']!r}, and the reference is AdamW")
    for tied, scales in ((True, _SCALES), (False, _SCALES[:2])):
        taken, problem = _take(subject, scales, tied=tied)
        problem = problem or (_problem(subject, taken, "tied model" if tied else "untied model") if taken else "")
        subject.require_on_all_ranks(not problem, problem)


@check("W-75")
@look_at("the step that the schedule counts from, whether the rate is set before the optimizer's step or after it")
def the_rate_follows_the_schedule(subject: WorkerSubject) -> None:
    """The step from version v has the learning rate of the schedule at v: the warm-up reaches the full rate with the
    step numbered warmup_steps, and the decay begins with the following step and reaches zero at total_steps."""
    given = [name for name in (*_OPTIMIZER, *_SCHEDULE) if name in subject.target.options]
    worker = create_scheduled(subject)
    rates = []
    for number in range(_TOTAL):
        accumulate(worker, [make_batch((7,), seed=750 + number)])
        rates.append(worker.step().learning_rate)
    wanted = [_rate_at(version) for version in range(_TOTAL)]
    subject.note(learning_rates=rates, expected=wanted)
    if given:
        skip(f"the schedule is that of the options {', '.join(given)}")
    if _are_equal(rates, [_RATE] * _TOTAL):
        skip("it has no schedule: every step has the full learning rate, whatever warmup_steps and schedule are")
    require(_are_equal(rates, wanted), f"the learning rates of {_TOTAL} steps are {rates}, not {wanted}")


def _rate_at(version: int) -> float:
    warmth = min(1.0, (version + 1) / _WARMUP)
    return _RATE * warmth * min(1.0, (_TOTAL - version) / (_TOTAL - _WARMUP))


def _are_equal(rates: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in zip(rates, wanted, strict=True))


def create_scheduled(subject: WorkerSubject, *, tied: bool = False) -> TrainerWorker:
    """Return a worker with the kit's optimizer settings and, unless the worker refuses it, the kit's schedule."""
    own: dict[str, Any] = {
        name: it for name, it in {**_OPTIMIZER, **_SCHEDULE}.items() if name not in subject.target.options
    }
    try:
        return subject.create(tied=tied, **own)
    except (ConfigError, UnsupportedError):
        return subject.create(tied=tied, **{name: it for name, it in own.items() if name in _OPTIMIZER})


def _take(subject: WorkerSubject, scales: Sequence[float], *, tied: bool) -> tuple[list[_Taken], str]:
    """Take a step for each scale of the loss; return the steps (on rank 0), and the first error in a reported norm.

    All ranks call this.
    """
    worker, reference = create_scheduled(subject, tied=tied), ReferenceModel(subject.model(tied=tied))
    before, problem = gathered(worker), ""
    taken: list[_Taken] = []
    for number, scale in enumerate(scales):
        batches = [make_batch((14, 8), seed=740 + 10 * number + share) for share in range(subject.data_size)]
        accumulate(worker, [batches[subject.data_rank]], scale)
        result = worker.step()
        after = gathered(worker)
        if subject.rank == 0:
            reference.put(before)
            gradients = reference.gradients(batches, scale, before)
            taken.append(_Taken(before, after, gradients, result.learning_rate))
            found, expected = result.gradient_norm, _norm(gradients.values())
            if not abs(found - expected) <= subject.tolerance.gradient * expected:
                problem = problem or f"the gradient norm of step {number + 1} is {found:.6g}, not {expected:.6g}"
        before = after
    return taken, problem


def _problem(subject: WorkerSubject, taken: Sequence[_Taken], what: str) -> str:
    """Return an empty string if one choice of betas explains every change, or else the likeliest fault."""
    best, apart, largest = _Variant(), {"": math.inf}, math.inf
    for betas, (decay, dims) in itertools.product(_BETAS, ((None, 0), (None, 2), (0.0, 0))):
        variant = _Variant(betas=betas, weight_decay=decay, decayed_dims=dims)
        found = _apart(subject, taken, variant)
        if max(found.values(), default=0.0) < largest:
            best, apart, largest = variant, found, max(found.values(), default=0.0)
        if largest <= 1.0:
            break
    decays = "no tensor" if best.weight_decay == 0.0 else "matrices" if best.decayed_dims else "every tensor"
    relative = "difference, as a multiple of the tolerance"
    measured = {"betas": best.betas, relative: largest, "weights that decay": decays}
    subject.note(**{f"{name} ({what})": value for name, value in measured.items()})
    if largest <= 1.0:
        return ""
    explained = {it.fault: max(_apart(subject, taken, replace(it, betas=best.betas)).values()) for it in _FAULTS}
    subject.note(**{f"difference if wrong ({what})": explained})
    likely, tensor = min(explained, key=lambda fault: explained[fault]), max(apart, key=lambda name: apart[name])
    why = f", as if {likely}" if explained[likely] < 0.5 * largest else ""
    return (
        f"{what}: {len(taken)} steps change {tensor} differently from AdamW, by {largest:.3g} times the tolerance{why}"
    )


def _apart(subject: WorkerSubject, taken: Sequence[_Taken], variant: _Variant) -> dict[str, float]:
    """Return, for each tensor, the difference between its changes and those of a variant, divided by the tolerance."""
    tolerance, (beta1, beta2) = subject.tolerance, variant.betas
    decay = subject.target.options.get("weight_decay", _DECAY) if variant.weight_decay is None else variant.weight_decay
    max_norm: Any = subject.target.options.get("max_gradient_norm", _MAX_NORM)
    norms = [_norm(step.gradients.values()) for step in taken]
    found: dict[str, float] = {}
    for name, start in taken[0].before.items():
        first, second = torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start, dtype=torch.float64)
        trusted = torch.ones_like(start, dtype=torch.bool)
        wrong, size, rounding = [], [], []
        for i, step in enumerate(taken):
            gradient, before = step.gradients[name], step.before[name].double()
            limit = min(1.0, _TRUSTED * tolerance.gradient) * gradient.square().mean().sqrt()
            trusted &= (gradient.abs() > limit) | (limit == 0)
            gradient = _clipped(gradient, norms[i], max_norm, variant.clipping)
            own_decay = float(decay) if before.dim() >= variant.decayed_dims else 0.0
            if variant.is_coupled:
                gradient = gradient + own_decay * before
            first = (beta1 * first + (1 - beta1) * gradient).to(variant.moment_dtype).double()
            second = (beta2 * second + (1 - beta2) * gradient**2).to(variant.moment_dtype).double()
            mean, deviation = first / (1 - beta1 ** (i + 1)), (second / (1 - beta2 ** (i + 1))).sqrt()
            rate = taken[min(max(0, i + variant.rate_shift), len(taken) - 1)].rate
            change = -rate * (mean / (deviation + _EPSILON) + (0.0 if variant.is_coupled else own_decay) * before)
            if name == "model.embed_tokens.weight":
                change = variant.factor_of_tied * change
            if variant.weight_dtype is not None:
                change = (before + change).to(variant.weight_dtype).double() - before
            wrong.append(step.after[name].double() - before - change)
            size.append(change)
            rounding.append(before)
        allowed = tolerance.update * _norm(it[trusted] for it in size)
        allowed += 2 * tolerance.rounding * _norm(it[trusted] for it in rounding)
        if trusted.any() and allowed > 0:
            found[name] = _norm(it[trusted] for it in wrong) / allowed
    return found


def _clipped(gradient: torch.Tensor, norm: float, max_norm: float | None, clipping: str) -> torch.Tensor:
    if max_norm is None or clipping == "none":
        return gradient
    if clipping == "elements":
        return gradient.clamp(-max_norm, max_norm)
    norm = float(gradient.norm()) if clipping == "each" else norm
    return gradient * min(1.0, max_norm / norm) if norm else gradient


def _norm(tensors: Any) -> float:
    """Return the 2-norm over all elements of all tensors."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
