"""Which cases of a grid every run of the tests has, and which only the exhaustive one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def first_of_each(cases: Iterable[T], key: Callable[[T], object]) -> list[object]:
    """Return parameters: the first case of each key is always run, the others are exhaustive.

    A tuple is the values of several arguments.
    """
    seen: set[object] = set()
    parameters: list[object] = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=[pytest.mark.exhaustive] if key(case) in seen else []))
        seen.add(key(case))
    return parameters
