"""Trainer workers for tests of weight movement: plain tensors, and hooks where a test wants something to happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from inflight.http.client import HttpEndpoint
from inflight.types import WeightBucket
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import (
    BucketSpec,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    LoraSpec,
    Manifest,
    SamplingParams,
    TensorSpec,
    WeightUpdate,
    WeightVersion,
)
from tests.gates import SOON_S, wait_until
from tests.servers import TOKEN, ServerProcess

T = TypeVar("T")
PROMPT = tuple(b"weights")
LORA = LoraSpec(rank=4, alpha=2.0)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec.model_validate(
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
    )


class PlainWorker:
    """Rank 0 of 1 with a dict of tensors, the publishing half of a `TrainerWorker`.

    ``on_bucket(i)`` runs before bucket i is yielded, ``on_bucket(num_buckets)`` before the generator ends.
    """

    rank = 0
    world_size = 1

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], version: int = 1, on_bucket: Callable[[int], None] | None = None
    ) -> None:
        self.tensors = dict(tensors)
        self.version = version
        self.on_bucket = on_bucket
        self.num_exhausted = 0
        self.num_started = 0

    def parameter_specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        self.num_started += 1
        specs, tensors = self.parameter_specs(), list(self.tensors.values())
        try:
            for bucket in buckets:
                self._tell(bucket.index)
                part = slice(bucket.start, bucket.stop)
                yield WeightBucket(bucket.index, tuple(specs[part]), tuple(tensors[part]))
            self._tell(len(buckets))
        except GeneratorExit:
            self.num_exhausted -= 1  # left before its end: other ranks would wait for ever
            raise
        finally:
            self.num_exhausted += 1

    def _tell(self, index: int) -> None:
        if self.on_bucket is not None:
            self.on_bucket(index)


class PartialWorker(PlainWorker):
    """Sends its tensors, and leaves out the others of a model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int, model: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors, version)
        self._model = model

    def frozen_names(self) -> list[str]:
        return [name for name in self._model if name not in self.tensors]


class LoraWorker(PlainWorker):
    """Sends the tensors of a LoRA."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int, spec: LoraSpec = LORA) -> None:
        super().__init__(tensors, version)
        self._spec = spec

    def lora_spec(self) -> LoraSpec:
        return self._spec


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint directory, in a fixed order."""
    return dict(sorted(load_file(path / "model.safetensors").items()))


def silenced(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with the last norm at zero: every logit is 0, so every token has probability 1/V exactly.

    No other tensor changes the outcome, so that it tells by itself which weights are served.
    """
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.norm.weight"].zero_()
    return changed


def scaled(tensors: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Weights that sample differently: every tensor is multiplied."""
    return {name: tensor * factor for name, tensor in tensors.items()}


def ask(url: str, call: Callable[[HttpEndpoint], Coroutine[Any, Any, T]], *, token: str | None = TOKEN) -> T:
    """Run one async conversation with a server."""

    async def conversation() -> T:
        endpoint = HttpEndpoint(url, token=token)
        try:
            async with asyncio.timeout(SOON_S):
                return await call(endpoint)
        finally:
            await endpoint.aclose()

    return asyncio.run(conversation())


def request(request_id: str = "probe", *, max_tokens: int = 6, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"seed": 7, **sampling})
    return GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=params)


def generate(server: ServerProcess, **sampling: Any) -> GenerateResponse:
    return ask(server.url, lambda endpoint: endpoint.generate(request(**sampling)))


def logprobs(server: ServerProcess) -> tuple[float, ...]:
    """Behaviour logprobs of a seeded completion: a fingerprint of the weights that are served."""
    return generate(server).completions[0].logprobs


def weight_version(server: ServerProcess) -> WeightVersion:
    return ask(server.url, lambda endpoint: endpoint.weight_version())


def assert_serves(server: ServerProcess, version: int) -> None:
    """The server is ready with ``version``, and samples from it."""
    served = weight_version(server)
    assert (served.state, served.version, served.updating_to) == (EndpointState.READY, version, None)
    completion = generate(server).completions[0]
    assert [span.version for span in completion.version_spans] == [version]


def wait_until_ready(server: ServerProcess) -> None:
    """Wait until the server is not paused any more."""
    wait_until(lambda: weight_version(server).state is EndpointState.READY, "the server is still paused")


def announcement_of(
    worker: PlainWorker, run_id: str, *, bucket_bytes: int = 256_000_000, **changes: Any
) -> WeightUpdate:
    """The message that announces the worker's weights, for tests that drive an endpoint by hand."""
    specs = worker.parameter_specs()
    return WeightUpdate.model_validate(
        {
            "run_id": run_id,
            "incarnation": 1,
            "version": worker.version,
            "manifest": Manifest(tensors=tuple(specs)),
            "buckets": plan_buckets(specs, bucket_bytes),
            "in_flight": "keep",
            "deadline_s": 5,
            "lease_s": 20,
            **changes,
        }
    )
