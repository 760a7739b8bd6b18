"""Reads numbers from an engine's additional arguments, and detects whether the engine uses a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.errors import ConfigError


def has_gpu(device: str | None) -> bool:
    """Return whether an engine started with ``device`` uses a GPU; with None, whether this machine has a GPU."""
    return device.startswith("cuda") if device is not None else Path("/dev/nvidiactl").exists()


def integer_in(arguments: Sequence[str], *flags: str) -> int | None:
    """Return the result of `number_in` as an integer."""
    number = number_in(arguments, *flags)
    return None if number is None else int(number)


def number_in(arguments: Sequence[str], *flags: str) -> float | None:
    """Return the value of a flag with the alternative names ``flags`` in an engine's arguments; None if it is not set.

    Accepts ``--flag N``, ``--flag=N`` and underscores in place of dashes; the last occurrence counts. Raises
    `ConfigError` if the value is not a number.
    """
    found: float | None = None
    for i, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name not in flags:
            continue
        text = value if has_value else next(iter(arguments[i + 1 : i + 2]), "")
        try:
            found = float(text)
        except ValueError as error:
            raise ConfigError(f"engine argument {argument!r} requires a number, not {text!r}") from error
    return found
