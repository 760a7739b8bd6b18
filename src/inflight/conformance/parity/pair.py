"""An engine and a trainer with the same weights, and their logprobs of the same tokens.

Shape suffixes: T packed tokens, N targets, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inflight.base.worker_kinds import load_worker_kind
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.parity.figures import Figures, figures_of
from inflight.conformance.reference import ReferenceWeights, chosen
from inflight.contracts import TrainerWorker
from inflight.losses.micro_batch import collate
from inflight.types import MicroBatch, Rollout, Sample
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import Completion


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions of some prompts, and the trainer's logprobs of their tokens."""

    completions: Sequence[tuple[tuple[int, ...], Completion]]
    """Completions, each with its prompt."""
    temperature: float
    batch: MicroBatch
    behaviour_N: torch.Tensor
    trainer_N: torch.Tensor

    @property
    def figures(self) -> Figures:
        return figures_of(self.trainer_N, self.behaviour_N)


class Pair:
    """An endpoint and the trainer that it is compared with: a worker, or transformers in float32."""

    def __init__(
        self, subject: EndpointSubject, worker: str | None, options: Mapping[str, Any], prompts: int, tokens: int
    ) -> None:
        """For each set of weights, a new worker of the kind ``worker`` is created with ``model_path`` and the options.

        Each call of `sample` or `sample_together` requests ``prompts`` completions of ``tokens`` tokens each, or of
        half the context if that is shorter.
        """
        self.subject = subject
        self._kind = worker
        self._options = options
        self._num_prompts = prompts
        self._num_tokens = min(tokens, subject.capabilities.max_model_len // 2)
        self._weights = subject.reference.weights
        self._worker: TrainerWorker | None = None

    async def set_weights(self, weights: ReferenceWeights) -> None:
        """Set the weights of both sides; they have the checkpoint's tensor names."""
        self.close()
        self._weights, published = weights, weights
        if self._kind is not None:
            reference = self.subject.reference
            path = reference.path
            if weights is not reference.weights:
                path = reference.save(weights, self.subject.directory / "parity" / weights.label)
            self._worker = load_worker_kind(self._kind).create({"model_path": str(path), **self._options})
            published = gathered(self._worker)
        await self.subject.publisher.publish(published)

    async def publish_again(self) -> None:
        """Publish the trainer's current weights again."""
        await self.subject.publisher.publish(self._weights if self._worker is None else gathered(self._worker))

    async def sample(self, temperature: float = 1.0) -> Sampled:
        """Return completions of several prompts, requested one after another."""
        asked = [(prompt := self._prompt(seed), await self._ask(prompt, seed, temperature)) for seed in self._seeds]
        return self._compared(asked, temperature)

    async def sample_together(self) -> Sampled:
        """Return completions of the same prompts and seeds at temperature 1, requested concurrently."""
        prompts = [self._prompt(seed) for seed in self._seeds]
        calls = (self._ask(prompt, seed, 1.0) for seed, prompt in zip(self._seeds, prompts, strict=True))
        return self._compared(list(zip(prompts, await asyncio.gather(*calls), strict=True)), 1.0)

    def trainer_logprobs(self, sampled: MicroBatch) -> torch.Tensor:
        """Return the trainer's logprobs [N] of the targets of a micro-batch."""
        if self._worker is None:
            logits_NV = self._reference_logits(sampled)
            return _logprobs(logits_NV, sampled)
        with torch.no_grad():
            return self._worker.forward(sampled)[sampled.loss_mask_T].double()

    def reference_logprobs(self, sampled: MicroBatch, rounded_to: torch.dtype | None = None) -> torch.Tensor:
        """Return transformers' logprobs [N] in float32, from logits rounded to ``rounded_to`` if that is given."""
        logits_NV = self._reference_logits(sampled)
        return _logprobs(logits_NV if rounded_to is None else logits_NV.to(rounded_to).float(), sampled)

    async def first_logprobs(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, float]]:
        """Return the first token of each prompt's completion and its logprob; equal logits give the same token."""
        same = self.subject.repeatable(0)
        answers = [await self.subject.generate(prompt, max_tokens=1, **same) for prompt in prompts]
        return [(answer.token_ids[0], answer.logprobs[0]) for answer in answers]

    def close(self) -> None:
        """Release the worker."""
        worker, self._worker = self._worker, None
        if worker is not None and hasattr(worker, "close"):
            worker.close()

    @property
    def _seeds(self) -> range:
        return range(self._num_prompts)

    def _prompt(self, seed: int) -> tuple[int, ...]:
        return self.subject.prompt(seed=seed)

    async def _ask(self, prompt: tuple[int, ...], seed: int, temperature: float) -> Completion:
        return await self.subject.generate(prompt, max_tokens=self._num_tokens, seed=seed, temperature=temperature)

    def _compared(self, asked: Sequence[tuple[tuple[int, ...], Completion]], temperature: float) -> Sampled:
        batch = collate([_sample_of(prompt, completion, temperature) for prompt, completion in asked])
        behaviour_N = batch.behaviour_logprobs_T[batch.loss_mask_T].double()
        return Sampled(asked, temperature, batch, behaviour_N, self.trainer_logprobs(batch))

    def _reference_logits(self, batch: MicroBatch) -> torch.Tensor:
        parts, lengths = [], list(batch.segment_lengths)
        masks = torch.split(batch.loss_mask_T, lengths)
        for ids, mask in zip(torch.split(batch.token_ids_T, lengths), masks, strict=True):
            first = int(mask.nonzero()[0])
            parts.append(self.subject.reference.logits(self._weights, ids[:first].tolist(), ids[first:].tolist()))
        return torch.cat(parts)


def at_temperature_one(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch as if its tokens had been sampled at temperature 1."""
    return replace(batch, temperature_T=torch.ones_like(batch.temperature_T))


def gathered(worker: TrainerWorker) -> ReferenceWeights:
    """Return the weights that a worker of one rank would publish."""
    buckets = plan_buckets(worker.parameter_specs())
    tensors = {
        spec.name: tensor.cpu()
        for bucket in worker.gather_weights(buckets)
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True)
    }
    return ReferenceWeights("the worker's", tensors)


def _sample_of(prompt: tuple[int, ...], completion: Completion, temperature: float) -> Sample:
    tokens, logprobs = completion.token_ids, completion.logprobs
    rollout = Rollout(prompt, tokens, logprobs, completion.version_spans, "length", 0.0, temperature)
    return Sample(rollout, [1.0] * len(tokens), [True] * len(tokens))


def _logprobs(logits_NV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    temperature_N = batch.temperature_T[batch.loss_mask_T].double()
    ids_N = batch.token_ids_T[batch.loss_mask_T].tolist()
    return chosen(torch.log_softmax(logits_NV.double() / temperature_N[:, None], dim=-1), ids_N)
