"""While sampling keeps up with training, groups are offered one by one as others are trained on, or in bursts."""

from __future__ import annotations

import pytest

from inflight.rollouts import MaxLag
from inflight.rollouts.admission import Admission

TOKENS = 10
"""Of each group."""


def offered(admission: Admission, num_ahead: int, *, has_waited: bool = False) -> int:
    """Return how many groups are offered where ``num_ahead`` groups wait already, one after the other."""
    num = 0
    while admission.in_pipeline(
        MaxLag(20),
        num_ahead + num,
        num_waiting_tokens=num_ahead * TOKENS,
        num_open=num,
        surplus=1.0,
        is_step_ready=num_ahead + num > 0,
        has_waited=has_waited,
        is_idle=False,
    ):
        num += 1
    return num


def steady(burst: int, groups_per_step: int) -> Admission:
    """Return the state after two steps, before which no group was open on average."""
    admission = Admission(TOKENS * groups_per_step, TOKENS, burst)
    admission.stepped(0.0)
    admission.stepped(10.0)
    return admission


def test_without_bursts_each_group_that_is_trained_on_makes_room_for_one() -> None:
    admission = steady(1, groups_per_step=1)
    assert [offered(admission, num_ahead) for num_ahead in (0, 1, 1, 2, 1)] == [2, 1, 1, 0, 1]


@pytest.mark.parametrize(("groups_per_step", "enough"), [(1, 5), (2, 5), (6, 9)])
def test_a_burst_waits_until_there_is_room_for_all_of_it(groups_per_step: int, enough: int) -> None:
    admission = steady(4, groups_per_step)
    assert offered(admission, 0) == enough
    assert [offered(admission, enough - done) for done in range(1, 4)] == [0, 0, 0]
    assert offered(admission, enough - 4) == 4
    assert offered(admission, enough - 1) == 0  # and again


def test_a_trainer_that_had_to_wait_ends_the_wait_for_a_burst() -> None:
    admission = steady(4, groups_per_step=1)
    assert offered(admission, 0) == 5 and offered(admission, 3) == 0
    assert offered(admission, 0, has_waited=True) == 1  # then a step is ready
    assert offered(admission, 3) == 2
