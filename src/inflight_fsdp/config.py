"""The validated settings of a worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from inflight.base.toml import check_settings
from inflight.errors import ConfigError
from inflight.model.lora_settings import LoraSettings
from inflight.model.optimizer_settings import OptimizerSettings

Config = TypeVar("Config", bound="WorkerConfig")
WireDtype = Literal["float64", "float32", "bfloat16", "float16"]
_BITS = {"bfloat16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The division of work among ranks.

    From the innermost division to the outermost: neighbouring ranks share tensors, groups of them share packed rows,
    groups of those have their own share of the data, and the outermost groups are the pipeline stages.
    """

    num_ranks: int
    tensor: int = 1
    """Number of ranks that share each tensor."""
    context: int = 1
    """Number of ranks that share each packed row."""
    stages: int = 1
    """Number of pipeline stages."""

    @property
    def data_size(self) -> int:
        """Number of ranks (or groups of ranks) that have micro-batches of their own."""
        return self.num_ranks // (self.tensor * self.context * self.stages)

    def data_rank(self, rank: int) -> int:
        """Return the index of the share of micro-batches that a rank receives."""
        return rank // (self.tensor * self.context) % self.data_size


class WorkerConfig(OptimizerSettings):
    """Settings of an FSDP worker; they are the same on every rank."""

    LABEL: ClassVar[str] = "FSDP"

    model_path: Path
    """A Hugging Face checkpoint on the local disk: config.json and safetensors files."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the forward pass, the backward pass and the published weights. The head computes in float32 or wider."""
    master_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of parameters, summed gradients and optimizer states; None means float32, or float64 if ``dtype`` is
    float64. If it is wider than ``dtype``, parameters are cast when a layer is gathered. bfloat16 uses half the memory,
    but with a small learning rate it rounds most updates away: the worker warns, and measures how many."""
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which ranks sum their gradients; None means the dtype of the parameters. bfloat16 sends half the bytes,
    but rounds each rank's part and each sum. Sums over micro-batches stay in the dtype of the parameters."""
    activation_checkpointing: bool = False
    """Keep only each layer's input, and recompute the layer in the backward pass. This saves memory, and needs a third
    more computation."""
    float8: bool = False
    """Multiply in 8 bits in the linear layers of each decoder layer, with a scale for each token (torchao). Attention,
    norms, embedding, head and the gradients of weights stay in ``dtype``. A CPU emulates the 8-bit products. This
    setting has not yet been tested on a GPU."""
    compile: bool = False
    """Compile the parts of each layer, except attention. The first steps are slower because graphs are compiled. Needs
    a C++ compiler on a CPU, and triton on a GPU."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer states in host memory, and run the optimizer there. A GPU then holds only
    the activations and the layers that it is computing. On a CPU the results are the same with and without this
    setting. It has not yet been tested on a GPU."""
    frozen: tuple[str, ...] = ()
    """Shell patterns for the names of parameters that are not trained, such as ``model.layers.[0-9].*``. These
    parameters have no gradients and no optimizer states. Checkpoints still contain them, but a publish omits them, so
    endpoints must support ``partial_updates``. Tied parameters are matched by the name of the first of them."""
    lora: LoraSettings | None = None
    """Train only a LoRA. Only the LoRA is published; see `LoraSettings`."""
    shard_size: int | None = Field(default=None, ge=1)
    """Number of neighbouring ranks that share one copy of the parameters; each such group has a copy of its own. None
    means that all ranks share one copy."""
    context_parallel: int = Field(default=1, ge=1)
    """Number of neighbouring ranks that share each packed row. Each computes an equal part of the row's tokens, and in
    attention it computes all tokens of some heads. These ranks receive the same micro-batches."""
    wire_dtype: WireDtype | None = None
    """Dtype of published weights; None means ``dtype``, so that servers and trainer compute with the same values."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """``adamw8bit`` keeps the moments in 8 bits, in blocks of 256 with a scale each (torchao): 2 bytes for each
    parameter instead of 8. Checkpoints hold the moments unrounded, and loading a checkpoint rounds them again."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    total_steps: int | None = Field(default=None, ge=1)
    """Step at which the linear and cosine schedules reach zero."""
    device: Literal["cpu", "cuda"] | None = None
    """None means cuda if a GPU is available, and otherwise cpu."""
    logprob_chunk_size: int = Field(default=1024, ge=1)
    """Number of targets whose logits are in memory at the same time."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> WorkerConfig:
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps above warmup_steps ({self.warmup_steps}), "
                f"not {self.total_steps}"
            )
        if self.master_dtype is not None and _BITS[self.master_dtype] < _BITS[self.dtype]:
            raise ValueError(
                f"master_dtype {self.master_dtype!r} is narrower than dtype {self.dtype!r}: layers would compute at "
                "a higher precision than the weights are stored in; omit master_dtype"
            )
        if self.reduce_dtype is not None and self.dtype == "float64":
            raise ValueError(
                f"reduce_dtype {self.reduce_dtype!r} would round gradients of dtype 'float64'; omit reduce_dtype"
            )
        if self.optimizer == "adamw8bit" and self.dtype == "float64":
            raise ValueError("optimizer 'adamw8bit' needs dtype 'float32' or 'bfloat16', not 'float64'")
        if self.float8 and self.dtype == "float64":
            raise ValueError("float8 needs dtype 'float32' or 'bfloat16', not 'float64'")
        if self.lora is not None and self.frozen:
            raise ValueError("lora already freezes everything but the LoRA; omit frozen")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {self.betas}")
        return self

    def rank_layout(self, num_ranks: int) -> RankLayout:
        """Return how ranks divide the work. Raises `ConfigError` if the ranks cannot be divided as configured."""
        return self._checked_layout(RankLayout(num_ranks, context=self.context_parallel), num_ranks)

    def _checked_layout(self, layout: RankLayout, num_sharing: int) -> RankLayout:
        """Return the layout, or raise `ConfigError` if it does not fit the ranks.

        ``num_sharing`` ranks together hold all copies of a parameter.
        """
        sizes = {
            "tensor_parallel": layout.tensor,
            "context_parallel": layout.context,
            "pipeline_parallel": layout.stages,
        }
        if layout.num_ranks % math.prod(sizes.values()):
            words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise ConfigError(f"{words} does not divide the {layout.num_ranks} ranks")
        if self.shard_size is not None and num_sharing % self.shard_size:
            raise ConfigError(f"shard_size {self.shard_size} does not divide the {num_sharing} ranks")
        return layout

    @property
    def stored_dtype(self) -> Literal["float32", "bfloat16", "float64"]:
        """Dtype of parameters, summed gradients and optimizer states."""
        return self.master_dtype or ("float64" if self.dtype == "float64" else "float32")

    @property
    def adamw_settings(self) -> dict[str, Any]:
        """Arguments for torch's AdamW, except for the learning rate, which is set at each step."""
        return self.model_dump(include={"betas", "eps", "weight_decay"})


def parse_config(config: Config | Mapping[str, object], kind: type[Config]) -> Config:
    """Return validated settings. Raises a `ConfigError` that lists every wrong key."""
    return check_settings(kind, config, f"{kind.LABEL} worker") if isinstance(config, Mapping) else config
