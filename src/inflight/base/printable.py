"""Makes text from other processes and machines safe to display, since it may contain terminal escape sequences."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Line separators, bidirectional controls, what XML 1.0 forbids, and control characters except tab and line feed."""


def printable(text: str) -> str:
    """Replace every character that could control a terminal or make XML invalid."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))
