"""The level of new items follows the rewards, and an item keeps its level."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.base.toml import check_settings
from inflight.errors import CheckpointError, ConfigError, TaskError
from inflight.rollouts.curriculum import FIRST_EVALUATION_ITEM, NUM_GROUPS, Curriculum
from inflight.rollouts.tasks import TaskSettings
from inflight.types import TaskItem


class Level:
    """Item i of level n is the text ``n:i``."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def name(self) -> str:
        return "levels"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"{self.number}:{index}", metadata={"entry": index})

    def score(self, item: TaskItem, completion: str) -> float:
        return float(completion == item.prompt)


def levels(num: int = 3) -> Curriculum:
    return Curriculum([Level(number) for number in range(num)])


def record(curriculum: Curriculum, first: int, num_groups: int, reward: float) -> list[str]:
    """Make and record items; return the messages about changes."""
    found = []
    for index in range(first, first + num_groups):
        curriculum.item(index)
        found.append(curriculum.record_group(index, [reward, reward]))
    return [message for message in found if message is not None]


def test_a_curriculum_starts_at_the_first_level_and_follows_the_mean_reward_of_16_groups() -> None:
    curriculum = levels()
    assert record(curriculum, 0, NUM_GROUPS - 1, 1.0) == []
    assert record(curriculum, NUM_GROUPS - 1, 1, 1.0) == [
        f"the curriculum is at level 2 of 3 from item {NUM_GROUPS} on: the mean reward of the last 16 groups is 1.00"
    ]
    assert record(curriculum, 16, 40, 0.5) == []
    assert curriculum.level == 1
    (message,) = record(curriculum, 56, 16, 0.1)
    assert message.startswith("the curriculum is at level 1 of 3 from item ")
    assert curriculum.level == 0
    assert [curriculum.level_of(index) for index in (0, 15, 16, 55)] == [0, 0, 1, 1]


def test_a_curriculum_stays_between_its_first_and_last_level() -> None:
    curriculum = levels(2)
    assert record(curriculum, 0, 50, 0.0) == []
    assert len(record(curriculum, 50, 100, 1.0)) == 1
    assert curriculum.level == 1


def test_groups_of_an_earlier_level_that_finish_late_do_not_count() -> None:
    curriculum = levels()
    for index in range(40):
        curriculum.item(index)
    for index in range(NUM_GROUPS):
        curriculum.record_group(index, [1.0])
    assert curriculum.level == 1
    assert [curriculum.record_group(index, [0.0]) for index in range(16, 40)] == [None] * 24
    assert curriculum.level == 1
    assert curriculum.level_of(39) == 0
    assert curriculum.item(40).prompt == "1:40"


def test_an_item_is_scored_by_its_own_level_and_keeps_its_metadata() -> None:
    curriculum = levels()
    easy = curriculum.item(3)
    record(curriculum, 4, NUM_GROUPS, 1.0)
    hard = curriculum.item(30)
    assert (easy.metadata, hard.metadata) == ({"entry": 3, "level": 0}, {"entry": 30, "level": 1})
    assert (curriculum.score(easy, "0:3"), curriculum.score(hard, "1:30"), curriculum.score(hard, "0:30")) == (1, 1, 0)


def test_an_evaluation_has_items_of_all_levels_and_does_not_change_the_level() -> None:
    curriculum = levels()
    prompts = [curriculum.item(FIRST_EVALUATION_ITEM + i).prompt for i in range(6)]
    assert sorted(prompt[0] for prompt in prompts) == ["0", "0", "1", "1", "2", "2"]
    assert curriculum.item(5).prompt == "0:5"
    assert curriculum.state()["next_item"] == 6


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0])), max_size=200),
    st.integers(0, 200),
)
def test_a_restored_curriculum_continues_as_the_saved_one_and_no_item_changes_its_level(
    num_levels: int, events: list[tuple[int, float]], saved_after: int
) -> None:
    curriculum, restored = levels(num_levels), levels(num_levels)
    seen: dict[int, str] = {}
    pending: list[int] = []
    for number, (num_new, reward) in enumerate(events):
        if number == saved_after:
            restored.restore(curriculum.state())
        both = [curriculum] if number < saved_after else [curriculum, restored]
        for index in range(len(seen), len(seen) + num_new):
            (prompt,) = {one.item(index).prompt for one in both}
            seen[index] = prompt
            pending.append(index)
        if pending:
            index = pending.pop(number % len(pending))
            assert len({one.record_group(index, [reward, reward / 2]) for one in both}) == 1
        assert all(one.item(index).prompt == prompt for one in both for index, prompt in seen.items())
    assert sum(prompt[0] not in "0123"[:num_levels] for prompt in seen.values()) == 0


def test_a_checkpoint_with_more_levels_than_the_task_is_refused() -> None:
    curriculum = levels(3)
    record(curriculum, 0, 2 * NUM_GROUPS, 1.0)
    with pytest.raises(CheckpointError, match=r"has items of level 3, but the highest level of the task is 2: do not"):
        levels(2).restore(curriculum.state())


def test_levels_of_reasoning_gym_and_own_parameters_become_harder() -> None:
    gym = TaskSettings(name="chain_sum", params={"allow_negation": True}, levels=3).load(1)
    own = TaskSettings(
        name="chain_sum", params={"min_terms": 2, "max_terms": 2}, levels=({"max_digits": 1}, {"max_digits": 6})
    ).load(1)
    for task in (gym, own):
        assert isinstance(task, Curriculum)
        lengths = [
            sum(len(task.item_at(level, index).answer or "") for index in range(40))
            for level in range(len(task.levels))
        ]
        assert lengths == sorted(lengths)
        assert lengths[-1] > lengths[0] + 40
        item = task.item(0)
        assert task.score(item, item.answer or "") == 1.0


@pytest.mark.parametrize(
    ("name", "given_levels", "message"),
    [
        ("chain_sum", 12, "task.levels is 12, but the curriculum of 'chain_sum' has 11 levels"),
        (
            "tests.run.tasks:count_letters",
            3,
            "applies to datasets of reasoning-gym, and 'tests.run.tasks:count_letters'",
        ),
        ("tests.environments.places:three_turns", ({}, {}), "is an environment: omit task.levels"),
        ("composite", 3, "reasoning-gym has no curriculum for 'composite': list the parameters of each level"),
    ],
)
def test_levels_that_do_not_exist_are_refused(name: str, given_levels: int, message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        TaskSettings(name=name, levels=given_levels).load(0)


@pytest.mark.parametrize("given_levels", [1, 0, [{}]])
def test_a_single_level_is_refused(given_levels: object) -> None:
    with pytest.raises(ConfigError, match="a curriculum must have at least two levels"):
        check_settings(TaskSettings, {"name": "chain_sum", "levels": given_levels}, "task")
