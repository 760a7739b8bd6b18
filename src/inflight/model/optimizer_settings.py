"""The optimizer settings that runs and workers share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inflight.base.toml import Section


class OptimizerSettings(Section):
    """The settings that determine the size of an optimizer step."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1e3)
    """If a run does not set it, it is chosen by the size of the model (docs/trainers.md, "Defaults by model size")."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger norm over all parameters are scaled down to this norm; None disables clipping."""
    warmup_steps: int = Field(default=0, ge=0)
    """The number of initial steps over which the learning rate rises linearly from 0. If a run does not set it, it is
    chosen by the size of the model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, or to 0 at the last step."""
