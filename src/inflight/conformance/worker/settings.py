"""Checks of optimizer settings that are passed to each step, and of loading weights without the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import accumulate, logprobs_of, make_batch
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
    AdamSettings(learning_rate=0.0, betas=(0.9, 0.9), eps=1e-2, weight_decay=0.1),
)
"""Every setting changes between the steps. The epsilons are large, because Adam divides by them where gradients are
small."""


_OWN = {"learning_rate": 1e-2, "weight_decay": 1.0}
"""The worker's own settings, except those that the kit was started with."""
_MORE = 100.0
"""The learning rate of a step with settings, as a multiple of the worker's own."""


@check("W-63", deadline_s=50)
@look_at(
    "settings that are read once, when the optimizer is created; a clip, decay or schedule of the worker's own, even "
    "where a setting is 0; settings that later steps use too"
)
def steps_take_settings(subject: WorkerSubject) -> None:
    """Where a worker accepts settings with each step, a step uses those alone: the weights are those that AdamW in
    float64 gives with the same settings. A later step without settings uses the worker's own."""
    worker = _create_with_own_settings(subject) or subject.create()
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


def _create_with_own_settings(subject: WorkerSubject) -> TrainerWorker | None:
    """Return a new worker with `_OWN`, or None if it refuses these settings. All ranks call this."""
    try:
        return subject.create(**{**_OWN, **subject.target.options})
    except (ConfigError, UnsupportedError):
        return None


def _require_own_settings(subject: WorkerSubject) -> None:
    """Fail unless a step without settings, after one with settings, equals that of a worker that never received any.

    In the earlier step, all gradients are zero, so only weight decay changes the weights. It is the same for both
    workers. All ranks call this.
    """
    options = subject.target.options
    own = {**_OWN, **options}
    if is_scheduled := bool(options.keys() & {"warmup_steps", "schedule"}):
        own["weight_decay"] = 0.0
    try:
        workers = [subject.create(**own) for _ in range(2)]
    except (ConfigError, UnsupportedError) as error:
        subject.note(refused=words_of(error))
        return
    rate, decay = _MORE * float(own["learning_rate"]), float(own["weight_decay"]) / _MORE
    others = AdamSettings(rate, (0.5, 0.6), eps=1e3, weight_decay=decay, max_gradient_norm=1.0)
    batches = [_batches(subject, 0)[subject.data_rank]]
    rates, weights = [], []
    for worker, settings in zip(workers, (others, None), strict=True):
        accumulate(worker, batches, scale=0.0)
        worker.step(settings)
        weights.append(gathered(worker))
        accumulate(worker, batches)
        rates.append(worker.step().learning_rate)
        weights.append(gathered(worker))
    after = "a step without settings, after one with other settings,"
    is_own = math.isclose(rates[0], rates[1], rel_tol=1e-6) and (is_scheduled or math.isclose(rates[0], rate / _MORE))
    words = f"reports the learning rate {rates[0]}; without the other settings it reports {rates[1]}"
    subject.require_on_all_ranks(is_own, f"{after} {words}")
    problem = _difference(subject, *weights) if subject.rank == 0 else ""
    subject.require_on_all_ranks(not problem, f"{after} {problem}")


def _difference(subject: WorkerSubject, start: Weights, found: Weights, own_start: Weights, own: Weights) -> str:
    """Return how the step from ``start`` to ``found`` differs from the one from ``own_start`` to ``own``; an empty
    string if it does not."""
    before, moved, apart = distance(start, own_start), distance(own_start, own), distance(found, own)
    size = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in own_start.values()))
    allowed = subject.tolerance.change * moved + 2 * subject.tolerance.rounding * size
    subject.note(apart_before=before, moved_without_settings=moved, apart_without_settings=apart, allowed_apart=allowed)
    if before > allowed:
        return f"cannot be compared: the step before already moved weights by {before:.2e} although gradients were zero"
    if apart > allowed:
        return (
            f"moves the weights by {moved:.2e} and misses those of a worker without the other settings by {apart:.2e}"
        )
    return ""


@check("W-64", deadline_s=40)
@look_at(
    "moments and the count of steps that a load leaves in the optimizer; the schedule's position; copies of parameters "
    "that outlive a forward pass without a backward pass"
)
def weights_load_without_the_optimizer(subject: WorkerSubject) -> None:
    """Where a worker accepts settings with each step, load(optimizer=False) loads the weights alone: the version is 0,
    and later forward passes, steps and checkpoints are those of a new worker with these weights."""
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
    others, mine = {"the worker that continued": worker, "a new worker": subject.create()}, batches[subject.data_rank]
    before_T = logprobs_of(worker, mine)
    for other in others.values():
        other.load(path, optimizer=False)
    found_T, expected_T = (logprobs_of(other, mine) for other in others.values())
    apart, moved = (float((it_T - expected_T).abs().max()) for it_T in (found_T, before_T))
    subject.note(logprobs_apart_after_and_before_the_load=[apart, moved])
    words = f"after load(optimizer=False), logprobs of the worker that continued differ by up to {apart:.2e} nats"
    is_close = apart <= subject.tolerance.logprob
    subject.require_on_all_ranks(is_close, f"{words} from those of a new worker that loaded the same weights")
    for name, other in others.items():
        changed, version = differing(saved, gathered(other)), other.version
        words = f"{name} is at version {version}, and these tensors differ from the saved ones: {shortened(changed)}"
        subject.require_on_all_ranks(version == 0 and not changed, words)
        _step(subject, other, batches, _SETTINGS[1])
        found = gathered(other)
        if subject.rank == 0:
            what = f"the first step of {name} after loading weights alone, compared with AdamW in float64"
            compare_changes(subject, saved, expected, found, what)
    _require_resumed(subject, worker)


def _require_resumed(subject: WorkerSubject, worker: TrainerWorker) -> None:
    """Fail unless a worker resumed from a save after a load of weights alone steps like the original. All ranks call
    this."""
    path, resumed, batches = subject.fresh_path("after-weights-only"), subject.create(), _batches(subject, 4)
    worker.save(path)
    start = gathered(worker)
    resumed.load(path)
    for it in (worker, resumed):
        _step(subject, it, batches, _SETTINGS[0])
    expected, found = gathered(worker), gathered(resumed)
    if subject.rank == 0:
        what = "a step resumed from a save after a load of weights alone, compared with the original worker's same step"
        compare_changes(subject, start, expected, found, what, by_the_same_worker=True)


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
