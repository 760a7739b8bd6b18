"""Checks of segments that share a micro-batch, and of empty micro-batches.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import (
    accumulate,
    every_target,
    loss_of,
    make_batch,
    part_of,
    segment_rows,
    segments_of_a_tree,
)
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import VOCAB_SIZE, WorkerSubject
from inflight.contracts import PrefixSharingWorker
from inflight.types import MicroBatch

LEVEL = "packing"
LENGTHS = (9, 4, 17, 1, 26)
_MANY = (2, 3, 1) * 100
"""Lengths of segments, of which there are more than a byte can count."""


@check("W-11")
@look_at(
    "position ids that start at 0 in each segment, the mask between segments, per-token temperatures, limits on the "
    "number of segments"
)
def packed_equals_separate(subject: WorkerSubject) -> None:
    """A segment's logprobs are the same whether it is alone or packed with others, however many others there are."""
    worker, batch = subject.create(), make_batch(LENGTHS, seed=11, temperature=None)
    with torch.no_grad():
        together_T = worker.forward(batch)
        alone_T = torch.cat([worker.forward(part_of(batch, [i])) for i in range(len(LENGTHS))])
    difference_T = (together_T - alone_T).abs()
    differences = [float(difference_T[rows].max()) for rows in segment_rows(LENGTHS)]
    subject.note(largest_difference_by_segment=differences, allowed=subject.tolerance.logprob)
    require(
        max(differences) <= subject.tolerance.logprob,
        f"a segment's logprobs differ by up to {max(differences):.2e} nats when others are packed with it",
    )
    batch = make_batch(_MANY, seed=16, temperature=None)
    with torch.no_grad():
        there_T, back_T = worker.forward(batch), worker.forward(part_of(batch, range(len(_MANY))[::-1]))
    again_T = torch.cat([back_T[rows] for rows in segment_rows(_MANY[::-1])[::-1]])
    difference = float((there_T - again_T).abs().max())
    subject.note(**{f"largest difference of {len(_MANY)} segments in reverse order": difference})
    words = f"logprobs of {len(_MANY)} segments differ by up to {difference:.2e} nats when their order is reversed"
    require(difference <= subject.tolerance.logprob, words)


@check("W-12")
@look_at("attention across segments: segment_lengths must reach the attention as cu_seqlens or a block mask")
def segments_do_not_see_each_other(subject: WorkerSubject) -> None:
    """Segments do not see each other: no logprob depends on a token of another segment."""
    worker, batch = subject.create(), every_target(make_batch((12, 9, 30), seed=12))
    token_ids_T = batch.token_ids_T.clone()
    token_ids_T[12:21] = (token_ids_T[12:21] + 1) % VOCAB_SIZE
    with torch.no_grad():
        change_T = (worker.forward(replace(batch, token_ids_T=token_ids_T)) - worker.forward(batch)).abs()
    changes = [float(change_T[rows].max()) for rows in segment_rows((12, 9, 30))]
    subject.note(change_by_segment=changes, changed_segment=1)
    require(
        max(changes[0], changes[2]) <= subject.tolerance.logprob,
        f"other tokens in segment 1 change logprobs of segment 0 by {changes[0]:.2e}, of segment 2 by {changes[2]:.2e}",
    )
    require(changes[1] > subject.tolerance.logprob, "other tokens in segment 1 do not change its own logprobs")


@check("W-13", look_at="the backward of the attention: the mask or cu_seqlens that its forward used")
def no_gradient_crosses_segments(subject: WorkerSubject) -> None:
    """No gradient crosses from one segment to another."""
    batch = make_batch((14, 16), seed=13)
    only_second = replace(batch, loss_mask_T=batch.loss_mask_T & (batch.segment_ids_T == 1))
    packed, alone = subject.create(), subject.create()
    accumulate(packed, [only_second])
    accumulate(alone, [part_of(batch, [1])])
    found, expected = packed.step().gradient_norm, alone.step().gradient_norm
    subject.note(gradient_norm_packed=found, gradient_norm_alone=expected)
    words = f"the gradient norm of a segment is {found:.6g} after another segment and {expected:.6g} without it"
    require(abs(found - expected) <= subject.tolerance.gradient * expected, words)


@check("W-62")
@look_at(
    "prefix_ids_T: that a token is attended by every segment that shares it and by no other, that the targets after a "
    "shared prefix are predicted at its last token, and that the gradients of a shared token are summed"
)
def shared_prefixes(subject: WorkerSubject) -> None:
    """Where a worker shares prefixes, logprobs and gradients are those that transformers computes from each segment
    alone, whatever tree the segments form."""
    worker = subject.create()
    if not (isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes):
        skip("shares_prefixes is not supported")
    batch, reference = segments_of_a_tree(), ReferenceModel(subject.model())
    with torch.no_grad():
        expected_T = reference.logprobs(batch)
    difference_T = (worker.forward(batch).detach().double() - expected_T).abs()
    differences = [float(difference_T[rows].max()) for rows in segment_rows(batch.segment_lengths)]
    subject.note(largest_difference_by_segment=differences, allowed=subject.tolerance.logprob)
    subject.require_on_all_ranks(
        max(differences) <= subject.tolerance.logprob,
        f"logprobs of a segment that shares a prefix differ by up to {max(differences):.2e} nats",
    )
    others = make_batch((7,), seed=3, targets=False)
    accumulate(worker, [batch if subject.data_rank == 0 else others])
    subject.compare_norm(worker, reference.gradient_norm([batch]), "of segments that share prefixes")


@check("W-14", look_at="an early return that leaves other ranks in a collective, or a constant that backward() refuses")
def batches_without_targets_take_part(subject: WorkerSubject) -> None:
    """A rank can take part with a micro-batch without tokens or targets: it gets zeros and contributes a gradient of
    zero."""
    batches = [make_batch((17,), seed=20 + rank) for rank in range(subject.data_size)]
    empties = [make_batch((), seed=14), make_batch((6, 1), seed=14, targets=False)]
    mine = [batches[subject.data_rank]]
    mine = [*mine, *empties] if subject.data_rank % 2 == 0 else [*empties, *mine]
    worker = subject.create()
    problems = []
    for batch in mine:
        logprobs_T = worker.forward(batch)
        if not batch.loss_mask_T.any():
            problems += _problems_of_nothing(logprobs_T, batch)
        worker.backward(loss_of(logprobs_T, batch))
    subject.require_on_all_ranks(not problems, "; ".join(problems))
    subject.compare_norm(
        worker, ReferenceModel(subject.model()).gradient_norm(batches), "together with batches without targets"
    )


def _problems_of_nothing(logprobs_T: torch.Tensor, batch: MicroBatch) -> list[str]:
    """Return what is wrong with the logprobs of a batch without targets."""
    shape, kind = tuple(logprobs_T.shape), f"a batch of {batch.num_tokens} tokens without targets"
    problems = [f"{kind} gives the shape {shape}"] if shape != (batch.num_tokens,) else []
    if bool((logprobs_T != 0).any()):
        problems.append(f"{kind} gives logprobs that are not 0")
    if not logprobs_T.requires_grad:
        problems.append(f"{kind} gives logprobs that do not depend on the parameters")
    return problems
