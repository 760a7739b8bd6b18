"""Trainer workers based on torch's ``fully_shard``, and the worker kinds that are registered as entry points."""

from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.kinds import DEEPSPEED, FSDP, MEGATRON, TORCHTITAN
from inflight_fsdp.lora_worker import FsdpLoraWorker
from inflight_fsdp.making import create_worker
from inflight_fsdp.worker import FsdpWorker

__all__ = [
    "DEEPSPEED",
    "FSDP",
    "MEGATRON",
    "TORCHTITAN",
    "FsdpLoraWorker",
    "FsdpWorker",
    "WorkerConfig",
    "create_worker",
]
