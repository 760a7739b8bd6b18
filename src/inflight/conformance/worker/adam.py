"""Checks of a step's arithmetic against float64: clipping, AdamW, and the learning rate of the schedule.

Each step is compared separately: its gradient is computed at the weights that the worker itself had reached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import accumulate, make_batch, take_steps
from inflight.conformance.worker.gathering import Weights, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.refusals import words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import AdjustableWorker, TrainerWorker
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import AdamSettings

LEVEL = "step"
_EMBEDDING = "model.embed_tokens.weight"
_RATE, _WARMUP, _TOTAL = 1e-2, 2, 9
_OPTIMIZER: Mapping[str, Any] = {"learning_rate": _RATE, "weight_decay": 0.1, "max_gradient_norm": 1.0}
_SCHEDULE: Mapping[str, Any] = {"warmup_steps": _WARMUP, "schedule": "linear", "total_steps": _TOTAL}
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""By schedule, the share of the full learning rate that remains after a share of the decay."""
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "linear": _SCHEDULE,
    "cosine": {**_SCHEDULE, "schedule": "cosine"},
    "constant after a warm-up": {**_SCHEDULE, "schedule": "constant"},
    "linear without a warm-up": {**_SCHEDULE, "warmup_steps": 0},
}
_TAKEN: Mapping[str, int] = {name: _TOTAL + 2 if name in _DECAYS else _WARMUP + 2 for name in _SCHEDULES}
"""Number of steps that are compared with each schedule."""
_TRUSTED = 20.0
"""An element is compared only if its gradient exceeds the root mean square of the tensor's gradient, multiplied by this
factor and by the tolerance of gradients; the product of factor and tolerance is at most 1. AdamW divides by small
gradients, which magnifies their rounding errors."""
_BETAS = tuple(itertools.product((0.9, 0.95), (0.999, 0.95, 0.99, 0.98)))
"""The usual values; a worker may use any of these pairs."""
_EPSILON, _LARGEST_EPSILON = 1e-8, 1e-7
"""The usual epsilon, and the largest one that a worker may use."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A configuration, and the factor of the loss at each step. A factor of 1 gives a gradient norm of about 100."""

    name: str
    tied: bool
    optimizer: Mapping[str, Any]
    scales: tuple[float, ...]


_CASES = (
    _Case("tied model", True, _OPTIMIZER, (8.0, 2.0**-9, 0.0, 1.0, 2.0**-13, 2.0**-8)),
    # Most rows of an untied embedding have a gradient in at most one of these steps.
    _Case(
        "untied model, max_gradient_norm 0.02, weight_decay 0.4",
        False,
        {**_OPTIMIZER, "max_gradient_norm": 0.02, "weight_decay": 0.4},
        (8.0, 0.0, 2.0**-14),
    ),
    _Case("untied model, max_gradient_norm None", False, {**_OPTIMIZER, "max_gradient_norm": None}, (1.0, 2.0**-9)),
)


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
    skips_rows: bool = False
    """Rows of the embedding without a gradient, and their moments, do not change."""
    rate_shift: int = 0
    is_coupled: bool = False


_FAULTS = (
    _Variant("gradients were never clipped", clipping="none"),
    _Variant("gradients were clipped to a norm of 1", clipping="to 1"),
    _Variant("each tensor's gradient was clipped by its own norm", clipping="each"),
    _Variant("each element of the gradient was clipped", clipping="elements"),
    _Variant("the moments had the dtype bfloat16", moment_dtype=torch.bfloat16),
    _Variant("the weights had the dtype bfloat16", weight_dtype=torch.bfloat16),
    _Variant("tied weights were stepped twice", factor_of_tied=2.0),
    _Variant("the learning rate was that of the next step", rate_shift=1),
    _Variant("the learning rate was that of the step before", rate_shift=-1),
    _Variant("weight decay was part of the gradient", is_coupled=True),
    _Variant("weights did not decay", weight_decay=0.0),
    _Variant("weights decayed by torch's default of 0.01", weight_decay=0.01),
    _Variant("rows of the embedding without a gradient were left out", skips_rows=True),
)


@check("W-74", deadline_s=60)
@look_at(
    "clipping by the norm over all parameters and ranks, dtypes of moments and weights, parameters that the optimizer "
    "has twice or not at all, the learning rate at the time of the step, a norm of 0, settings that are constants in "
    "the code, rows of an embedding that a sparse optimizer leaves out"
)
def a_step_is_one_of_adamw(subject: WorkerSubject) -> None:
    """step() limits the gradient's norm over all parameters to max_gradient_norm (None disables clipping), and takes a
    step of AdamW with weight_decay and the reported learning rate: each tensor changes as it would in float64, whether
    gradients are small, zero, large or clipped."""
    if subject.target.options.get("optimizer", "adamw") != "adamw":
        skip(f"the option optimizer is {subject.target.options['optimizer']!r}, and the reference is AdamW")
    refusals, betas = [], None
    for case in _CASES:
        worker, settings, refusal = _create(subject, case)
        if refusal:
            subject.note(**{f"refused ({case.name})": refusal})
        if worker is None:
            refusals.append(refusal)
            continue
        taken, problem = _take(subject, worker, case)
        if problem:
            problem = f"{case.name}: {problem}"
        elif taken:
            problem, betas = _problem(subject, taken, settings, case.name, betas)
        subject.require_on_all_ranks(not problem, problem)
    if len(refusals) == len(_CASES):
        skip(f"it accepts none of the kit's optimizer settings: {refusals[0]}")


@check("W-75", deadline_s=40)
@look_at(
    "the step that the schedule counts from, whether the rate is set before the optimizer's step or after it, the "
    "progress of a cosine, steps after the last one, and a warm-up of no steps"
)
def the_rate_follows_the_schedule(subject: WorkerSubject) -> None:
    """The step from version v has the learning rate of the schedule at v: the warm-up, if any, reaches the full rate
    with the step numbered warmup_steps, and the decay, linear or cosine, begins with the following step, reaches zero
    at total_steps and stays there."""
    found = {name: _rates(subject, schedule, _TAKEN[name]) for name, schedule in _SCHEDULES.items()}
    judged = {name: rates for name, rates in found.items() if rates is not None}
    subject.note(learning_rates=judged, refused=[name for name in found if name not in judged])
    if given := [name for name in (*_OPTIMIZER, *_SCHEDULE) if name in subject.target.options]:
        skip(f"the schedule is that of the options {', '.join(given)}")
    if not judged:
        judged = {"none": _rates(subject, {}, _TOTAL) or []}
        subject.note(learning_rates=judged)
    wanted = {name: [_rate_at(version, it) for version in range(_TAKEN[name])] for name, it in _SCHEDULES.items()}
    wanted["none"] = [_RATE] * _TOTAL
    _require_rate_after_settings(subject)
    if all(_are_equal(rates, [_RATE] * len(rates)) for rates in judged.values()):
        skip("it has no schedule: every step has the full learning rate, whatever warmup_steps and schedule are")
    subject.note(expected={name: wanted[name] for name in judged})
    for name, rates in judged.items():
        words = f"with the schedule {name}, the learning rates of {len(rates)} steps are {rates}, not {wanted[name]}"
        require(_are_equal(rates, wanted[name]), words)


def _rates(subject: WorkerSubject, schedule: Mapping[str, Any], num_steps: int) -> list[float] | None:
    """Return the learning rates that the steps of a new worker report, or None if the worker refuses the schedule."""
    try:
        worker = subject.create(**_unless_given(subject, {**_OPTIMIZER, **schedule}))
    except (ConfigError, UnsupportedError):
        if not schedule:
            raise
        return None
    results = take_steps(worker, [make_batch((7,), seed=750 + number) for number in range(num_steps)])
    return [result.learning_rate for result in results]


def _require_rate_after_settings(subject: WorkerSubject) -> None:
    """Fail unless a step with settings of its own counts as a step of the schedule. All ranks call this."""
    try:
        worker, own = (subject.create(**_unless_given(subject, {**_OPTIMIZER, **_SCHEDULE})) for _ in range(2))
    except (ConfigError, UnsupportedError):
        return
    if not (isinstance(worker, AdjustableWorker) and worker.takes_step_settings):
        return
    batches = [make_batch((7,), seed=760 + number) for number in range(_WARMUP + 1)]
    expected = [result.learning_rate for result in take_steps(own, batches)]
    accumulate(worker, batches[:1])
    worker.step(AdamSettings(learning_rate=_RATE / 3))
    found = [_RATE / 3, *(result.learning_rate for result in take_steps(worker, batches[1:]))]
    words = f"after a step with a learning rate of its own, the rates are {found}, not those of the schedule"
    require(_are_equal(found[1:], expected[1:]), f"{words}, {expected}")


def _rate_at(version: int, schedule: Mapping[str, Any]) -> float:
    warmup, total = int(schedule["warmup_steps"]), int(schedule["total_steps"])
    if version < warmup:
        return _RATE * (version + 1) / warmup
    return _RATE * _DECAYS[schedule["schedule"]](min(1.0, (version - warmup) / (total - warmup)))


def _are_equal(rates: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in zip(rates, wanted, strict=True))


def _unless_given(subject: WorkerSubject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not options of the target, which take precedence."""
    return {name: value for name, value in settings.items() if name not in subject.target.options}


def create_scheduled(
    subject: WorkerSubject, *, tied: bool = False, optimizer: Mapping[str, Any] = _OPTIMIZER
) -> TrainerWorker:
    """Return a worker with these optimizer settings and, unless the worker refuses it, the kit's schedule."""
    own = _unless_given(subject, optimizer)
    try:
        return subject.create(tied=tied, **own, **_unless_given(subject, _SCHEDULE))
    except (ConfigError, UnsupportedError):
        return subject.create(tied=tied, **own)


def _create(subject: WorkerSubject, case: _Case) -> tuple[TrainerWorker | None, dict[str, Any], str]:
    """Return a worker for a case, its settings, and the error with which it refused the settings of the case, if any.

    If the settings are refused, they are tried again without weight decay; if those are refused too, there is no
    worker.
    """
    settings = {**case.optimizer, **subject.target.options}
    try:
        return create_scheduled(subject, tied=case.tied, optimizer=case.optimizer), settings, ""
    except (ConfigError, UnsupportedError) as error:
        refusal = words_of(error)
    without = {name: value for name, value in case.optimizer.items() if name != "weight_decay"}
    try:
        worker = create_scheduled(subject, tied=case.tied, optimizer=without)
    except (ConfigError, UnsupportedError):
        return None, settings, refusal
    return worker, {"weight_decay": 0.0, **without, **subject.target.options}, refusal


def _take(subject: WorkerSubject, worker: TrainerWorker, case: _Case) -> tuple[list[_Taken], str]:
    """Take a step for each scale of the loss; return the steps (on rank 0), and the first error in a reported norm.

    All ranks call this.
    """
    reference = ReferenceModel(subject.model(tied=case.tied))
    before, problem = gathered(worker), ""
    taken: list[_Taken] = []
    for number, scale in enumerate(case.scales):
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


def _problem(
    subject: WorkerSubject,
    taken: Sequence[_Taken],
    settings: Mapping[str, Any],
    what: str,
    known: tuple[float, float] | None,
) -> tuple[str, tuple[float, float]]:
    """Return an empty string if one choice of betas explains every change, or else the likeliest fault; and the betas.

    ``known`` are the betas that explain an earlier case.
    """
    best, apart, largest = _Variant(), {"": math.inf}, math.inf
    for betas, dims in itertools.product(_BETAS, (0, 2)):
        variant = _Variant(betas=betas, decayed_dims=dims)
        found = _apart(subject, taken, settings, variant)
        if max(found.values(), default=0.0) < largest:
            best, apart, largest = variant, found, max(found.values(), default=0.0)
        if largest <= 1.0:
            break
    relative = "difference, as a multiple of the tolerance"
    decays = "matrices" if best.decayed_dims else "every tensor"
    measured = {"betas": best.betas, relative: largest, "weights that decay": decays}
    subject.note(**{f"{name} ({what})": value for name, value in measured.items()})
    if largest <= 1.0:
        return "", best.betas
    betas = known or best.betas
    explained = {it.fault: max(_apart(subject, taken, settings, replace(it, betas=betas)).values()) for it in _FAULTS}
    subject.note(**{f"difference if wrong ({what})": explained})
    likely, tensor = min(explained, key=lambda fault: explained[fault]), max(apart, key=lambda name: apart[name])
    why = f", as if {likely}" if explained[likely] < 0.5 * largest else ""
    words = f"{what}: {len(taken)} steps change {tensor} differently from AdamW, by {largest:.3g} times the tolerance"
    return words + why, betas


def _apart(
    subject: WorkerSubject, taken: Sequence[_Taken], settings: Mapping[str, Any], variant: _Variant
) -> dict[str, float]:
    """Return, for each tensor, the difference between its changes and those of a variant, divided by the tolerance."""
    tolerance, (beta1, beta2) = subject.tolerance, variant.betas
    decay = settings["weight_decay"] if variant.weight_decay is None else variant.weight_decay
    norms = [_norm(step.gradients.values()) for step in taken]
    found: dict[str, float] = {}
    for name, start in taken[0].before.items():
        first, second = torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start, dtype=torch.float64)
        trusted = torch.ones_like(start, dtype=torch.bool)
        wrong, size, rounding, blurred = [], [], [], []
        for i, step in enumerate(taken):
            gradient, before = step.gradients[name], step.before[name].double()
            limit = min(1.0, _TRUSTED * tolerance.gradient) * gradient.square().mean().sqrt()
            trusted &= (gradient.abs() > limit) | (limit == 0) | ((gradient == 0) & (name == _EMBEDDING))
            skipped = ~gradient.any(-1, keepdim=True) & (variant.skips_rows and name == _EMBEDDING)
            gradient = _clipped(gradient, norms[i], settings["max_gradient_norm"], variant.clipping)
            own_decay = float(decay) if before.dim() >= variant.decayed_dims else 0.0
            if variant.is_coupled:
                gradient = gradient + own_decay * before
            moments = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
            first = torch.where(skipped, first, moments[0].to(variant.moment_dtype).double())
            second = torch.where(skipped, second, moments[1].to(variant.moment_dtype).double())
            mean, deviation = first / (1 - beta1 ** (i + 1)), (second / (1 - beta2 ** (i + 1))).sqrt()
            rate = taken[min(max(0, i + variant.rate_shift), len(taken) - 1)].rate
            adapted = mean / (deviation + _EPSILON)
            change = -rate * (adapted + (0.0 if variant.is_coupled else own_decay) * before)
            if name == _EMBEDDING:
                change = variant.factor_of_tied * change.masked_fill(skipped, 0.0)
            if variant.weight_dtype is not None:
                change = (before + change).to(variant.weight_dtype).double() - before
            wrong.append(step.after[name].double() - before - change)
            size.append(change)
            rounding.append(before)
            blurred.append(rate * adapted * _LARGEST_EPSILON / (deviation + _EPSILON))
        allowed = tolerance.update * _norm(it[trusted] for it in size) + _norm(it[trusted] for it in blurred)
        allowed += 2 * tolerance.rounding * _norm(it[trusted] for it in rounding)
        if trusted.any() and allowed > 0:
            found[name] = _norm(it[trusted] for it in wrong) / allowed
    return found


def _clipped(gradient: torch.Tensor, norm: float, max_norm: float | None, clipping: str) -> torch.Tensor:
    if clipping == "to 1":
        max_norm = 1.0
    if max_norm is None or clipping == "none":
        return gradient
    if clipping == "elements":
        return gradient.clamp(-max_norm, max_norm)
    norm = float(gradient.norm()) if clipping == "each" else norm
    return gradient * min(1.0, max_norm / norm) if norm else gradient


def _norm(tensors: Any) -> float:
    """Return the 2-norm over all elements of all tensors."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
