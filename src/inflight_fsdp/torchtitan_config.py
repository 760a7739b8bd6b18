"""The validated settings of a TorchTitan worker."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from inflight.errors import ConfigError
from inflight_fsdp.config import RankLayout, WorkerConfig


class TorchTitanConfig(WorkerConfig):
    """Settings of a TorchTitan worker; they are the same on every rank."""

    LABEL: ClassVar[str] = "TorchTitan"

    optimizer_implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """The implementation that TorchTitan's optimizer container uses."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of neighbouring ranks that share the layers' matrices and the vocabulary. They receive the same
    micro-batches."""
    expert_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the experts of each layer. Each rank has its own tokens, and sends them to the ranks
    that have their experts."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of stages, each on ranks of its own, with about equal numbers of layers. All stages receive the same
    micro-batches."""
    pipeline_chunks: int | None = Field(default=None, ge=1)
    """Number of parts into which a pipeline cuts each micro-batch, between segments, so that its stages compute at the
    same time; None means twice the number of stages."""

    @model_validator(mode="after")
    def _has_no_settings_of_fsdp(self) -> TorchTitanConfig:
        if self.reduce_dtype == "bfloat16":
            raise ValueError(
                "reduce_dtype 'bfloat16' is not supported: TorchTitan sums gradients in float32; omit reduce_dtype"
            )
        if self.float8:
            raise ValueError("float8 is supported only by the worker 'fsdp'; omit it")
        if self.lora is not None:
            raise ValueError("lora is supported only by the worker 'fsdp'; omit it")
        return self

    @model_validator(mode="after")
    def _combines(self) -> TorchTitanConfig:
        sizes = {name: getattr(self, name) for name in ("tensor_parallel", "expert_parallel", "pipeline_parallel")}
        used = [name for name, size in sizes.items() if size > 1]
        if self.compile and used:
            raise ValueError(f"compile cannot be combined with {', '.join(used)}; omit one of them")
        if self.expert_parallel > 1 and len(used) > 1:
            raise ValueError(f"{' and '.join(used)} cannot be combined yet; omit one of them")
        return self

    def rank_layout(self, num_ranks: int) -> RankLayout:
        layout = RankLayout(num_ranks, self.tensor_parallel, self.context_parallel, self.pipeline_parallel)
        num_sharing = num_ranks // (self.tensor_parallel * self.pipeline_parallel)
        self._checked_layout(layout, num_sharing)
        size = self.shard_size or num_sharing
        if size % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel {self.expert_parallel} does not divide the {size} ranks that share one copy of the "
                "parameters"
            )
        return layout
