"""Checks of replayed experts. They use a mixture of experts, whatever model the kit was started with.

Shape suffixes: T packed tokens, L layers, K experts per token in each layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from inflight.conformance.checks import check, fail, look_at, skip
from inflight.conformance.worker.batches import accumulate, make_batch, segments_of_a_tree
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import PrefixSharingWorker, ReplayingWorker, TrainerWorker
from inflight.errors import UnsupportedError
from inflight.types import FREE_EXPERT, MicroBatch

LEVEL = "packing"
_LAYERS, _EXPERTS, _CHOSEN = 2, 12, 2
"""Sizes of the kit's mixture of experts: layers, experts per layer, and experts per token."""


@check("W-60", deadline_s=30)
@look_at(
    "which token a row of routed_experts_TLK belongs to (token t as an input), whether the weights are the router's "
    "own shares of the recorded experts, differentiable, whether tokens with -1 are routed freely, and, where prefixes "
    "are shared, which rows belong to the tokens that are computed"
)
def replayed_experts(subject: WorkerSubject) -> None:
    """Where a worker replays routing, logprobs and gradients are those of transformers with the recorded experts in
    place of those that its routers choose, tokens without a record in a layer are routed freely there, and segments may
    share prefixes."""
    model = subject.mixture()
    worker = subject.create_or_skip(model, "mixture of experts")
    if not (isinstance(worker, ReplayingWorker) and worker.replays_routing):
        skip("replays_routing is not supported")
    _compare(subject, worker, _batch(), "with recorded experts")
    if isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes:
        what = "with recorded experts and shared prefixes"
        _compare(subject, subject.create(model=model), _with_experts(segments_of_a_tree()), what)


def _compare(subject: WorkerSubject, worker: TrainerWorker, batch: MicroBatch, what: str) -> None:
    """Fail unless logprobs and the gradient norm of a batch with recorded experts are those of transformers."""
    reference = ReferenceModel(subject.mixture())
    with torch.no_grad():
        expected_T = reference.logprobs(batch)
        free_T = reference.logprobs(replace(batch, routed_experts_TLK=None))
    found_T = worker.forward(batch).detach().double()
    difference = float((found_T - expected_T).abs().max())
    measured = {"largest_difference": difference, "difference_to_free_routing": float((found_T - free_T).abs().max())}
    subject.note(allowed=subject.tolerance.logprob, **{f"{name} ({what})": value for name, value in measured.items()})
    subject.require_on_all_ranks(
        difference <= subject.tolerance.logprob, f"logprobs {what} differ by up to {difference:.2e} nats"
    )
    others = replace(make_batch((7,), seed=3, targets=False), group_ids_S=None)
    accumulate(worker, [batch if subject.data_rank == 0 else others])
    subject.compare_norm(worker, reference.gradient_norm([batch]), what)


@check("W-61")
@look_at("whether a worker that cannot replay routed_experts_TLK checks for it")
def unsupported_experts_are_refused(subject: WorkerSubject) -> None:
    """A worker that reports that it does not replay routing raises UnsupportedError for a micro-batch with recorded
    experts."""
    worker = subject.create()
    if not isinstance(worker, ReplayingWorker):
        skip("it does not report replays_routing, so a run sends it no recorded experts")
    if worker.replays_routing:
        skip("replays_routing is supported")
    refused = ""
    try:
        worker.forward(_batch())
    except UnsupportedError as error:
        refused = str(error)
        subject.note(refused_with=refused)
    if not refused:
        fail("a micro-batch with recorded experts was computed")


def _batch() -> MicroBatch:
    return _with_experts(make_batch((19, 1, 8), seed=60))


def _with_experts(batch: MicroBatch) -> MicroBatch:
    """Return the batch with random experts for three quarters of its tokens, a few of them only in some layers; equal
    prefixes have equal experts."""
    random = torch.Generator().manual_seed(61)
    shares_TLE = torch.rand(batch.num_tokens, _LAYERS, _EXPERTS, generator=random)
    experts_TLK = shares_TLE.topk(_CHOSEN, dim=-1).indices.to(torch.int16)
    experts_TLK[torch.rand(batch.num_tokens, generator=random) < 0.25] = FREE_EXPERT
    experts_TLK[torch.rand(batch.num_tokens, _LAYERS, generator=random) < 0.1] = FREE_EXPERT
    if batch.prefix_ids_T is not None:
        experts_TLK = experts_TLK[batch.prefix_ids_T]
    return replace(batch, routed_experts_TLK=experts_TLK)
