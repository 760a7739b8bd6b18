"""Checks of optimizer settings that are passed to each step, and of loading weights without the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import accumulate, make_batch
from inflight.conformance.worker.gathering import Weights, compare_changes, differing, distance, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import AdjustableWorker, TrainerWorker
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import AdamSettings, MicroBatch, StepResult

LEVEL = "step"
_SETTINGS = (
    AdamSettings(learning_rate=3e-2, betas=(0.9, 0.95), eps=1e-2),
    AdamSettings(learning_rate=1e-2, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.5, max_gradient_norm=0.5),
    AdamSettings(learning_rate=5e-2, betas=(0.8, 0.999), eps=3e-2, max_gradient_norm=1e6),
    AdamSettings(learning_rate=2e-2, betas=(0.9, 0.9), eps=1e-2, weight_decay=0.1),
)
"""Every setting changes between the steps. The epsilons are large, because Adam divides by them where gradients are
small."""


_OWN = {"learning_rate": 1e-5, "weight_decay": 0.0}
_MORE, _BOUND = 100.0, 10.0
"""The learning rate of a step with settings as a multiple of the worker's own, and the largest change in a step of Adam
as a multiple of its learning rate."""


@check("W-63", deadline_s=50)
@look_at(
    "settings that are read once, when the optimizer is created; a clip, decay or schedule of the worker's own; "
    "settings that later steps use too"
)
def steps_take_settings(subject: WorkerSubject) -> None:
    """Where a worker accepts settings with each step, a step uses those alone: the weights are those that AdamW in
    float64 gives with the same settings. A later step without settings uses the worker's own."""
    worker = subject.create()
    if not _is_adjustable(worker):
        skip("takes_step_settings is not supported")
    batches = [_batches(subject, step) for step in range(len(_SETTINGS))]
    start = gathered(worker)
    results = [_step(subject, worker, of_step, it) for of_step, it in zip(batches, _SETTINGS, strict=True)]
    rates = [result.learning_rate for result in results]
    subject.note(learning_rates=rates, gradient_norms=[result.gradient_norm for result in results])
    wanted = [settings.learning_rate for settings in _SETTINGS]
    require(rates == wanted, f"steps with the learning rates {wanted} report {rates}")
    _require_own_settings(subject)
    found = gathered(worker)
    if subject.rank == 0:
        reference = ReferenceModel(subject.model())
        reference.take_steps(batches, _SETTINGS)
        what = f"{len(_SETTINGS)} steps whose settings change, compared with AdamW in float64"
        compare_changes(subject, start, reference.weights(start), found, what)


def _require_own_settings(subject: WorkerSubject) -> None:
    """Fail unless a step without settings, after one with settings, has the size that the worker's own settings give.
    All ranks call this."""
    options = subject.target.options
    own: dict[str, Any] = {name: value for name, value in _OWN.items() if name not in options}
    try:
        worker = subject.create(**own)
    except (ConfigError, UnsupportedError) as error:
        subject.note(refused=words_of(error))
        return
    rate = float({**_OWN, **options}["learning_rate"])
    # This decay halves the weights in a step at this rate, and this epsilon makes the rest of Adam's steps vanish.
    others = AdamSettings(_MORE * rate, (0.9, 0.95), eps=1e3, weight_decay=0.5 / (_MORE * rate), max_gradient_norm=1.0)
    _step(subject, worker, _batches(subject, 0), others)
    before = gathered(worker)
    accumulate(worker, [_batches(subject, 0)[subject.data_rank]])
    reported = worker.step().learning_rate
    after = gathered(worker)
    if options.keys() & {"warmup_steps", "schedule"}:
        rate = reported
    is_own, words = math.isclose(reported, rate, rel_tol=1e-6), f"reports the learning rate {reported}, not {rate}"
    subject.require_on_all_ranks(is_own, f"a step without settings, after one with settings, {words}")
    problem = _problem_of_size(subject, before, after, rate) if subject.rank == 0 else ""
    words = f"after one with a weight decay of {others.weight_decay:g} and an epsilon of {others.eps:g}"
    subject.require_on_all_ranks(not problem, f"a step without settings, {words}, {problem}")


def _problem_of_size(subject: WorkerSubject, before: Weights, after: Weights, rate: float) -> str:
    """Return an empty string if a step of Adam at this learning rate can make a change of this size, or else what is
    wrong."""
    num_elements = sum(tensor.numel() for tensor in before.values())
    size = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in before.values()) / num_elements)
    rounding = 2 * subject.tolerance.rounding * size
    moved = distance(before, after) / math.sqrt(num_elements)
    smallest, largest = 0.01 * rate - rounding, _BOUND * rate + rounding
    subject.note(change_without_settings=moved, smallest_allowed=smallest, largest_allowed=largest)
    if smallest <= moved <= largest:
        return ""
    words = f"changes weights by {moved:.2e} (root mean square), which is not from {smallest:.2e} to {largest:.2e}"
    return f"{words}, as its learning rate of {rate:g} implies"


@check("W-64", deadline_s=40)
@look_at("moments and the count of steps that a load leaves in the optimizer; the schedule's position")
def weights_load_without_the_optimizer(subject: WorkerSubject) -> None:
    """Where a worker accepts settings with each step, load(optimizer=False) loads the weights alone: the version is 0,
    and later steps are those of a new worker with these weights."""
    worker, path = subject.create(), subject.fresh_path("weights-only")
    if not _is_adjustable(worker):
        skip("takes_step_settings is not supported")
    for step in (0, 1):
        _step(subject, worker, _batches(subject, step), _SETTINGS[0])
    worker.save(path)
    saved, batches = gathered(worker), _batches(subject, 3)
    _step(subject, worker, _batches(subject, 2), _SETTINGS[1])
    expected: dict[str, torch.Tensor] = {}
    if subject.rank == 0:
        reference = ReferenceModel(subject.model())
        reference.put(saved)
        reference.take_steps([batches], _SETTINGS[1:2])
        expected = reference.weights(saved)
    for name, other in {"the worker that continued": worker, "a new worker": subject.create()}.items():
        other.load(path, optimizer=False)
        changed, version = differing(saved, gathered(other)), other.version
        words = f"{name} is at version {version}, and these tensors differ from the saved ones: {shortened(changed)}"
        subject.require_on_all_ranks(version == 0 and not changed, words)
        _step(subject, other, batches, _SETTINGS[1])
        found = gathered(other)
        if subject.rank == 0:
            what = f"the first step of {name} after loading weights alone, compared with AdamW in float64"
            compare_changes(subject, saved, expected, found, what)


@check("W-65", look_at="an argument that is ignored")
def settings_are_refused(subject: WorkerSubject) -> None:
    """A worker that does not accept settings with each step refuses them with UnsupportedError, and changes nothing."""
    worker = subject.create()
    if _is_adjustable(worker):
        skip("takes_step_settings is supported")
    before = gathered(worker)
    accumulate(worker, [_batches(subject, 0)[subject.data_rank]])
    error = error_of(lambda: worker.step(_SETTINGS[0]))
    subject.note(error=words_of(error))
    is_refused = isinstance(error, UnsupportedError | TypeError)
    changed = differing(before, gathered(worker))
    subject.require_on_all_ranks(
        is_refused and not changed,
        f"a step with settings raises {words_of(error)}, not UnsupportedError, or changes tensors: "
        f"{shortened(changed)}",
    )


def _is_adjustable(worker: TrainerWorker) -> bool:
    return isinstance(worker, AdjustableWorker) and worker.takes_step_settings


def _batches(subject: WorkerSubject, step: int) -> list[MicroBatch]:
    """Return one batch for each share of the data."""
    return [make_batch((14, 8), seed=700 + 10 * step + share) for share in range(subject.data_size)]


def _step(
    subject: WorkerSubject, worker: TrainerWorker, batches: Sequence[MicroBatch], settings: AdamSettings
) -> StepResult:
    accumulate(worker, [batches[subject.data_rank]])
    return worker.step(settings)
