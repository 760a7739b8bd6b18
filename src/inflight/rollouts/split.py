"""Divides devices between generation and training (StreamRL, arXiv 2504.15930, algorithm 1).

The times are measured or modelled by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Split:
    """The number of devices for each stage, and how long a step takes while both stages work at the same time."""

    num_generating: int
    num_training: int
    step_s: float


def best_split(
    num_devices: int, generation_s: Callable[[int], float], training_s: Callable[[int], float], *, unit: int = 1
) -> Split:
    """Return the split of at most ``num_devices`` devices that minimizes the time of the slower stage.

    Of equally fast splits, the one with the fewest devices is returned.

    ``generation_s`` and ``training_s`` return the seconds that a stage takes for one step on a number of devices.
    ``unit`` is the number of devices that one replica needs. Raises `InvalidRequestError` if there are too few devices
    for one replica of each stage.
    """
    if num_devices < 2 * unit:
        raise InvalidRequestError(
            f"{num_devices} devices cannot be divided between generation and training: each needs at least one unit "
            f"of {unit}"
        )
    sizes = range(unit, num_devices - unit + 1, unit)
    generating = {x: generation_s(x) for x in sizes}
    training = {y: training_s(y) for y in sizes}
    step_s, _, x, y = min(
        (max(generating[x], training[y]), x + y, x, y) for x in sizes for y in sizes if x + y <= num_devices
    )
    return Split(x, y, step_s)
