"""Checks of `gather_weights`: the yielded tensors, their lifetime, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.worker.batches import accumulate, every_target, logprobs_of, make_batch, take_steps
from inflight.conformance.worker.gathering import differing, gathered, same_bits
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import TensorSpec

LEVEL = "gather"
_NUM_STEPS = 5
_NAMES = "names and number of tensors: a head left out, a tied head sent twice or with its initial values"


@check("W-26", deadline_s=15)
@look_at("one WeightBucket per requested bucket, with its index and its specs; the cast to the wire dtype")
def gathered_weights_follow_the_specs(subject: WorkerSubject) -> None:
    """gather_weights() yields full tensors bucket by bucket, in the order and form of parameter_specs()."""
    worker = subject.create()
    specs = list(worker.parameter_specs())
    plan = plan_buckets(specs, 4096)
    found = list(worker.gather_weights(plan))
    subject.note(num_buckets=len(found), num_tensors=sum(len(bucket.tensors) for bucket in found))
    indexes = [bucket.index for bucket in found]
    require(indexes == list(range(len(plan))), f"{len(plan)} buckets were requested, but these were yielded: {indexes}")
    yielded = [spec for bucket in found for spec in bucket.specs]
    difference = _difference(yielded, specs)
    require(not difference, f"the specs of the buckets are not those of parameter_specs(): {difference}")
    if subject.rank == 0:
        tensors = [tensor for bucket in found for tensor in bucket.tensors]
        require(len(tensors) == len(specs), f"rank 0 got {len(tensors)} tensors for {len(specs)} specs")
        got = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
        wrong = [
            f"{spec.name} was yielded as {dtype} {shape}, not {spec.dtype} {spec.shape}"
            for spec, (dtype, shape) in zip(specs, got, strict=True)
            if (spec.dtype, spec.shape) != (dtype, shape)
        ]
        require(not wrong, f"tensors that differ from their specs: {shortened(wrong, 3)}")


@check("W-27", "ranks", look_at="full_tensor() gives the whole tensor to every rank: drop it on all but rank 0")
def only_rank_0_holds_tensors(subject: WorkerSubject) -> None:
    """Rank 0 holds the gathered tensors; the other ranks hold none."""
    worker = subject.create()
    buckets = list(worker.gather_weights(plan_buckets(worker.parameter_specs(), 4096)))
    num_tensors = subject.ranks.exchange(sum(len(bucket.tensors) for bucket in buckets))
    subject.note(num_tensors_by_rank=num_tensors)
    require(num_tensors[0] > 0, "rank 0 holds no tensors")
    require(not any(num_tensors[1:]), f"ranks hold {num_tensors} tensors")


@check("W-28", look_at=_NAMES)
def gathered_weights_are_the_model(subject: WorkerSubject) -> None:
    """The gathered weights form a checkpoint that computes what forward() computes."""
    _compare_with_forward(subject, tied=False)


@check("W-29", look_at=_NAMES)
def tied_weights_travel_once(subject: WorkerSubject) -> None:
    """Tied weights are gathered once, under the checkpoint's name, with their current values."""
    _compare_with_forward(subject, tied=True)


@check("W-30", look_at="a staging buffer shared by tensors of one bucket, offsets within a bucket")
def bucket_plans_change_nothing(subject: WorkerSubject) -> None:
    """Every bucket plan gives the same bytes."""
    worker = subject.create()
    take_steps(worker, [make_batch((14, 8), seed=120 + subject.data_rank)])
    plans = {"one tensor": 1, "4 KiB": 4096, "20 KiB": 20480, "everything": 1 << 30}
    found = {name: gathered(worker, size) for name, size in plans.items()}
    for name, weights in found.items():
        others = differing(found["one tensor"], weights)
        subject.note(**{f"differing tensors ({name})": len(others)})
        require(not others, f"buckets of {name} give different bytes than one tensor per bucket: {shortened(others)}")


@check("W-31")
@look_at("staging memory: two buckets are alive at once, the one that is sent and the one that is gathered")
def yielded_tensors_stay_valid(subject: WorkerSubject) -> None:
    """A yielded tensor is valid until the bucket after the next one is requested."""
    worker = subject.create()
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    changed, num_tensors = 0, 0
    for bucket in worker.gather_weights(plan_buckets(worker.parameter_specs(), 1)):
        changed += sum(not same_bits(tensor, copy) for tensor, copy in before)
        before = [(tensor, tensor.detach().clone()) for tensor in bucket.tensors]
        num_tensors += len(before)
    changed += sum(not same_bits(tensor, copy) for tensor, copy in before)
    subject.note(num_tensors=num_tensors, num_changed=changed)
    require(not changed, f"{changed} of {num_tensors} tensors had changed when the bucket after theirs was yielded")


@check("W-32", look_at="a mesh of one rank, on which gathering copies nothing; unsharded parameters such as norms")
def a_step_leaves_what_was_gathered(subject: WorkerSubject) -> None:
    """Gathered tensors share no memory with the parameters: a step does not change tensors that were already
    yielded."""
    worker = subject.create()
    buckets = list(worker.gather_weights(plan_buckets(worker.parameter_specs(), 1)))[-2:]
    kept = [(spec.name, t, t.detach().clone()) for b in buckets for spec, t in zip(b.specs, b.tensors, strict=False)]
    take_steps(worker, [make_batch((14, 8), seed=130 + 10 * seed + subject.data_rank) for seed in range(3)])
    changed = [name for name, tensor, copy in kept if not same_bits(tensor, copy)]
    subject.note(num_kept=len(kept), num_changed=len(changed))
    require(not changed, f"steps changed tensors that had been yielded: {changed}")


@check("W-33", deadline_s=30)
@look_at(
    "a copy kept from an earlier gather; parameters that a forward before the step left unsharded; gradients that a "
    "gather clears"
)
def every_gather_is_fresh(subject: WorkerSubject) -> None:
    """After a step, gather_weights() yields the weights of that step, and forward() computes with them, even if
    either was called before the step. A gather between backward() and step() does not change the gradient."""
    _compare_with_forward(subject, tied=False, gather_first=True)
    _require_gradients_kept(subject)


def _require_gradients_kept(subject: WorkerSubject) -> None:
    """Fail unless gradients survive a gather. All ranks call this."""
    pairs = [
        [make_batch((11, 6), seed=330 + share), make_batch((14,), seed=340 + share)]
        for share in range(subject.data_size)
    ]
    worker = subject.create()
    for batch in pairs[subject.data_rank]:
        accumulate(worker, [batch])
        gathered(worker)
    expected = ReferenceModel(subject.model()).gradient_norm([batch for pair in pairs for batch in pair])
    subject.compare_norm(worker, expected, "a step with a gather after each backward()")


def _compare_with_forward(subject: WorkerSubject, *, tied: bool, gather_first: bool = False) -> None:
    """Fail unless transformers, with the weights gathered after some steps, computes what the worker computes.

    The logprobs must be equal and must have changed by the same amounts: after small steps, even the old weights give
    logprobs that count as equal.
    """
    worker, batch = subject.create(tied=tied), every_target(make_batch((25,), seed=110))
    if gather_first:
        gathered(worker)
    start_T = logprobs_of(worker, batch)
    # After several steps, a forward() that ignores the last one goes unnoticed: the other steps move the logprobs too.
    num_steps = 1 if gather_first else _NUM_STEPS
    for seed in range(num_steps):
        accumulate(worker, [make_batch((14, 8), seed=111 + 10 * seed + subject.data_rank)])
        if gather_first:
            logprobs_of(worker, batch)
        worker.step()
    end_T = logprobs_of(worker, batch)
    weights = gathered(worker)
    if subject.rank != 0:
        return
    subject.note(num_tensors=len(weights), has_lm_head="lm_head.weight" in weights)
    reference = ReferenceModel(subject.model(tied=tied))
    with torch.no_grad():
        expected_start_T = reference.logprobs(batch)
        reference.put(weights)
        expected_end_T = reference.logprobs(batch)
    difference = float((end_T - expected_end_T).abs().max())
    moved_T, expected_moved_T = end_T - start_T, expected_end_T - expected_start_T
    moved, apart = float(moved_T.abs().max()), float((moved_T - expected_moved_T).abs().max())
    allowed = max(0.02 * moved, 6 * float((start_T - expected_start_T).abs().max()))
    subject.note(largest_difference=difference, logprobs_moved=moved, moved_apart=apart, allowed_apart=allowed)
    require(
        difference <= subject.tolerance.logprob,
        f"transformers' logprobs under the gathered weights differ from forward()'s by {difference:.2e} nats",
    )
    require(
        apart <= allowed,
        f"{num_steps} step(s) moved forward()'s logprobs by {moved:.2e}; the gathered weights move them differently, "
        f"by {apart:.2e}: some of the weights are old",
    )


def _difference(found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} of {len(expected)}"
    wrong = [f"{f.name} for {e.name}" for f, e in zip(found, expected, strict=True) if f != e]
    return f"{len(wrong)} differ: {shortened(wrong, 3)}" if wrong else ""
