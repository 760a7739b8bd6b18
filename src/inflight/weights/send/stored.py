"""The weights in a checkpoint directory, or in the directory of a PEFT adapter, as a `WeightSource`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.contracts import LoraSource, WeightSource
from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import config_of, tensor_specs_of
from inflight.model.checkpoints import StoredTensor, fitting_tensors, stored_tensors
from inflight.types import WeightBucket
from inflight.wire import BucketSpec, LoraSpec, TensorSpec

_ADAPTER_CONFIG = "adapter_config.json"


class _StoredWeights(WeightSource):
    rank = 0
    world_size = 1
    version = 0

    def __init__(self, stored: Mapping[str, StoredTensor], specs: Sequence[TensorSpec]) -> None:
        self._stored = stored
        self._specs = tuple(specs)

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def check_values(self) -> None:
        """Read every tensor once. Raises `ConfigError` for a tensor that cannot be read or is not finite."""
        for spec, tensor in zip(self._specs, self._tensors(self._specs), strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(
                    f"{spec.name} in {str(self._stored[spec.name].file)!r} has values that are not finite"
                )

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            specs = self._specs[bucket.start : bucket.stop]
            yield WeightBucket(bucket.index, specs, tuple(self._tensors(specs)))

    def _tensors(self, specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
        """Yield the tensors in their wire dtypes, one at a time."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for spec in specs:
                file = self._stored[spec.name].file
                try:
                    if file not in files:
                        files[file] = stack.enter_context(safe_open(file, framework="pt"))
                    yield files[file].get_tensor(spec.name).to(getattr(torch, spec.dtype))
                except (OSError, SafetensorError) as error:
                    raise ConfigError(f"{spec.name} in {str(file)!r} cannot be read: {error}") from error


class CheckpointWeights(_StoredWeights):
    """The tensors in a model directory, cast to ``dtype``. One bucket at a time is in memory.

    ``model`` lists the tensors of the checkpoint with which endpoints were started; if it is given, it determines the
    tensors and their order. Raises `ConfigError` if the directory cannot be read, or if its tensors or their shapes
    differ from those in ``model``.
    """

    def __init__(self, path: Path, dtype: str, model: Sequence[TensorSpec] | None = None) -> None:
        if model is not None:
            tied = ("lm_head.weight",) if config_of(path).get("tie_word_embeddings") else ()
            super().__init__(fitting_tensors(path, {spec.name: spec.shape for spec in model}, known=tied), model)
            return
        specs, stored = tensor_specs_of(path, dtype), stored_tensors(path)
        if missing := [spec.name for spec in specs if spec.name not in stored]:
            raise ConfigError(f"{str(path)!r} does not contain the tensor {missing[0]!r} of the model")
        super().__init__(stored, specs)


class AdapterWeights(_StoredWeights, LoraSource):
    """The matrices of an adapter saved by PEFT, cast to ``dtype``. Raises `ConfigError` if they cannot be used."""

    def __init__(self, path: Path, dtype: str) -> None:
        file = path / _ADAPTER_CONFIG
        try:
            config = json.loads(file.read_text())
            lora = LoraSpec(rank=config["r"], alpha=config["lora_alpha"], rslora=bool(config.get("use_rslora")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{str(file)!r} does not describe a LoRA: {type(error).__name__}: {error}") from error
        for key, usual in {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}.items():
            if config.get(key, usual) not in (usual, None):
                raise ConfigError(f"{str(file)!r} has {key} = {config[key]!r}, but only {usual!r} is supported")
        for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias"):
            if config.get(key):
                raise ConfigError(
                    f"{str(file)!r} sets {key}, which is not supported: all layers share one LoRA setting"
                )
        self._lora = lora
        super().__init__(stored_tensors(path), tensor_specs_of(path, dtype))

    def lora_spec(self) -> LoraSpec:
        return self._lora
