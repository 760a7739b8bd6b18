"""The settings of a run's workers, and checks that the workers support its configuration."""

from __future__ import annotations

from typing import Any

from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts import TrainingLoad
from inflight.errors import ConfigError
from inflight.model.optimizer_settings import OptimizerSettings
from inflight.run.config import RunConfig
from inflight.weights.encode.lora_tensors import lora_shapes


def worker_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that every worker of a run receives."""
    train = config.train
    return {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        "wire_dtype": config.model.dtype,
        "total_steps": config.run.num_steps,
        **({} if train.device is None else {"device": train.device}),
        **train.model_dump(include={"master_dtype", *OptimizerSettings.model_fields}),
        **({} if train.lora is None else {"lora": train.lora.model_dump()}),
        **train.trainer_options,
    }


def teacher_settings(config: RunConfig) -> list[dict[str, Any] | None]:
    """Return the settings of a worker for each teacher with a path, and None for each teacher with a URL."""
    settings = {name: value for name, value in worker_settings(config).items() if name != "lora"}
    paths = [teacher.path for teacher in config.distillation.teachers]
    return [None if path is None else {**settings, "model_path": str(path)} for path in paths]


def training_load(config: RunConfig) -> TrainingLoad:
    """Return the load that the run puts on each rank. Raises `ConfigError` if the loss is unknown."""
    return TrainingLoad(
        num_ranks=config.train.num_ranks,
        tokens_per_micro_batch=config.train.max_tokens_per_micro_batch,
        untrained_models=(
            *((config.model.path,) if "reference_logprobs" in config.loss.policy_loss().needs else ()),
            *(teacher.path for teacher in config.distillation.teachers if teacher.path is not None),
        ),
    )


def check_lora(config: RunConfig) -> None:
    """Raise `ConfigError` if the configured LoRA cannot be trained, before anything is loaded or started."""
    if config.train.lora is None:
        return
    if not load_worker_kind(config.train.trainer).trains_lora:
        raise ConfigError(
            f"train.lora needs a trainer that supports LoRA, which {config.train.trainer!r} does not: use 'fsdp'"
        )
    lora_shapes(config.train.lora, config.model.path)
