"""Scoring in the embedded engine: logprobs of given tokens, computed between two token steps without using slots.

Shape suffixes: T packed tokens, N scored tokens, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from inflight.engines.embedded.counters import EngineCounters
from inflight.engines.embedded.slot_attention import AttentionPlan
from inflight.errors import InflightError, InvalidRequestError
from inflight.model.attention import SegmentPlan, segment_attention
from inflight.wire import ScoreRequest, ScoreResponse, VersionSpan

_MAX_TOKENS = 4096
"""Maximum total number of tokens if a forward pass scores several requests: more would delay running sequences."""
_MAX_LOGITS = 1 << 24
"""Maximum number of logits in memory at a time: 64 MB in float32."""


class _WholeSequences(AttentionPlan):
    """Attention in which each whole sequence attends only to itself, and no keys and values are stored."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._segments = SegmentPlan.build(tuple(lengths), device)

    def attend(
        self,
        layer: int,
        query_1QTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        return segment_attention(query_1QTD, key_1KTD, value_1KTD, self._segments, scale)


class ScoringQueue:
    """The score requests of an engine, in order of arrival. Engine's thread only."""

    def __init__(self, model: Any, device: torch.device, counters: EngineCounters) -> None:
        self._counters = counters
        self._model = model
        self._head = model.get_output_embeddings()
        self._device = device
        self._waiting: deque[tuple[ScoreRequest, Future[ScoreResponse]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: ScoreRequest, outcome: Future[ScoreResponse]) -> None:
        """Queue a request; ``outcome`` receives its response, or `InvalidRequestError` if its forward pass fails."""
        self._waiting.append((request, outcome))

    def remove(self, outcome: Future[ScoreResponse]) -> None:
        """Drop a request that no client is waiting for any more. If it has been scored already, do nothing."""
        self._waiting = deque(it for it in self._waiting if it[1] is not outcome)

    def fail_all(self, error: InflightError) -> None:
        """End every waiting request with an error."""
        waiting, self._waiting = self._waiting, deque()
        for _, outcome in waiting:
            outcome.set_exception(error)

    def score_next(self, version: int) -> None:
        """Score as many requests as fit in one forward pass, with the weights of ``version``."""
        batch = [self._waiting.popleft()]
        num_tokens = len(batch[0][0].token_ids)
        while self._waiting and (num_tokens := num_tokens + len(self._waiting[0][0].token_ids)) <= _MAX_TOKENS:
            batch.append(self._waiting.popleft())
        self._score(batch, version)

    def _score(self, batch: Sequence[tuple[ScoreRequest, Future[ScoreResponse]]], version: int) -> None:
        try:
            responses = self._scored([request for request, _ in batch], version)
        except Exception as error:  # models and memory may raise anything
            if len(batch) > 1:  # only one of them may be the cause
                for it in batch:
                    self._score([it], version)
                return
            what = f"{type(error).__name__}: {error}"
            batch[0][1].set_exception(InvalidRequestError(f"request {batch[0][0].request_id!r} failed: {what}"))
            return
        for (request, outcome), response in zip(batch, responses, strict=True):
            outcome.set_result(response)
            self._counters.num_scored_tokens += request.num_scored

    def _scored(self, requests: Sequence[ScoreRequest], version: int) -> list[ScoreResponse]:
        lengths = [len(request.token_ids) for request in requests]
        token_ids_T = torch.tensor([token for request in requests for token in request.token_ids], device=self._device)
        hidden_TH = self._model.base_model(
            input_ids=token_ids_T[None],
            position_ids=torch.tensor([[i for length in lengths for i in range(length)]], device=self._device),
            use_cache=False,
            step_plan=_WholeSequences(lengths, self._device),
        ).last_hidden_state[0]
        responses, begin = [], 0
        for request, length in zip(requests, lengths, strict=True):
            hidden_NH = hidden_TH[begin + request.start - 1 : begin + length - 1]
            responses.append(self._response(request, hidden_NH, version))
            begin += length
        return responses

    def _response(self, request: ScoreRequest, hidden_NH: torch.Tensor, version: int) -> ScoreResponse:
        columns = [[token, *row] for token, row in zip(request.token_ids[request.start :], _rows(request), strict=True)]
        asked_NK = torch.tensor(columns, device=self._device)
        found: list[list[float]] = []
        top_ids: list[list[int]] = []
        top: list[list[float]] = []
        step = max(1, _MAX_LOGITS // int(self._head.weight.shape[0]))
        for start in range(0, len(columns), step):
            logits_NV = self._head(hidden_NH[start : start + step]).float()
            logprobs_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
            found += logprobs_NV.gather(1, asked_NK[start : start + step]).tolist()
            if request.top_k:
                best = logprobs_NV.topk(min(request.top_k, logprobs_NV.shape[1]), dim=-1)
                top_ids += best.indices.tolist()
                top += best.values.tolist()
        return ScoreResponse.model_construct(
            request_id=request.request_id,
            start=request.start,
            logprobs=tuple(row[0] for row in found),
            top_token_ids=tuple(map(tuple, top_ids)),
            top_logprobs=tuple(map(tuple, top)),
            candidate_logprobs=tuple(tuple(row[1:]) for row in found) if request.candidates else (),
            version_spans=(VersionSpan(version=version, start=0, end=len(found)),),
        )


def _rows(request: ScoreRequest) -> Sequence[Sequence[int]]:
    return request.candidates or ((),) * request.num_scored
