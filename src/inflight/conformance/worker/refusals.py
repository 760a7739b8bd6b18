"""What calls that should be refused raised, for checks to judge."""

from __future__ import annotations

from collections.abc import Callable


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return what a call raises, whatever it is; None if it returns."""
    try:
        call()
    except Exception as error:  # the check says what it should have been
        return error
    return None


def words_of(error: Exception | None) -> str:
    """Return an error in one line."""
    return "no error" if error is None else f"{type(error).__name__}: {error}"
