"""The errors of calls that should be refused, for checks to judge."""

from __future__ import annotations

from collections.abc import Callable

from inflight.conformance.frames import own_frame
from inflight.errors import InflightError


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises, or None if it returns."""
    try:
        call()
    except Exception as error:  # the check states which error is required
        return error
    return None


def words_of(error: Exception | None) -> str:
    """Return an error as one line, with its location if it is not an error of inflight."""
    if error is None:
        return "no error"
    where = None if isinstance(error, InflightError) else own_frame(error)
    return f"{type(error).__name__}{f' at {where}' if where else ''}: {error}"
