"""Messages name the first values of a list, and say how many others there are."""

from __future__ import annotations

import pytest

from inflight.base.shortened import shortened


@pytest.mark.parametrize(
    ("num", "text"),
    [(0, "none"), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 other"), (252, "0, 1, 2 and 249 others")],
)
def test_what_is_left_out_is_counted(num: int, text: str) -> None:
    assert shortened(range(num), 3) == text
