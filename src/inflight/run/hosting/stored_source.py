"""The weights of a checkpoint directory as a source of publishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from inflight.contracts import WeightSource
from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.model.checkpoints import stored_tensors
from inflight.types import WeightBucket
from inflight.wire import BucketSpec, TensorSpec


class CheckpointWeights(WeightSource):
    """The tensors of a model directory, cast to ``dtype``; one bucket is in memory at a time.

    Raises `ConfigError` if the directory cannot be read.
    """

    rank = 0
    world_size = 1
    version = 0

    def __init__(self, path: Path, dtype: str) -> None:
        self._stored = stored_tensors(path)
        self._specs = tensor_specs_of(path, dtype)
        if missing := [spec.name for spec in self._specs if spec.name not in self._stored]:
            raise ConfigError(f"{str(path)!r} does not hold the tensor {missing[0]!r}")

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in {it.file for it in self._stored.values()}
            }
            for bucket in buckets:
                specs = tuple(self._specs[bucket.start : bucket.stop])
                tensors = tuple(
                    files[self._stored[spec.name].file].get_tensor(spec.name).to(getattr(torch, spec.dtype))
                    for spec in specs
                )
                yield WeightBucket(bucket.index, specs, tensors)
