"""Makes text from an implementation safe to display: it may contain anything, even terminal commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters except tab and line feed, line separators, changes of direction, and what XML 1.0 cannot hold."""


def printable(text: str) -> str:
    """Return the text with a replacement for every character that controls a terminal or breaks XML."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return one printable line ``name: value`` per fact; lists and dictionaries as JSON."""
    return [printable(f"{name}: {fact_text(value)}".replace("\n", "\n    ")) for name, value in facts.items()]


def fact_text(value: Any) -> str:
    """Return a string unchanged, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
