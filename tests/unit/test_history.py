"""The history of prompts: bounded, saved as JSON, and what predictors make of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import CheckpointError, ConfigError
from inflight.rollouts import HistoryStore
from inflight.rollouts.predictors import PREDICTORS, TailRecall, make_predictor

GROUPS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1)),
    max_size=30,
)


@given(GROUPS)
def test_a_history_is_bounded_and_survives_a_checkpoint(groups: list[tuple[str, list[list[int]]]]) -> None:
    history = HistoryStore(max_prompts=4, max_tokens=40, completions_per_prompt=5)
    for prompt, completions in groups:
        history.record(prompt, [*map(len, completions)], [1.0] * len(completions), completions)
        assert len(history) <= 4
        assert history.num_tokens <= 40
    restored = HistoryStore()
    restored.restore(json.loads(json.dumps(history.to_json())))
    assert restored.to_json() == history.to_json()
    assert restored.num_tokens == history.num_tokens
    for prompt, _ in groups:
        record = history.of(prompt)
        assert record is None or 1 <= len(record.lengths) == len(record.rewards) <= 5


@pytest.mark.parametrize(
    "data", [{"a": [[1], [1.0], ["not base64!"]]}, {"a": [[1], [], []]}, {"a": 3}, {"a": [[], [], []]}, []]
)
def test_a_history_that_cannot_be_read_is_refused(data: object) -> None:
    with pytest.raises(CheckpointError, match="the history of rollouts in the checkpoint cannot be read"):
        HistoryStore().restore(data)  # type: ignore[arg-type]


def test_predictions_come_from_earlier_completions_or_from_the_same_group() -> None:
    history = HistoryStore()
    history.record("seen", [10, 30], [0.0, 1.0])
    said = {name: [make_predictor(name, history).predict(p, f) for p, f in CASES] for name in PREDICTORS}
    assert said == {"history": [20.0, 20.0, None], "siblings": [None, 50.0, None], "both": [20.0, 50.0, None]}
    with pytest.raises(ConfigError, match="unknown length predictor 'oracle'; known: history, siblings, both"):
        make_predictor("oracle", history)


CASES = (("seen", []), ("seen", [50, 40]), ("new", []))


def test_recall_of_the_longest_fifth_is_one_for_an_oracle_and_chance_for_a_constant() -> None:
    oracle, constant, reversed_ = TailRecall(), TailRecall(), TailRecall()
    for length in range(100):
        oracle.note(length, length)
        constant.note(1.0, length)
        reversed_.note(-length, length)
    assert oracle.value() == 1.0
    assert constant.value() == pytest.approx(0.2)
    assert reversed_.value() == 0.0
    assert TailRecall().value() is None
