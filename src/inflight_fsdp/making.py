"""Creates a worker that trains a transformers model, from the worker's settings."""

from __future__ import annotations

from collections.abc import Mapping

from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.lora_worker import FsdpLoraWorker
from inflight_fsdp.sharded import make_worker
from inflight_fsdp.worker import FsdpWorker


def create_worker(config: WorkerConfig | Mapping[str, object]) -> FsdpWorker:
    """Return the worker of this process's rank. Collective over torch's default process group.

    Without a default group, a group of one is created, and `FsdpWorker.close` ends it. With ``lora`` the worker is an
    `FsdpLoraWorker`. Raises `ConfigError` or `UnsupportedError` on every rank if the settings or the model cannot be
    used.
    """
    parsed = parse_config(config, WorkerConfig)
    return make_worker(FsdpWorker if parsed.lora is None else FsdpLoraWorker, parsed)
