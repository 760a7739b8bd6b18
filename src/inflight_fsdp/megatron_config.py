"""The validated settings of a Megatron worker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from inflight_fsdp.config import RankLayout, WorkerConfig

_UNSUPPORTED = ("frozen", "lora", "float8", "compile", "cpu_offload", "shard_size", "reduce_dtype")


class MegatronConfig(WorkerConfig):
    """Settings of a Megatron worker; they are the same on every rank."""

    LABEL: ClassVar[str] = "Megatron"

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of neighbouring ranks that share the layers' matrices and the vocabulary. They receive the same
    micro-batches."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of stages, each on ranks of its own, with equal numbers of layers. All stages receive the same
    micro-batches."""
    pipeline_chunks: int | None = Field(default=None, ge=1)
    """Number of parts into which a pipeline cuts each micro-batch, between segments, so that its stages compute at the
    same time; None means twice the number of stages."""

    @model_validator(mode="after")
    def _is_supported(self) -> MegatronConfig:
        if self.dtype == "float64":
            raise ValueError("dtype 'float64': the Megatron worker trains in float32 or bfloat16")
        if self.context_parallel > 1:
            raise ValueError(
                "context_parallel is not supported by the Megatron worker; use tensor_parallel or pipeline_parallel, "
                "or the worker 'fsdp' or 'torchtitan'"
            )
        if self.optimizer != "adamw":
            raise ValueError(f"optimizer {self.optimizer!r} is supported only by the worker 'fsdp'; omit it")
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise ValueError(f"{name} is not supported by the Megatron worker; omit it")
        return self

    def rank_layout(self, num_ranks: int) -> RankLayout:
        layout = RankLayout(num_ranks, tensor=self.tensor_parallel, stages=self.pipeline_parallel)
        return self._checked_layout(layout, num_ranks)
