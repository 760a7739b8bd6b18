"""Plain transformers as the reference for the embedded engine, and what the engine's tests share.

The references know no slots, no packing and no batches: one sequence at a time, with eager attention.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.types import WeightBucket
from inflight.wire import BucketSpec, Completion, GenerateRequest, GenerateResponse, SamplingParams, TensorSpec

VOCAB_SIZE = 258
TOLERANCE = 2e-5
"""float32: sums in another order change logits of about 10 by some 1e-6 (measured: 1.6e-6 at most), times ten."""
WAIT_S = 60.0


@contextlib.asynccontextmanager
async def serving(path: Path, **options: Any) -> AsyncIterator[EmbeddedEndpoint]:
    """An endpoint on the CPU, closed at the end."""
    endpoint = load_endpoint(path, device="cpu", **options)
    try:
        yield endpoint
    finally:
        await endpoint.aclose()


def make_request(request_id: str, prompt: Iterable[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams.model_validate(sampling)
    )


async def generate_all(endpoint: EmbeddedEndpoint, requests: Sequence[GenerateRequest]) -> list[GenerateResponse]:
    """Answers of all requests, sent at once."""
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*(endpoint.generate(request) for request in requests))


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Bytes, so that no prompt holds a special token."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(256, (length,), generator=generator).tolist())


# ---------------------------------------------------------------------------------------------------------------
# References


def load_reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def log_softmax_at(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)


@torch.no_grad()
def forward_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log p(token | everything before it) of each completion token, from one forward of the whole sequence."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_softmax_at(logits, temperature).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@torch.no_grad()
def kept_cache_logprobs(
    models: Mapping[int, Any], prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> list[float]:
    """The same when weights change in between and keys and values are kept.

    The token at position p is read (its keys and values are stored) by the weights that sample the token at p + 1.
    """
    ids = [*prompt, *completion.token_ids]
    cache, read, logprobs = None, 0, []
    for span in completion.version_spans:
        stop = len(prompt) + span.end - 1
        output = models[span.version](torch.tensor([ids[read:stop]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[0, -(span.end - span.start) :]
        targets = torch.tensor(completion.token_ids[span.start : span.end])
        logprobs += log_softmax_at(logits, temperature).gather(1, targets[:, None])[:, 0].tolist()
        read = stop
    return logprobs


def recomputed_logprobs(
    models: Mapping[int, Any], prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> list[float]:
    """The same when keys and values are computed again: each token is scored by a whole forward of its own weights."""
    logprobs = []
    for span in completion.version_spans:
        whole = forward_logprobs(models[span.version], prompt, completion.token_ids, temperature)
        logprobs += whole[span.start : span.end]
    return logprobs


def assert_close(actual: Sequence[float], expected: Sequence[float], tolerance: float = TOLERANCE) -> None:
    assert len(actual) == len(expected)
    worst = max((abs(a - e) for a, e in zip(actual, expected, strict=True)), default=0.0)
    assert worst <= tolerance, f"logprobs differ by up to {worst:.3g}"


# ---------------------------------------------------------------------------------------------------------------
# Publishing


class CheckpointWorker:
    """What a publish asks of a trainer of one rank: named tensors and a version."""

    rank = 0
    world_size = 1

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.tensors = dict(tensors)
        self.version = version

    @classmethod
    def of_model(cls, model: Any, version: int) -> CheckpointWorker:
        return cls({name: p.detach() for name, p in model.named_parameters()}, version)

    def parameter_specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        specs, tensors = tuple(self.parameter_specs()), tuple(self.tensors.values())
        for bucket in buckets:
            rows = slice(bucket.start, bucket.stop)
            yield WeightBucket(bucket.index, specs[rows], tensors[rows])
