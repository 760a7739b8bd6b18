"""`FsdpLoraWorker`: an `FsdpWorker` that trains and publishes only a LoRA; the base weights are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.contracts import MergingLoraSource, PartialWeightSource
from inflight.types import AdamSettings, StepResult
from inflight.weights.encode.lora_tensors import PARTS
from inflight.weights.receive.base_weights import BaseWeights, merge_lora
from inflight.weights.send.merged_lora import MergedLora
from inflight.wire import LoraSpec
from inflight_fsdp.checkpoint import TrainerState
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.lora import is_lora, parts_of, peft_config
from inflight_fsdp.rows import Row
from inflight_fsdp.worker import FsdpWorker


class FsdpLoraWorker(FsdpWorker, MergingLoraSource):
    """One trainer rank, which publishes only the weights of the LoRA.

    Checkpoints hold the LoRA in ``adapter/``, in PEFT's format, and `load` reads it from there. The weights next to
    config.json have the LoRA merged into them, so that the directory can be loaded as a model.
    """

    def __init__(self, config: WorkerConfig, device: torch.device, *, owns_group: bool) -> None:
        assert config.lora is not None
        self._lora = config.lora
        super().__init__(config, device, owns_group=owns_group)
        self._changed = [name.removesuffix(PARTS[0]) for name in self._parameters.layouts if name.endswith(PARTS[0])]
        """The layers that the LoRA changes."""
        self._num_forwards = 0
        """Number of forward passes with gradients since the last step; each uses different dropout."""

    def lora_spec(self) -> LoraSpec:
        return self._lora.spec

    def frozen_names(self) -> Sequence[str]:
        """Always empty: a publish of a LoRA omits every weight of the model anyway."""
        return ()

    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        names = [
            stored for name, layout in self._parameters.layouts.items() if not is_lora(name) for stored in layout.shapes
        ]
        base = BaseWeights(str(self._config.model_path), getattr(torch, self._config.stored_dtype))
        return MergedLora(self, base, names, self._parameters.wire_dtype, bucket_bytes)

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        if not (self._lora.dropout and torch.is_grad_enabled()):
            return super()._compute(rows)
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else None):
            # A separate random sequence, so that a resumed worker applies the same dropout.
            torch.manual_seed(hash((self._lora.seed, self.version, self.rank, self._num_forwards)) % (1 << 63))
            self._num_forwards += 1
            return super()._compute(rows)

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step(settings)
        self._num_forwards = 0
        return result

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        self._num_forwards = 0

    @torch.no_grad()
    def _state(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> TrainerState:
        state = super()._state(states)
        lora = [part for name, part in zip(self._parameters.layouts, state.weights, strict=True) if is_lora(name)]
        described = peft_config(self._lora, self._changed, self._config.model_path)
        return replace(state, weights=[], lora=lora, lora_config=described)

    def _saved_state(self) -> TrainerState:
        """Return the state to save, with merged weights. Collective: every rank merges its own rows."""
        weights = [self._merge_part(name) for name in self._parameters.layouts if not is_lora(name)]
        return replace(super()._saved_state(), weights=weights)

    @torch.no_grad()
    def _merge_part(self, name: str) -> ShardedTensor:
        part = self._parameters.sharded(name)
        layer = name.removesuffix(".weight")
        if layer not in self._changed:
            return part
        a, b = (self._parameters.sharded(half) for half in parts_of(layer))
        whole_a = torch.zeros(a.sharding.shape, dtype=a.local.dtype, device=self._device)
        if (box := a.sharding.owners.get(self.rank)) is not None:
            whole_a[box] = a.local.to(self._device)
        if self.world_size > 1:
            dist.all_reduce(whole_a)
        # Rows are distributed in the same way: this rank's rows of B belong to its rows of the weight.
        return replace(part, local=merge_lora(part.local, whole_a, b.local, self._lora.spec).cpu())
