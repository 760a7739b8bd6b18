"""Text for messages about unknown names, with suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_NAME = 80


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message that ``name`` is not a known ``what``, with up to two suggestions and all known names."""
    names = list(known)
    nearest = nearest_names(name, names, most=2)
    guess = f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else ""
    return f"unknown {what} {name[:_MAX_NAME]!r}{guess}; known: {', '.join(names) or 'none'}"


def nearest_names(name: str, known: Iterable[str], most: int, cutoff: float = 0.6) -> list[str]:
    """Return up to ``most`` of the ``known`` names whose similarity to ``name`` (0 to 1) is at least ``cutoff``."""
    return difflib.get_close_matches(name[:_MAX_NAME], list(known), n=most, cutoff=cutoff)
