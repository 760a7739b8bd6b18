"""Pauses between tries."""

from __future__ import annotations

from inflight.base.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.is_due(0.0)
    assert [backoff.next(now) for now in (10.0, 20.0, 30.0, 40.0, 50.0)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.is_due(52.9)
    assert backoff.is_due(53.0)
    backoff.reset()
    assert backoff.is_due(0.0)
    assert backoff.next(60.0) == 0.5
