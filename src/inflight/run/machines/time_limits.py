"""Time limits for the steps, publishes and saves of a run: configured, or derived from the size of the model."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.base.transfer_time import with_transfer_s
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.run.config import RunConfig
from inflight.wire import DTYPE_SIZES

STEP_S = 900.0
"""The limit for a batch, and for a step of a small model with its publish."""
_SAVE_S = 900.0
_PUBLISH_S = 60.0
_COLLECTIVE_S = 1800.0
"""torch's own limit for gloo collectives."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds."""

    publish_s: float
    step_s: float
    """Limit of an optimizer step together with the publish that follows or overlaps it."""
    save_s: float

    @property
    def collective_s(self) -> float:
        """Limit of one collective of the trainer ranks, which may wait until rank 0 has published or saved."""
        return max(_COLLECTIVE_S, self.step_s, self.save_s)


def time_limits(config: RunConfig) -> TimeLimits:
    """Return the limits of a run. Reads the headers of the model's files; raises `ConfigError` if that fails.

    A checkpoint holds the parameters and two moments per parameter in ``train.master_dtype``.
    """
    dtype, master_size = config.model.dtype, DTYPE_SIZES[config.train.master_dtype]
    size_bytes = sum(spec.size_bytes for spec in tensor_specs_of(config.model.path, dtype))
    checkpoint_bytes = 3 * master_size * (size_bytes // DTYPE_SIZES[dtype])

    def limit(configured: float | None, base_s: float, moved_bytes: int) -> float:
        return with_transfer_s(base_s, moved_bytes) if configured is None else configured

    return TimeLimits(
        publish_s=limit(config.updates.deadline_s, _PUBLISH_S, size_bytes),
        step_s=limit(config.run.step_timeout_s, STEP_S, size_bytes),
        save_s=limit(config.run.save_timeout_s, _SAVE_S, checkpoint_bytes),
    )
