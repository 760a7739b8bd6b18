"""Lists in messages, which name the first few values and say how many others there are."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def shortened(values: Collection[object], most: int = 5) -> str:
    """Return the values, or the first ``most`` of them and the number of the others; ``none`` if there are none."""
    words = [repr(value) for value in islice(values, most)]
    if (num_others := len(values) - len(words)) > 0:
        words[-1] += f" and {num_others} other{'s' if num_others > 1 else ''}"
    return ", ".join(words) or "none"
