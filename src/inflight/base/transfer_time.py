"""Default time limits for moving a model's bytes to servers or to files."""

from __future__ import annotations

BYTES_PER_S = 0.5e9
"""Assumed at least, of disks and networks, with gathering and checksums."""
MOVE_S = 300.0
"""How long weights may take from a GPU to the host's memory, or back, where the model's size is not known."""


def with_transfer_s(base_s: float, size_bytes: int) -> float:
    """Return a limit for what takes ``base_s`` at most with a small model, if ``size_bytes`` have to be moved."""
    return base_s + size_bytes / BYTES_PER_S
