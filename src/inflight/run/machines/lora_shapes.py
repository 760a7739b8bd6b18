"""What a run's LoRA consists of, from the headers of its checkpoint. Knows no trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from inflight.contracts import LoraSource, TrainerWorker
from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.model.lora_settings import LoraSettings
from inflight.run.config import TrainSection
from inflight.weights.encode.lora_tensors import lora_names

_MATRIX = re.compile(r"(?:^|\.)layers\.\d+\.(?!.*\.experts\.).*\.weight$")


def lora_shapes(settings: LoraSettings, model: Path) -> Mapping[str, tuple[int, int]]:
    """Return the shape of A and B of every target. Raises `ConfigError` for targets that the model does not have."""
    specs = {spec.name.removesuffix(".weight"): spec.shape for spec in tensor_specs_of(model, "float32")
             if len(spec.shape) == 2 and _MATRIX.search(spec.name)}  # fmt: skip
    shapes: dict[str, tuple[int, int]] = {}
    for layer in settings.chosen(list(specs)):
        (num_out, num_in), (a, b) = specs[layer], lora_names(layer)
        shapes |= {a: (settings.rank, num_in), b: (num_out, settings.rank)}
    return shapes


def check_lora(train: TrainSection, model: Path) -> None:
    """Raise `ConfigError` if the configured LoRA cannot be trained, before anything is loaded or started."""
    if train.lora is None:
        return
    if train.trainer == "torchtitan":
        raise ConfigError("train.lora needs a trainer that trains LoRAs, which 'torchtitan' does not: use 'fsdp'")
    lora_shapes(train.lora, model)


def check_trains_lora(train: TrainSection, worker: TrainerWorker) -> None:
    """Raise `ConfigError` if a LoRA is configured and the worker trains none."""
    if train.lora is not None and not isinstance(worker, LoraSource):
        raise ConfigError(f"train.lora is set, but worker {train.trainer!r} trains no LoRA: it is no LoraSource")
