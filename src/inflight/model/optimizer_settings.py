"""The settings of an optimizer that runs and workers share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inflight.base.toml import Section


class OptimizerSettings(Section):
    """The settings that determine the step size of an optimizer."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1e3)
    """The default suits full training of models of billions of parameters. A run chooses it by the size of the model:
    see `inflight.run.model_defaults`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm over all parameters; None: never."""
    warmup_steps: int = Field(default=0, ge=0)
    """The number of first steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, or to 0 at the last step."""
