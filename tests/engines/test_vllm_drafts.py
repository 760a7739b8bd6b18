"""Drafts on vLLM and SGLang: what is proposed, asked for and refused. No engine: tests/real_engines has that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import inflight_sglang
from inflight.contracts import EngineKind, EngineOptions
from inflight.engines.launch import start_engine
from inflight.engines.requests import SentRequest
from inflight.errors import ConfigError, UnsupportedError
from inflight.rollouts.drafts import LARGEST_WINDOW, SMALLEST_WINDOW
from inflight.wire import DraftCounts, DraftHistory, PromptHistory
from inflight_vllm import KIND, flags
from inflight_vllm.drafting import CONTINUED, HistoryProposer, record_history
from inflight_vllm.requests import bodies_of, check_request, choices_of, response_of
from tests.engines.test_vllm_requests import CAN, SETTINGS, asked, choice, request

MAX_MODEL_LEN = 100
PROMPT = (1, 2, 3, 4, 5)
RECORDED = tuple(range(10, 60))
SPECULATING = SETTINGS | {"speculative_config": {"method": "custom_class", "model": flags.PROPOSER}}


class Batch:
    """A worker of vLLM as far as the proposer sees it: rows of token ids, and which request has which row."""

    def __init__(self, longest: int = LARGEST_WINDOW) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        )
        self.proposer = HistoryProposer(config)
        self.rows: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=self.proposer, requests={}))

    def record(self, *completions: tuple[int, ...], prompt: tuple[int, ...] = PROMPT) -> dict[str, Any]:
        entry = PromptHistory(prompt_token_ids=prompt, completions=completions, rewards=(0.0,) * len(completions))
        return record_history(self.worker, DraftHistory(entries=(entry,)).model_dump(mode="json"))

    def start(
        self, name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = MAX_MODEL_LEN, num_continued: int = 0
    ) -> None:
        self.rows[name] = (prompt, [])
        extra_args = {CONTINUED: num_continued} if num_continued else None
        params = SimpleNamespace(max_tokens=max_tokens, extra_args=extra_args)
        self.worker.model_runner.requests[name] = SimpleNamespace(sampling_params=params)

    def step(self, **sampled: tuple[int, ...]) -> dict[str, list[int]]:
        """Add what was sampled, and return the drafts behind it. Rows are in the order of the names."""
        tokens = np.zeros((len(sampled), MAX_MODEL_LEN), dtype=np.int32)
        lengths = np.zeros(len(sampled), dtype=np.int32)
        for i, (name, ids) in enumerate(sampled.items()):
            prompt, completion = self.rows[name]
            completion += ids
            row = [*prompt, *completion]
            tokens[i, : len(row)], lengths[i] = row, len(row)
        num_prompt_tokens = np.array([len(self.rows[name][0]) for name in sampled])
        # vLLM's own list of names may be longer than the step.
        self.worker.model_runner.input_batch = SimpleNamespace(
            req_ids=[*sampled], num_prompt_tokens=num_prompt_tokens, token_ids_cpu=tokens
        )
        drafts = self.proposer.propose([list(ids) for ids in sampled.values()], lengths, tokens, slot_mappings=None)
        return dict(zip(sampled, drafts, strict=True))


def test_a_completion_is_drafted_from_a_recorded_one_of_its_prompt_and_the_window_follows_what_is_accepted() -> None:
    batch = Batch()
    assert batch.record(RECORDED) == {"num_prompts": 1}
    batch.start("a")
    batch.start("other", prompt=(1, 2, 3, 4, 6))
    drafts = batch.step(a=RECORDED[:1], other=RECORDED[:1])
    assert drafts == {"a": list(RECORDED[1 : 1 + SMALLEST_WINDOW]), "other": []}
    assert batch.step(a=RECORDED[1:4])["a"] == list(RECORDED[4:8])
    assert batch.step(a=RECORDED[4:9])["a"] == list(RECORDED[9:17])
    assert batch.step(a=(RECORDED[9], 99))["a"] == []  # no suffix of this occurs
    assert batch.step(a=RECORDED[9:13])["a"] == list(RECORDED[13:17])


def test_a_row_that_moves_keeps_its_window_and_a_request_that_left_is_forgotten() -> None:
    batch = Batch()
    batch.record(RECORDED)
    for name in "ab":
        batch.start(name)
    batch.step(a=RECORDED[:1], b=RECORDED[:1])
    drafts = batch.step(b=(RECORDED[1], 99), a=RECORDED[1:4])
    assert len(drafts["a"]) == 2 * SMALLEST_WINDOW
    batch.step(a=RECORDED[4:9])
    assert batch.proposer._rows.keys() == {"a"}


def test_nothing_is_proposed_before_a_history_for_an_unfinished_prompt_or_beyond_the_context() -> None:
    batch = Batch()
    batch.start("a")
    assert batch.step(a=RECORDED[:4]) == {"a": []}
    batch.record(RECORDED)
    assert batch.step(a=()) == {"a": []}
    long = tuple(i % 7 for i in range(MAX_MODEL_LEN))
    batch.record(long, prompt=(1,))
    batch.start("long", prompt=(1,))
    assert batch.step(long=long[: MAX_MODEL_LEN - 4])["long"] == list(long[MAX_MODEL_LEN - 4 : MAX_MODEL_LEN - 2])
    assert batch.step(long=long[MAX_MODEL_LEN - 4 : MAX_MODEL_LEN - 2])["long"] == []


def test_a_continued_completion_is_drafted_behind_its_original_prompt_and_not_beyond_its_last_token() -> None:
    batch = Batch()
    batch.record(RECORDED)
    batch.start("a", prompt=(*PROMPT, *RECORDED[:7]), num_continued=7, max_tokens=6)
    batch.start("no continuation", prompt=(*PROMPT, *RECORDED[:7]))
    step = {"a": RECORDED[7:8], "no continuation": RECORDED[7:8]}
    assert batch.step(**step) == {"a": list(RECORDED[8:10]), "no continuation": []}
    assert batch.step(a=RECORDED[8:11])["a"] == [RECORDED[11]]  # the sixth token is drawn, not drafted
    (body,) = bodies_of(
        request(12).model_copy(update={"num_continued": 7}),
        CAN.model_copy(update={"drafts": True}),
        {0: SentRequest("a", cache_key="")},
    )
    assert body["sampling_params"]["extra_args"] == {CONTINUED: 7}


def test_a_worker_that_proposes_nothing_records_nothing() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    history = DraftHistory(entries=(PromptHistory(prompt_token_ids=PROMPT, completions=(), rewards=()),))
    assert record_history(worker, history.model_dump(mode="json")) == {"num_prompts": 0}


def test_a_server_that_drafts_is_started_with_the_proposer_and_says_so() -> None:
    words = KIND.command(EngineOptions(model=Path("M"), device="cpu", drafts="history"), "127.0.0.1", 7000)
    config = words[words.index("--speculative-config") + 1]
    assert flags.PROPOSER in config and str(LARGEST_WINDOW) in config
    module, _, name = flags.PROPOSER.rpartition(".")
    assert (module, name) == (HistoryProposer.__module__, HistoryProposer.__name__)
    assert "--speculative-config" not in KIND.command(EngineOptions(model=Path("M"), device="cpu"), "127.0.0.1", 7000)
    assert flags.drafts_from_history(SPECULATING) and not flags.drafts_from_history(SETTINGS)
    assert not flags.drafts_from_history(SETTINGS | {"speculative_config": {"method": "ngram", "model": None}})


def test_each_completion_of_a_server_that_counts_drafts_is_a_request_of_its_own_and_has_its_counts() -> None:
    counts = {"observability_config": {"per_request_spec_decode_metrics": "summary"}}
    assert flags.counts_drafts(SPECULATING | counts) and not flags.counts_drafts(SPECULATING)
    can = CAN.model_copy(update={"draft_counts": True})
    bodies = bodies_of(request(n=3), can, asked(dict.fromkeys(range(3), "key")))
    assert [body["sampling_params"]["n"] for body in bodies] == [1, 1, 1]
    metrics = {"speculative_decoding": {"num_spec_steps": 4, "num_accepted_draft_tokens": 9}}
    answers = [
        {"choices": [choice([1] * 20)], "metrics": metrics},
        {"choices": [choice([1], finish_reason="abort")], "metrics": None},
        {"choices": [choice([1]), choice([1], 1)], "metrics": metrics},
    ]
    completions = response_of(request(n=4), choices_of(answers)).completions
    assert [it.draft_counts for it in completions] == [DraftCounts(num_verifications=4, num_accepted=9), *[None] * 3]


@pytest.mark.parametrize(
    ("kind", "drafts", "words"),
    [
        (KIND, "siblings", "only from recorded completions"),
        (KIND, "both", "only from recorded completions"),
        (inflight_sglang.KIND, "history", "from a single corpus"),
    ],
)
def test_drafts_that_an_engine_cannot_take_are_refused_before_it_starts(
    kind: EngineKind, drafts: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start_engine(kind, EngineOptions(model=Path("M"), drafts=drafts))


def test_what_vllm_ignores_or_changes_while_it_verifies_drafts_is_refused() -> None:
    assert flags.speculates(SPECULATING) and not flags.speculates(SETTINGS)
    assert flags.honours_seeds(SETTINGS) and not flags.honours_seeds(SPECULATING)
    check_request(request(top_k=5, top_p=0.5), CAN, speculates=True)
    with pytest.raises(UnsupportedError, match="ignores min-p"):
        check_request(request(min_p=0.1), CAN, speculates=True)
    with pytest.raises(UnsupportedError, match="depend on the drafts"):
        check_request(request(seed=1), CAN, speculates=True)
