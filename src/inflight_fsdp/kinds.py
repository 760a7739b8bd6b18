"""The kinds of workers in this package. Their implementations are imported when a worker is created."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from inflight.contracts import MemoryTerm, TrainerWorker, TrainingLoad, WorkerKind
from inflight.errors import ConfigError
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.memory import memory_terms
from inflight_fsdp.torchtitan_config import TorchTitanConfig


class FsdpKind(WorkerKind):
    """Workers that train transformers models, sharded by torch's ``fully_shard``."""

    trains_lora = True

    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        from inflight_fsdp.making import create_worker

        return create_worker(settings)

    def memory(self, settings: Mapping[str, object], load: TrainingLoad) -> Sequence[MemoryTerm]:
        return memory_terms(parse_config(settings, WorkerConfig), load)


class TorchTitanKind(WorkerKind):
    """Workers that train TorchTitan's models."""

    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        from inflight_fsdp.torchtitan import create_worker

        return create_worker(settings)

    def memory(self, settings: Mapping[str, object], load: TrainingLoad) -> Sequence[MemoryTerm]:
        return memory_terms(parse_config(settings, TorchTitanConfig), load)


class DeepSpeedKind(WorkerKind):
    """Workers that train transformers models, sharded by DeepSpeed's ZeRO. Their memory needs are not estimated."""

    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        from inflight_fsdp.deepspeed import create_worker

        return create_worker(settings)


class MegatronKind(WorkerKind):
    """Workers that train Megatron-Core's models. Their memory needs are not estimated."""

    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron-Core warns about each optional package that is missing
                from inflight_fsdp.megatron import create_worker
        except ImportError as error:
            raise ConfigError(f"the Megatron worker needs megatron-core ({error}): see docs/trainers.md") from error
        return create_worker(settings)


FSDP = FsdpKind()
"""Workers based on torch's ``fully_shard``."""
TORCHTITAN = TorchTitanKind()
"""Workers based on TorchTitan."""
DEEPSPEED = DeepSpeedKind()
"""Workers based on DeepSpeed's ZeRO."""
MEGATRON = MegatronKind()
"""Workers based on Megatron-Core."""
