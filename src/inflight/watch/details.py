"""The tokens of rollouts, of runs that record them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rollout_details(directory: Path, item: int) -> list[dict[str, Any]] | None:
    """Return the recorded rollouts of an item; None if the run recorded none."""
    return None
