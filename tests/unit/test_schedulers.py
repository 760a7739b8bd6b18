"""Schedulers as state machines: events in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.scheduling import Decision, Finished, Issue, Joined, Left, Offered, Returned
from inflight.rollouts.schedulers import LeastLoaded


def offered(item: int, group_size: int = 4) -> Offered:
    return Offered(0.0, item, f"prompt-{item}", 10, (0,) * group_size)


def test_a_group_goes_as_a_whole_to_the_endpoint_with_most_room() -> None:
    scheduler = LeastLoaded(group_size=4)
    scheduler.observe(Joined(0.0, "a", 8))
    scheduler.observe(Joined(0.0, "b", 4))
    placed: list[Decision] = []
    for item in range(4):
        if scheduler.num_wanted():
            scheduler.observe(offered(item))
            placed += scheduler.decide(0.0)
    whole = (0, 1, 2, 3)
    assert placed == [Issue("a", 0, whole), Issue("b", 1, whole), Issue("a", 2, whole)]


def test_an_endpoint_that_left_gets_no_work_and_what_ran_there_goes_elsewhere() -> None:
    scheduler = LeastLoaded(group_size=2)
    scheduler.observe(Joined(0.0, "a", 2))
    scheduler.observe(offered(0, 2))
    assert scheduler.decide(0.0) == [Issue("a", 0, (0, 1))]
    scheduler.observe(Left(1.0, "a"))
    for i in range(2):
        scheduler.observe(Returned(1.0, 0, i, 0))
    assert scheduler.decide(1.0) == []
    scheduler.observe(Joined(2.0, "b", 2))
    assert scheduler.decide(2.0) == [Issue("b", 0, (0, 1))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 40))
def test_no_endpoint_gets_more_than_it_takes_and_none_is_idle(
    capacities: Sequence[int], group_size: int, num_items: int
) -> None:
    scheduler = LeastLoaded(group_size=group_size)
    running = {str(i): 0 for i in range(len(capacities))}
    for name, capacity in zip(running, capacities, strict=True):
        scheduler.observe(Joined(0.0, name, capacity))
    where = {}
    for item in range(num_items):
        if not scheduler.num_wanted():
            break
        scheduler.observe(offered(item, group_size))
        for decision in scheduler.decide(0.0):
            assert isinstance(decision, Issue)
            running[decision.endpoint] += len(decision.completions)
            where[decision.item] = decision.endpoint
    room = dict(zip(running, capacities, strict=True))
    assert all(running[name] <= room[name] for name in running)
    if len(where) < num_items:
        assert all(room[name] - running[name] < group_size for name in running)
    for item in where:
        for i in range(group_size):
            scheduler.observe(Finished(1.0, item, i, 5))
    if where:
        assert scheduler.num_wanted() == 1
