"""Tasks and policies from outside: installed by another package, or named as module:attribute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inflight.errors import ConfigError, InvalidRequestError, TaskError
from inflight.rollouts import MaxLag, TokenBudget, WaitingGroups, load_composer, load_staleness, load_task
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
[inflight.tasks]
letters = own_parts:CountLetters
[inflight.staleness]
whole = own_parts:WholeCompletions
missing = own_parts:Missing
[inflight.composers]
fixed = own_parts:FixedNumber
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of others, installed where Python finds it."""
    metadata = tmp_path / "own_parts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    sys.modules.pop("own_parts", None)


def group(index: int, *completions: list[tuple[int, int]]) -> Group:
    """A group whose completions have (version, number of tokens) in this order."""
    rollouts = []
    for parts in completions:
        spans, end = [], 0
        for version, num_tokens in parts:
            spans.append(VersionSpan(version=version, start=end, end=end + num_tokens))
            end += num_tokens
        rollouts.append(Rollout([0], [0] * end, [0.0] * end, spans, "stop", 0.0, 1.0))
    return Group(group_id=index, item_index=index, rollouts=rollouts)


@pytest.mark.parametrize("name", ["letters", "own_parts:CountLetters"])
def test_a_task_from_outside_is_found_by_both_kinds_of_name(name: str) -> None:
    task = load_task(name, {"letter": "x"}, 3)
    assert task.name == "count_x"
    assert task.score(task.item(5), "axax") == 0.5


@pytest.mark.parametrize("staleness", ["whole", "own_parts:WholeCompletions"])
@pytest.mark.parametrize("composer", ["fixed", "own_parts:FixedNumber"])
def test_policies_from_outside_decide_what_is_trained_on(staleness: str, composer: str) -> None:
    policies = load_staleness(staleness, {}, 2), load_composer(composer, {"num_groups": 2}, 1000)
    waiting = WaitingGroups(*policies)
    waiting.advance(5)
    assert not waiting.add(group(0, [(2, 1), (5, 9)]))  # one old token, which masks the others
    assert waiting.add(group(1, [(3, 1), (5, 9)]))
    assert not waiting.ready()
    assert waiting.add(group(2, [(5, 3)]))
    assert waiting.num_tokens == 11 + 4
    assert [group.item_index for group in waiting.take()] == [1, 2]
    assert waiting.num_groups == 0


def test_the_policies_of_a_run_are_built_in_unless_it_names_others() -> None:
    assert load_staleness("max_lag", {}, 2) == MaxLag(2)
    assert load_composer("token_budget", {}, 100) == TokenBudget(100)


def test_unknown_names_are_refused_with_all_that_are_known() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown staleness policy 'hole' \(did you mean 'whole'\?\); known: max_lag, .*missing, whole",
    ):
        load_staleness("hole", {}, 2)
    with pytest.raises(ConfigError, match=r"unknown batch composer 'whole'; known: token_budget, .*fixed"):
        load_composer("whole", {}, 2)
    with pytest.raises(ConfigError, match="staleness policy 'missing' cannot be loaded"):
        load_staleness("missing", {}, 2)
    with pytest.raises(TaskError, match="'own_parts:Missing' cannot be imported"):
        load_task("own_parts:Missing", {}, 0)


def test_wrong_parameters_and_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"composer 'fixed' could not be created: TypeError: .*num_groups"):
        load_composer("fixed", {}, 2)
    with pytest.raises(ConfigError, match="multiple values for keyword argument 'max_lag'"):
        load_staleness("whole", {"max_lag": 3}, 2)
    with pytest.raises(ConfigError, match="is a dict, not a BatchComposer: it needs compose"):
        load_composer("builtins:dict", {}, 2)


@pytest.mark.parametrize("chosen", [[0, 0], [1], [-1]])
def test_a_composer_that_chooses_what_is_not_there_is_refused(chosen: list[int]) -> None:
    class Wrong(TokenBudget):
        def compose(self, groups, num_tokens):
            return chosen

    waiting = WaitingGroups(MaxLag(2), Wrong(1))
    waiting.add(group(0, [(0, 1)]))
    with pytest.raises(InvalidRequestError, match="chose"):
        waiting.take()
    assert waiting.num_groups == 1
