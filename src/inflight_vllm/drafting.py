"""The proposer of drafts in a vLLM worker. ``--speculative-config`` names it, with the method ``custom_class``.

vLLM creates the proposer in the worker and requests drafts from it after every step. The completions that it drafts
from arrive through ``collective_rpc``, like all other calls from the endpoint to the plug-in: this also works between
hosts, and no worker reads a file that another process writes. The completions are kept in the worker's memory, so a new
process starts without any. This module never imports vLLM.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.rollouts.drafts import Drafter, DraftSource
from inflight.wire import DraftHistory

CONTINUED = "inflight_num_continued"
"""Extra argument: the number of the prompt's last tokens that the continued request sampled."""
_LOG = logging.getLogger("vllm.inflight")  # vLLM shows only the records of loggers below its own


@dataclass(slots=True)
class _Row:
    """One running completion."""

    drafter: Drafter
    max_tokens: int
    """Largest number of tokens, including the prompt."""
    num_tokens: int
    """Number of tokens that the drafter knows, including the prompt."""
    draft: list[int] = field(default_factory=list)
    """The draft that was proposed after the known tokens."""


class HistoryProposer:
    """Drafts from recorded completions of the same prompt, for the requests of one worker."""

    def __init__(self, vllm_config: Any) -> None:
        self._source = DraftSource("history")
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self._runner: Any = None
        self._rows: dict[str, _Row] = {}
        _LOG.info("Drafts come from recorded completions; this process starts without any")

    @property
    def num_prompts(self) -> int:
        """Number of prompts with recorded completions."""
        return self._source.num_prompts

    def load_model(self, *_: object) -> None:
        """Do nothing, because there is no drafting model."""

    def record(self, history: DraftHistory, runner: Any) -> None:
        """Replace the recorded completions of the prompts in ``history``. ``runner`` is the worker's model runner."""
        self._source.record(history)
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        **_: object,
    ) -> list[list[int]]:
        """Return a draft, which may be empty, for each request of the step.

        ``token_ids_cpu`` holds all tokens of each request.
        """
        if self._runner is None:  # nothing has been recorded
            return [[] for _ in sampled_token_ids]
        batch = self._runner.input_batch
        request_ids = batch.req_ids[: len(sampled_token_ids)]
        for gone in self._rows.keys() - set(request_ids):
            del self._rows[gone]
        return [
            self._propose(request_id, token_ids_cpu[i], int(batch.num_prompt_tokens[i]), int(num_tokens_no_spec[i]))
            if sampled_token_ids[i]  # otherwise its prompt has not been computed completely
            else []
            for i, request_id in enumerate(request_ids)
        ]

    def _propose(self, request_id: str, token_ids: Any, num_prompt_tokens: int, num_tokens: int) -> list[int]:
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._start_row(request_id, token_ids[:num_prompt_tokens].tolist())
        sampled = token_ids[row.num_tokens : num_tokens].tolist()
        if row.draft:
            row.drafter.verified(len(row.draft), _num_equal(row.draft, sampled))
        for token in sampled:
            row.drafter.sampled(token)
        row.num_tokens = num_tokens
        row.draft = row.drafter.draft(min(self._longest, row.max_tokens - num_tokens - 1))
        return row.draft.copy()

    def _start_row(self, request_id: str, prompt: list[int]) -> _Row:
        params = self._runner.requests[request_id].sampling_params
        start = len(prompt) - (params.extra_args or {}).get(CONTINUED, 0)
        max_tokens = min(self._max_model_len, len(prompt) + params.max_tokens)
        return _Row(self._source.drafter(tuple(prompt[:start]), prompt[start:]), max_tokens, len(prompt))


def _num_equal(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, sampled, strict=False)))


def record_history(worker: Any, history: Mapping[str, Any]) -> dict[str, Any]:
    """Record the body of a `DraftHistory` in one worker, and return the number of prompts stored.

    A worker without a proposer, such as one in any pipeline stage but the last, records nothing.
    """
    runner = worker.model_runner
    proposer = getattr(runner, "drafter", None)
    if not isinstance(proposer, HistoryProposer):
        return {"num_prompts": 0}
    proposer.record(DraftHistory.model_validate(history), runner)
    return {"num_prompts": proposer.num_prompts}
