"""Text for lists in messages: the first few values, and how many others there are."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def shortened(values: Collection[object], most: int = 5) -> str:
    """Return the values as text: the first ``most``, and the number of the others; ``none`` if there are no values."""
    words = [repr(value) for value in islice(values, most)]
    if (num_others := len(values) - len(words)) > 0:
        words[-1] += f" and {num_others} other{'s' if num_others > 1 else ''}"
    return ", ".join(words) or "none"
