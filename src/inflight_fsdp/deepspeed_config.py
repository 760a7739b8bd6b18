"""The settings of a DeepSpeed worker, checked. Knows nothing of torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from inflight_fsdp.config import WorkerConfig


class DeepSpeedConfig(WorkerConfig):
    """Settings of one DeepSpeed worker; the same on every rank."""

    LABEL: ClassVar[str] = "DeepSpeed"

    zero_stage: Literal[1, 2, 3] = 3
    """What ranks share: float32 weights and moments, from 2 on gradients too, in 3 also what layers compute with."""
    zero_options: dict[str, Any] = Field(default_factory=dict)
    """More of DeepSpeed's ``zero_optimization``, such as ``stage3_param_persistence_threshold``."""

    @model_validator(mode="after")
    def _is_supported(self) -> DeepSpeedConfig:
        if self.dtype == "float64" or self.master_dtype == "bfloat16":
            raise ValueError("DeepSpeed computes in float32 or bfloat16 here, and keeps weights in float32")
        for name in ("float8", "compile", "frozen", "shard_size", "lora"):
            if getattr(self, name):
                raise ValueError(f"{name} is not a setting of the DeepSpeed worker; leave it out")
        return self

    def engine_settings(self, num_parameters: int, device: str) -> dict[str, Any]:
        """Return the configuration of DeepSpeed's engine, which leaves boundaries, clipping and AdamW to the worker."""
        zero = {"reduce_bucket_size": min(num_parameters, 500_000_000), **self.zero_options, "stage": self.zero_stage}
        zero |= {"sub_group_size": num_parameters, "memory_efficient_linear": False}
        if self.cpu_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_allreduce_op": "mean" if self.zero_stage == 3 else "sum",  # stage 3 knows only averages
            "gradient_clipping": 0.0,
            "communication_data_type": "bf16" if self.reduce_dtype == "bfloat16" else "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }
