"""Checks of `step`: what it changes, reports and refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.adam import create_scheduled
from inflight.conformance.worker.batches import loss_of, make_batch, take_steps
from inflight.conformance.worker.gathering import compare_changes, differing, distance, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.errors import NonFiniteError, TrainerError
from inflight.types import MicroBatch

LEVEL = "step"
_LARGEST = torch.finfo(torch.float32).max


@check("W-21", look_at="the version after the step, not before it; a norm over one rank's shards")
def step_reports_what_it_did(subject: WorkerSubject) -> None:
    """step() increases the version by one; all ranks report the same version, gradient norm and learning rate."""
    worker = subject.create()
    for version in (1, 2):
        (result,) = take_steps(worker, [_batch(subject, version)])
        everyone = subject.ranks.exchange([result.version, result.gradient_norm, result.learning_rate, worker.version])
        subject.note(**{f"version_norm_rate_version_{version}": everyone})
        subject.require_on_all_ranks(
            result.version == worker.version == version,
            f"step {version} reports version {result.version}, but the worker's version is {worker.version}",
        )
        is_usable = math.isfinite(result.learning_rate) and result.learning_rate >= 0
        subject.require_on_all_ranks(is_usable, f"the learning rate is {result.learning_rate}")
        require(all(said == everyone[0] for said in everyone), f"ranks report different steps: {everyone}")


@check("W-22", look_at="an optimizer over parameters that were replaced since, by sharding or by a cast")
def step_changes_the_weights(subject: WorkerSubject) -> None:
    """step() updates the parameters."""
    worker = subject.create()
    before = gathered(worker)
    batches = [
        _batch(subject, seed) for seed in range(3)
    ]  # a schedule's warm-up may begin with a learning rate of zero
    rates = [result.learning_rate for result in take_steps(worker, batches)]
    after = gathered(worker)
    if subject.rank != 0:
        return
    changed = differing(before, after)
    moved = distance(before, after)
    subject.note(num_changed=len(changed), num_tensors=len(before), moved=moved, learning_rates=rates)
    too_small = max(rates) < (1e-3 if subject.tolerance.dtype == "bfloat16" else 1e-7)
    if not changed and too_small:
        skip(f"learning rates of {rates} change no weight by more than rounding; set a larger one with an option")
    require(changed, f"three steps with learning rates of {rates} change no weight")
    require(all(bool(t.isfinite().all()) for t in after.values()), "weights are not finite after three good steps")


@check("W-23", look_at="zero_grad after the optimizer's step, on the tensors that backward() fills")
def step_clears_the_gradients(subject: WorkerSubject) -> None:
    """step() clears the gradients."""
    batches = [make_batch((22,), seed=100 + rank) for rank in range(subject.data_size)]
    worker, reference = subject.create(), ReferenceModel(subject.model())
    (first,) = take_steps(worker, [batches[subject.data_rank]])
    weights = gathered(worker)
    (second,) = take_steps(worker, [batches[subject.data_rank]])
    if subject.rank == 0:
        reference.put(weights)
        expected = reference.gradient_norm(batches)
        found = second.gradient_norm
        subject.note(first_norm=first.gradient_norm, second_norm=found, expected_second_norm=expected)
        require(
            abs(found - expected) <= subject.tolerance.gradient * expected,
            f"the gradient norm of the second step is {found:.6g}, not {expected:.6g}: gradients of the first are left",
        )


@check(
    "W-24", look_at="a step before any backward(), which optimizers accept silently; gradients that are kept as zeros"
)
def step_without_gradient_is_refused(subject: WorkerSubject) -> None:
    """step() without a backward() since the last step raises TrainerError and changes nothing."""
    worker = subject.create()
    for version, when in enumerate(("before any backward()", "after a step")):
        before = gathered(worker)
        error = error_of(worker.step)
        changed = differing(before, gathered(worker))
        subject.note(**{f"error ({when})": words_of(error), f"version ({when})": worker.version})
        subject.require_on_all_ranks(
            isinstance(error, TrainerError), f"a step {when} raises {words_of(error)}, not TrainerError"
        )
        words = f"the step that was refused {when} leaves version {worker.version} and {len(changed)} changed tensors"
        subject.require_on_all_ranks(worker.version == version and not changed, words)
        (result,) = take_steps(worker, [_batch(subject, 1 + version)])
        require(result.version == version + 1, f"the step after the refused one leads to version {result.version}")


@check("W-25")
@look_at("test the norm over all ranks before clipping; clear gradients, leave moments, schedule and version unchanged")
def gradient_that_is_not_finite_is_refused(subject: WorkerSubject) -> None:
    """step() raises NonFiniteError on every rank if the gradient norm is not finite, and changes nothing."""
    worker, steady = create_scheduled(subject), create_scheduled(subject)
    for good in (worker, steady):  # so that the optimizer has moments, which the refused step must not change
        take_steps(good, [_batch(subject, 4)])
    before = gathered(worker)
    batch = _batch(subject, 1)
    is_culprit = subject.data_rank == subject.data_size - 1
    worker.backward(loss_of(worker.forward(batch), batch, math.nan if is_culprit else 1.0))
    error = error_of(worker.step)
    left = error_of(worker.step)
    after, version = gathered(worker), worker.version
    everyone = subject.ranks.exchange([words_of(error), version])
    subject.note(error_and_version_by_rank=everyone)
    refused = isinstance(error, NonFiniteError)
    subject.require_on_all_ranks(refused, f"a gradient of NaN raises {words_of(error)}, not NonFiniteError")
    words = f"a step that follows the refused one without a backward() raises {words_of(left)}, "
    words += "not TrainerError: gradients are left"
    is_cleared = isinstance(left, TrainerError) and not isinstance(left, NonFiniteError)
    subject.require_on_all_ranks(is_cleared, words)
    _require_unchanged(subject, before, after, version, expected_version=1)
    _compare_good_steps(subject, worker, steady, before)


@check("W-43", deadline_s=30)
@look_at("isfinite, not isnan; a clipping factor of max_norm / inf results in a step of zeros that counts")
def gradient_that_overflows_is_refused(subject: WorkerSubject) -> None:
    """A gradient with an infinite element, or whose norm overflows, is refused in the same way as one with NaN.

    A worker that computes in a wider type may report the norm and take the step.
    """
    worker, steady, reference = subject.create(), subject.create(), ReferenceModel(subject.model())
    batches = [make_batch((14, 8), seed=110 + rank) for rank in range(subject.data_size)]
    batch, last = batches[subject.data_rank], subject.data_size - 1
    huge = _LARGEST / 8 / reference.largest_gradient([batches[last]])
    norm_of_last = reference.gradient_norm([batches[last]])
    before = gathered(worker)
    # First, finite gradients whose squares overflow in float32; then gradients whose sum is infinite.
    for what, num_backwards in (("norm", 1), ("element", 16)):
        for _ in range(num_backwards):
            logprobs_T = worker.forward(batch)
            # The loss itself is 0, so that only its gradient overflows.
            logprobs_T = logprobs_T - logprobs_T.detach()
            worker.backward(loss_of(logprobs_T, batch, huge if subject.data_rank == last else 1.0))
        expected = num_backwards * huge * norm_of_last
        found, error = math.nan, None
        try:
            found = worker.step().gradient_norm
        except Exception as raised:  # judged below, on all ranks
            error = raised
        seen = f"a gradient norm of {found:.6g}" if error is None else words_of(error)
        is_refused = isinstance(error, NonFiniteError)
        everyone = subject.ranks.exchange([is_refused, seen])
        subject.note(**{f"{what} overflows, refused and seen by rank": everyone})
        subject.require_on_all_ranks(
            is_refused or abs(found - expected) <= subject.tolerance.gradient * expected,
            f"where the gradient's {what} overflows, step() results in {seen}, not NonFiniteError; the true value is "
            f"{expected:.6g}",
        )
        require(all(said[0] == is_refused for said in everyone), f"only some ranks refuse the step: {everyone}")
        if not is_refused:
            worker = subject.create()
        _require_unchanged(subject, before, gathered(worker), worker.version)
    _compare_good_steps(subject, worker, steady, before)


def _require_unchanged(
    subject: WorkerSubject,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    version: int,
    *,
    expected_version: int = 0,
) -> None:
    """Fail unless a refused step left weights and version unchanged. All ranks call this."""
    changed = differing(before, after)
    words = f"the refused step leaves version {version}, not {expected_version}, and {len(changed)} changed tensors"
    subject.require_on_all_ranks(version == expected_version and not changed, words)


def _compare_good_steps(
    subject: WorkerSubject, worker: TrainerWorker, steady: TrainerWorker, before: Mapping[str, torch.Tensor]
) -> None:
    """Fail unless two good steps lead ``worker``, whose step was refused, to the weights of ``steady``."""
    for good in (worker, steady):
        take_steps(good, [_batch(subject, 2), _batch(subject, 3)])
    found, expected = gathered(worker), gathered(steady)
    if subject.rank == 0:
        compare_changes(
            subject,
            before,
            expected,
            found,
            "with and without a refused step before two good ones",
            by_the_same_worker=True,
        )


def _batch(subject: WorkerSubject, seed: int) -> MicroBatch:
    return make_batch((14, 8), seed=1000 * seed + subject.data_rank)
