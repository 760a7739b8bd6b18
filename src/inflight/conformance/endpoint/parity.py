"""Level parity: how far apart engine and trainer are with the same weights, and whether updates add to it.

This is mismatch: it exists at lag 0, and importance ratios should not have to correct it. The trainer is the given
worker, or transformers' forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext

import torch

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import Weights
from inflight.contracts import TrainerWorker
from inflight.extensions import resolve
from inflight.losses.metrics import metric_values, ratio_metrics
from inflight.losses.micro_batch import collate
from inflight.types import MicroBatch, Rollout, Sample
from inflight.weights.buckets import plan_buckets

LEVEL = "parity"
_NUM_PROMPTS = 8
_NUM_TOKENS = 96
_DRIFT_UPDATES = 50


@check("E-60", "updates", deadline_s=60)
@look_at("dtype of the head and of the softmax, position ids, attention scale, and which temperature is applied where")
async def mismatch(subject: EndpointSubject) -> None:
    """With the same weights, behaviour logprobs and trainer logprobs agree within the tolerance of the dtype."""
    with _worker(subject) as worker:
        if worker is not None:
            await subject.publisher.publish(_gathered(worker))
        values = _compare(subject, await _sample(subject), worker)
    subject.note(**values)
    bound = subject.tolerance
    require(values["largest"] <= bound, f"a logprob differs by {values['largest']:.3g} (tolerance {bound:g}): {values}")
    require(values["k3"] <= bound**2, f"k3 is {values['k3']:.3g} nats per token, more than {bound**2:.3g}: {values}")
    require(values["ESS"] >= 1 - bound, f"the effective sample size at lag 0 is {values['ESS']:.6g}: {values}")


@check("E-61", "updates", deadline_s=90)
@look_at("conversions that are applied to what is loaded already: scales, casts, transposes, merges")
async def drift(subject: EndpointSubject) -> None:
    """Fifty updates with the same weights do not move behaviour logprobs away from trainer logprobs."""
    with _worker(subject) as worker:
        weights = subject.reference.weights if worker is None else _gathered(worker)
        await subject.publisher.publish(weights)
        first = _compare(subject, await _sample(subject), worker)
        for _ in range(_DRIFT_UPDATES):
            await subject.publisher.publish(weights if worker is None else _gathered(worker))
        last = _compare(subject, await _sample(subject), worker)
    subject.note(
        **{f"{name}, after one update": value for name, value in first.items()},
        **{f"{name}, after {_DRIFT_UPDATES} more": value for name, value in last.items()},
    )
    bound = subject.tolerance / 5
    grown = last["mean difference"] - first["mean difference"]
    require(
        grown <= bound,
        f"after {_DRIFT_UPDATES} updates with the same weights, the mean difference of logprobs grew by {grown:.3g} "
        f"(more than {bound:.3g})",
    )


async def _sample(subject: EndpointSubject) -> MicroBatch:
    """Return completions of several prompts as one micro-batch."""
    num_tokens = min(_NUM_TOKENS, subject.capabilities.max_model_len // 2)
    samples = []
    for seed in range(_NUM_PROMPTS):
        prompt = subject.prompt(seed=seed)
        completion = await subject.generate(prompt, max_tokens=num_tokens, seed=seed)
        tokens, logprobs = completion.token_ids, completion.logprobs
        rollout = Rollout(prompt, tokens, logprobs, completion.version_spans, "length", 0.0, 1.0)
        samples.append(Sample(rollout, [1.0] * len(tokens), [True] * len(tokens)))
    return collate(samples)


def _compare(subject: EndpointSubject, batch: MicroBatch, worker: TrainerWorker | None) -> dict[str, float]:
    """Return k1, k3, ESS, largest and mean difference between behaviour and trainer logprobs."""
    if worker is not None:
        with torch.no_grad():
            trainer_T = worker.forward(batch)
    else:
        trainer_T = _reference_forward(subject, batch)
    trainer_N = trainer_T[batch.loss_mask_T].double()
    behaviour_N = batch.behaviour_logprobs_T[batch.loss_mask_T].double()
    values = metric_values(ratio_metrics(trainer_N, behaviour_N))
    return {
        "k1": values["behaviour_kl_k1"],
        "k3": values["behaviour_kl_k3"],
        "ESS": values["effective_sample_size"],
        "largest": values["max_abs_log_ratio"],
        "mean difference": float((trainer_N - behaviour_N).abs().mean()),
    }


def _reference_forward(subject: EndpointSubject, batch: MicroBatch) -> torch.Tensor:
    parts = []
    lengths = list(batch.segment_lengths)
    for ids, mask in zip(torch.split(batch.token_ids_T, lengths), torch.split(batch.loss_mask_T, lengths), strict=True):
        first = int(mask.nonzero()[0])
        logprobs = subject.reference.logprobs(subject.reference.weights, ids[:first].tolist(), ids[first:].tolist())
        parts.append(torch.cat([logprobs.new_zeros(first), logprobs]))
    return torch.cat(parts)


def _worker(subject: EndpointSubject) -> AbstractContextManager[TrainerWorker | None]:
    """Return a context of the given worker, made from the served checkpoint; of None without one."""
    if subject.target.worker is None:
        return nullcontext()
    worker = resolve(subject.target.worker)({"model_path": str(subject.reference.path)})
    return closing(worker) if hasattr(worker, "close") else nullcontext(worker)


def _gathered(worker: TrainerWorker) -> Weights:
    """Return the worker's weights as they would be published."""
    buckets = plan_buckets(worker.parameter_specs())
    tensors = {
        spec.name: tensor.cpu()
        for bucket in worker.gather_weights(buckets)
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True)
    }
    return Weights("the worker's", tensors)
