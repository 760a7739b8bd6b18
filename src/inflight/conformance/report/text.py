"""Converts facts of a certificate to text that is safe to display."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inflight.base.printable import printable


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return one printable line ``name: value`` per fact; lists and dictionaries are written as JSON."""
    return [printable(f"{name}: {fact_text(value)}".replace("\n", "\n    ")) for name, value in facts.items()]


def fact_text(value: Any) -> str:
    """Return a string unchanged, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
