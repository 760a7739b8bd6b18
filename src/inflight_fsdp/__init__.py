"""A trainer worker on torch's ``fully_shard``: one class, `FsdpWorker`, and the factory that entry points name."""

from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.worker import FsdpWorker, create_worker

__all__ = ["FsdpWorker", "WorkerConfig", "create_worker"]
