"""Sizes in human-readable form, such as 64MB."""

from __future__ import annotations

from inflight.errors import ConfigError

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size_bytes(text: str) -> int:
    """Return the number of bytes in a size such as 64MB, 1GB or 512B (powers of ten).

    Raises `ConfigError` for any other text.
    """
    number, unit = text.strip()[:-2], text.strip()[-2:].lower()
    try:
        if unit in _UNITS:
            return int(float(number) * _UNITS[unit])
        return int(text.strip().removesuffix("B"))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is not a size; write a size such as 64MB or 1GB") from error
