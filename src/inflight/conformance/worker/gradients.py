"""Checks of `backward`: sums over micro-batches and ranks, judged by the gradient norm that a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.worker.batches import (
    OF_SEVERAL_CHUNKS,
    accumulate,
    every_target,
    loss_of,
    make_batch,
    part_of,
)
from inflight.conformance.worker.forward import DEPTH, STEEPNESS
from inflight.conformance.worker.gathering import compare_changes, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import VOCAB_SIZE, WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.contracts.trainer import data_ranks_of

LEVEL = "gradient"
LENGTHS = (9, 4, 17, 1, 6, 23)
_MANY_TOKENS = 9216
"""Size of a vocabulary that a head computes in several parts."""
_AVERAGES = "an average instead of a sum, a weight per rank or micro-batch, gradients scaled twice"


@check("W-15", deadline_s=30)
@look_at(
    "gradient_norm of StepResult: before clipping, over all parameters and ranks; scaling in backward(), and by "
    "temperatures; the backward pass of a head that is computed in chunks of targets or of the vocabulary"
)
def gradient_norm_equals_autograd(subject: WorkerSubject) -> None:
    """The gradient of a loss is the one that autograd computes, at any temperature, for logits of any magnitude, and
    for any number of targets and tokens in the vocabulary; the reported norm is the norm before clipping."""
    # Norms below and above the usual thresholds of clipping.
    reference = ReferenceModel(subject.model())
    batches = [make_batch((17,), seed=30 + rank, temperature=None) for rank in range(subject.data_size)]
    for name, scale in (("tiny", 2.0**-30), ("small", 2.0**-10), ("large", 8.0)):
        worker = subject.create()
        accumulate(worker, [batches[subject.data_rank]], scale)
        subject.compare_norm(worker, reference.gradient_norm(batches, scale), f"{name} loss")
    batches[0] = every_target(make_batch(OF_SEVERAL_CHUNKS, seed=35, temperature=None))
    worker = subject.create()
    accumulate(worker, [batches[subject.data_rank]])
    subject.compare_norm(worker, reference.gradient_norm(batches), f"{int(batches[0].loss_mask_T.sum())} targets")
    batches = [make_batch((17, 30), seed=36 + rank) for rank in range(subject.data_size)]
    for what, path in {"large": subject.steep_model(STEEPNESS), "low": subject.low_model(DEPTH)}.items():
        worker = subject.create(model=path)
        accumulate(worker, [batches[subject.data_rank]])
        subject.compare_norm(worker, ReferenceModel(path).gradient_norm(batches), f"{what} logits")
    path = subject.large_model("many tokens", hidden_size=32, num_layers=2, vocab_size=_MANY_TOKENS)
    batches = [make_batch((17, 30), seed=37 + rank, temperature=None) for rank in range(subject.data_size)]
    batches = [replace(it, token_ids_T=it.token_ids_T * (_MANY_TOKENS // VOCAB_SIZE)) for it in batches]
    worker = subject.create(model=path)
    accumulate(worker, [batches[subject.data_rank]])
    subject.compare_norm(worker, ReferenceModel(path).gradient_norm(batches), f"vocabulary of {_MANY_TOKENS} tokens")


@check("W-16", look_at="a head that is computed from a copy or a detached weight; two parameters in place of one")
def gradient_of_a_tied_model(subject: WorkerSubject) -> None:
    """The gradient of a tied embedding is the sum over both of its uses."""
    batches = [make_batch((17,), seed=40 + rank) for rank in range(subject.data_size)]
    worker = subject.create(tied=True)
    accumulate(worker, [batches[subject.data_rank]])
    subject.compare_norm(worker, ReferenceModel(subject.model(tied=True)).gradient_norm(batches), "tied model")


@check("W-17", look_at="division by gradient accumulation steps; " + _AVERAGES)
def micro_batches_are_summed(subject: WorkerSubject) -> None:
    """Gradients are summed over micro-batches, never averaged: any split gives the same gradient."""
    whole = make_batch(LENGTHS, seed=50 + subject.data_rank)
    norms = {}
    splits: dict[str, list[Sequence[int]]] = {"one": [range(6)], "two": [range(3), range(3, 6)]}
    splits["six"] = [[i] for i in range(6)]
    for name, cuts in splits.items():
        worker = subject.create()
        accumulate(worker, [part_of(whole, cut) for cut in cuts])
        norms[name] = worker.step().gradient_norm
    subject.note(gradient_norm_by_micro_batches=norms)
    for name, norm in norms.items():
        require(
            abs(norm - norms["one"]) <= subject.tolerance.gradient * norms["one"],
            f"the gradient norm is {norm:.6g} in {name} micro-batches and {norms['one']:.6g} in one",
        )


@check("W-18", "ranks")
@look_at("the reduction of DDP and FSDP averages by default (set_gradient_divide_factor); " + _AVERAGES)
def ranks_are_summed(subject: WorkerSubject) -> None:
    """Gradients are summed over ranks, never averaged."""
    batch = make_batch((11, 6), seed=60)
    worker = subject.create()
    accumulate(worker, [batch])
    one, num = ReferenceModel(subject.model()).gradient_norm([batch]), subject.data_size
    found = subject.compare_norm(worker, one * num, f"{num} shares of the same batch")
    subject.note(gradient_norm_of_one_rank=one, factor=found / one, num_shares=num)


@check("W-19", "ranks")
@look_at("denominators per rank: numbers of tokens, micro-batches or busy ranks; " + _AVERAGES)
def shares_may_be_unequal(subject: WorkerSubject) -> None:
    """Ranks may have unequal shares of the data, or none: the gradient is the same."""
    whole, empty = make_batch(LENGTHS, seed=70), make_batch((), seed=70)
    expected = ReferenceModel(subject.model()).gradient_norm([whole])
    last = subject.data_size - 1
    cases: dict[str, dict[int, Sequence[int]]] = {
        "all on the last rank": {last: range(6)},
        "one segment on the last rank": {last: [0], 0: range(1, 6)},
    }
    if last == 0:  # all ranks compute the same data
        del cases["one segment on the last rank"]
    for name, shares in cases.items():
        worker = subject.create()
        accumulate(worker, [part_of(whole, shares[subject.data_rank]) if subject.data_rank in shares else empty])
        subject.compare_norm(worker, expected, name)


@check("W-45", "ranks")
@look_at("data_parallel_rank and data_parallel_size; a loss that several ranks compute must reach each gradient once")
def shared_batches_count_once(subject: WorkerSubject) -> None:
    """Ranks that compute a micro-batch together return the same logprobs, and its gradient counts once."""
    worker = subject.create()
    share = data_ranks_of(worker)
    batches = [make_batch((12, 7), seed=140 + rank) for rank in range(share.size)]
    everyone = subject.ranks.exchange(list(share))
    subject.note(data_parallel_rank_and_size=everyone)
    shares = [rank for rank, _ in everyone]
    each = subject.world_size // share.size
    require(
        all(size == share.size for _, size in everyone) and sorted(shares) == sorted([*range(share.size)] * each),
        f"the ranks report these shares and numbers of shares: {everyone}; equally many ranks must compute each share",
    )
    logprobs_T = worker.forward(batches[share.rank])
    found = subject.ranks.exchange(logprobs_T.detach().tolist())
    apart = max(
        float((logprobs_T.detach() - torch.tensor(theirs)).abs().max())
        for theirs, rank in zip(found, shares, strict=True)
        if rank == share.rank
    )
    subject.require_on_all_ranks(
        apart <= subject.tolerance.logprob, f"ranks with the same micro-batch return logprobs {apart:.2e} nats apart"
    )
    worker.backward(loss_of(logprobs_T, batches[share.rank]))
    expected = ReferenceModel(subject.model()).gradient_norm(batches)
    subject.compare_norm(worker, expected, f"{share.size} different micro-batches on {subject.world_size} ranks")


def train_on_one_rank(subject: WorkerSubject) -> None:
    """Store the weights of one rank before and after two steps."""
    worker = subject.create()
    start = gathered(worker)
    _two_steps(worker, subject)
    directory = subject.fresh_path("one-rank")
    directory.mkdir()
    save_file(start, directory / "start.safetensors")
    save_file(gathered(worker), directory / "end.safetensors")


@check("W-20", deadline_s=30, before=train_on_one_rank)
@look_at("clipping by a rank's own norm, optimizer state that starts differently, unreduced gradients")
def ranks_change_nothing(subject: WorkerSubject) -> None:
    """The number of ranks changes nothing: the weights after two steps are those of one rank."""
    subject.skip_on_one_rank()
    worker = subject.create()
    _two_steps(worker, subject)
    found = gathered(worker)
    if subject.rank == 0:
        directory: Path = subject.directory / "one-rank"
        start, end = (load_file(directory / f"{name}.safetensors") for name in ("start", "end"))
        compare_changes(subject, start, end, found, f"one rank and {subject.world_size} ranks")


@check("W-42", deadline_s=30)
@look_at(
    "DDP reduces once for each forward and silently leaves out the later backwards: reduce in step(); state "
    "that one forward stores for its backward and the next forward replaces"
)
def forwards_may_come_first(subject: WorkerSubject) -> None:
    """Backward passes may follow several forward passes, and in any order; the gradient is the same."""
    batches = [
        [make_batch((11, 6), seed=90 + rank), make_batch((3, 14), seed=95 + rank)] for rank in range(subject.data_size)
    ]
    mine = batches[subject.data_rank]
    expected = ReferenceModel(subject.model()).gradient_norm([batch for pair in batches for batch in pair])
    for name, order in {"the first backward first": (0, 1), "the second backward first": (1, 0)}.items():
        worker = subject.create()
        losses = [loss_of(worker.forward(batch), batch) for batch in mine]
        for i in order:
            worker.backward(losses[i])
        subject.compare_norm(worker, expected, f"two forwards, then {name}")
    worker = subject.create()
    for batch, other in zip(mine, reversed(mine), strict=True):
        loss = loss_of(worker.forward(batch), batch)
        with torch.no_grad():
            worker.forward(other)
        worker.backward(loss)
    subject.compare_norm(worker, expected, "a forward without gradient before each backward")


def _two_steps(worker: TrainerWorker, subject: WorkerSubject) -> None:
    """Take a step with a gradient that may be clipped, and one with a gradient below any threshold."""
    for step, scale in enumerate((4.0, 2.0**-8)):
        whole = make_batch(LENGTHS, seed=80 + step, temperature=None)
        mine = range(subject.data_rank, len(LENGTHS), subject.data_size)
        accumulate(worker, [part_of(whole, mine)], scale)
        worker.step()
