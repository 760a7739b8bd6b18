"""Whether a mutant was caught for its fault, or only because its own code no longer fits what it changes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from inflight.conformance.verdicts import Verdict

_ERROR = r"(?:AttributeError|NameError|TypeError|UnboundLocalError)"
_NAMED = re.compile(rf"\b{_ERROR}\b|object has no attribute '|got an unexpected keyword argument '")
"""In a message: the judge's own words, the body of a 500, or the message of an error that wraps another one."""
_LOGGED = re.compile(rf"^{_ERROR}:.*$", re.MULTILINE)
"""In a log: the last line of a traceback."""


def require_not_broken(verdict: Verdict, logs: Iterable[str] = ()) -> None:
    """Fail the test if an error that only broken code raises shows in a mutant's verdict or in what it logged."""
    require_no_crash(f"{verdict.message}\n{verdict.evidence}", logs)


def require_no_crash(text: str, logs: Iterable[str] = ()) -> None:
    """Fail the test if an error that only broken code raises shows in what is said of a mutant, or in its logs."""
    found = _NAMED.search(text) or next(filter(None, map(_LOGGED.search, logs)), None)
    assert found is None, f"the mutant itself is broken: {found[0]}\n{text}"


def logs_in(directory: Path) -> list[str]:
    """Return what the processes of a kit and the servers that they started have printed so far."""
    return [file.read_text(errors="replace") for file in sorted(directory.glob("**/*.txt"))]
