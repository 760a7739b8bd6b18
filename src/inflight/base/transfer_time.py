"""Default time limits for moving a model's bytes to servers or to files."""

from __future__ import annotations

BYTES_PER_S = 0.5e9
"""Assumed minimum transfer rate of disks and networks, including the time for gathering and checksums."""
MOVE_S = 300.0
"""Time limit for moving weights between a GPU and host memory if the model's size is not known."""


def with_transfer_s(base_s: float, size_bytes: int) -> float:
    """Return a time limit: ``base_s``, which suits a small model, plus the time to move ``size_bytes``."""
    return base_s + size_bytes / BYTES_PER_S
