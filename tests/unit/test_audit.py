"""The audit of what is trained: it hears a bias, and no honest choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from inflight.rollouts.audit import BiasAudit, kolmogorov_smirnov, kolmogorov_tail

GROUP_SIZE = 8


def groups(seed: int, number: int = 1024) -> list[tuple[list[int], list[float]]]:
    """Lengths and rewards whose completions are alike within a group: long prompts have lower rewards."""
    dice = random.Random(seed)
    found = []
    for _ in range(number):
        base = dice.lognormvariate(4, 0.9)
        lengths = [max(1, round(base * dice.lognormvariate(0, 0.15))) for _ in range(GROUP_SIZE)]
        found.append((lengths, [float(dice.random() < 60 / (60 + base)) for _ in range(GROUP_SIZE)]))
    return found


def alarms(seed: int, choose: Callable[[random.Random, Sequence[int]], list[bool]], audit: BiasAudit) -> list[str]:
    dice = random.Random(seed)
    heard: list[str] = []
    for lengths, rewards in groups(seed):
        heard += audit.settled(lengths, choose(dice, lengths), rewards)
    return heard


def some_groups(dice: random.Random, lengths: Sequence[int]) -> list[bool]:
    return [dice.random() < 0.8] * len(lengths)


def some_completions(dice: random.Random, lengths: Sequence[int]) -> list[bool]:
    return [dice.random() < 0.8 for _ in lengths]


def the_shorter_groups(dice: random.Random, lengths: Sequence[int]) -> list[bool]:
    """Drops the longest fifth: groups of exp(4 + 0.84 * 0.9) = 116 tokens or more."""
    return [sum(lengths) / len(lengths) < 116] * len(lengths)


def the_shorter_completions(dice: random.Random, lengths: Sequence[int]) -> list[bool]:
    return [length < 116 for length in lengths]


@pytest.mark.parametrize("choose", [some_groups, some_completions])
def test_an_honest_choice_raises_no_alarm(choose: Callable[..., list[bool]]) -> None:
    for seed in range(20):
        audit = BiasAudit()
        assert not alarms(seed, choose, audit)
        assert audit.metrics()["alarms"] == 0
        assert audit.metrics()["groups_with_left_out"] > 25


@pytest.mark.parametrize("choose", [some_groups, some_completions])
def test_an_honest_choice_raises_false_alarms_no_more_often_than_it_says(choose: Callable[..., list[bool]]) -> None:
    """Groups of like completions would raise far more if each completion counted by itself."""
    heard = [name for seed in range(60) for name in alarms(seed, choose, BiasAudit(window=128, false_alarm=0.05))]
    num_windows = 60 * 1024 // 128
    assert 0 < len(heard) < 2 * num_windows * 0.05 * 1.5


@pytest.mark.parametrize("choose", [the_shorter_groups, the_shorter_completions])
def test_dropping_the_longest_fifth_is_heard_in_every_window(choose: Callable[..., list[bool]]) -> None:
    for seed in range(10):
        audit = BiasAudit()
        assert alarms(seed, choose, audit).count("length") == 4
        assert audit.metrics()["alarms"] == 4
        assert audit.metrics()["length_distance"] > 0.9


def test_what_is_given_up_before_it_is_scored_counts_by_its_length_so_far() -> None:
    audit = BiasAudit()
    heard = [
        name for i in range(256) for name in audit.settled([i, i], [i < 200] * 2, None if i >= 200 else [0.0, 1.0])
    ]
    assert heard == ["length"]
    assert "reward_p" not in audit.metrics()


def test_nothing_left_out_is_nothing_to_compare() -> None:
    audit = BiasAudit(window=2)
    assert audit.settled([3, 4], [True, True], [0.0, 1.0]) == audit.settled([9, 9], [True, True], [0.0, 1.0]) == {}
    assert audit.metrics() == {"alarms": 0, "groups_with_left_out": 0}


def test_the_statistic_is_that_of_the_tables() -> None:
    for x, tail in ((0.828, 0.5), (1.2238, 0.1), (1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)):
        assert kolmogorov_tail(x) == pytest.approx(tail, rel=2e-3)
    assert kolmogorov_tail(0.199) == pytest.approx(1.0)
    assert kolmogorov_tail(0.201) == pytest.approx(1.0, abs=1e-9)
    assert kolmogorov_smirnov([1, 2, 3, 4], [3, 4, 5, 6])[0] == 0.5
    assert kolmogorov_smirnov([1, 1, 0], [0, 1, 1]) == (0.0, 1.0)


def test_the_p_value_is_that_of_random_permutations() -> None:
    dice = random.Random(0)
    both = [dice.gauss(0, 1) for _ in range(60)] + [dice.gauss(0.4, 1) for _ in range(40)]
    distance, p = kolmogorov_smirnov(both[:60], both[60:])
    num_larger = 0
    for _ in range(2000):
        dice.shuffle(both)
        num_larger += kolmogorov_smirnov(both[:60], both[60:])[0] >= distance - 1e-12
    assert 0.01 < p < 0.5
    assert num_larger / 2000 == pytest.approx(p, abs=0.04)
