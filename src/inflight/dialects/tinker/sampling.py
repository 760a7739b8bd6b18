"""Sampling and scoring for Tinker's API: converts its requests to the contract's format, and the answers back.

Shape suffixes: N prompt tokens, K alternatives.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pydantic

from inflight.base.validation import describe_problems
from inflight.contracts import InferenceEndpoint, ScoringEndpoint
from inflight.dialects.tinker.data import Array
from inflight.dialects.tinker.protobuf import messages
from inflight.dialects.tinker.requests import Sample, TensorData, numbers_of
from inflight.errors import EndpointError, InvalidRequestError, UnsupportedError
from inflight.wire import MAX_ALTERNATIVES, Completion, GenerateRequest, SamplingParams, ScoreRequest, ScoreResponse

_EMPTY_CELL = -99999.0
_STOP_REASONS = {"stop": 0, "length": 1}


def generate_request_of(sample: Sample, token_ids: tuple[int, ...]) -> GenerateRequest:
    """Return the request for the samples.

    Without ``stop``, only the end-of-sequence token ends a sample; if ``stop`` is ``[]``, not even that token does.
    """
    asked = sample.sampling_params
    stop = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or [])
    try:
        sampling = SamplingParams(
            n=sample.num_samples,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            seed=asked.seed,
            ignore_eos=asked.stop is not None and not stop,
            stop=tuple(it for it in stop if isinstance(it, str)),
            stop_token_ids=tuple(it for it in stop if isinstance(it, int)),
        )
    except pydantic.ValidationError as error:
        raise InvalidRequestError(f"sampling_params: {describe_problems(error, SamplingParams)}") from error
    return GenerateRequest(request_id=f"tinker-{uuid.uuid4().hex}", prompt_token_ids=token_ids, sampling=sampling)


async def sample_from(
    endpoint: InferenceEndpoint, sample: Sample, max_model_len: int
) -> tuple[bytes, Sequence[Completion]]:
    """Return the ``SampleResponse`` as bytes, and the completions. Raises `InflightError`.

    The API scores a prompt only together with a sample of at least one token. If a prompt that is to be scored fills
    the context, the samples are empty.
    """
    token_ids = sample.token_ids()
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens")
    if sample.record_stability_info:
        raise UnsupportedError("record_stability_info is for the loss stable_reinforce, which has no published formula")
    if sample.prompt_alt_tokens_k:
        raise UnsupportedError("prompt_alt_tokens_k is not supported")
    if sample.topk_sample_logprobs and sample.sampling_params.temperature != 1.0:
        raise UnsupportedError("topk_sample_logprobs is supported only at temperature 1")
    scores_prompt = sample.prompt_logprobs or sample.topk_prompt_logprobs or sample.target_prompt_logprobs is not None
    completions: Sequence[Completion]
    if scores_prompt and len(token_ids) == max_model_len:
        completions = [
            Completion(index=i, token_ids=(), logprobs=(), version_spans=(), finish_reason="length")
            for i in range(sample.num_samples)
        ]
    else:
        completions = (await endpoint.generate(generate_request_of(sample, token_ids))).completions
    message = messages().SampleResponse()
    if scores_prompt:
        await _add_prompt_scores(endpoint, sample, token_ids, message)
    for completion in completions:
        if completion.finish_reason not in _STOP_REASONS:
            raise EndpointError("the completion was aborted on the server: sample again")
        sequence = message.sequences.add(
            stop_reason=_STOP_REASONS[completion.finish_reason],
            tokens=np.array(completion.token_ids, "<i4").tobytes(),
            logprobs=np.array(completion.logprobs, "<f4").tobytes(),
        )
        for span in completion.version_spans:
            sequence.version_spans.add(version=span.version, start=span.start, end=span.end)
        if sample.topk_sample_logprobs and completion.token_ids:
            whole = (*token_ids, *completion.token_ids)
            scored = await _score(endpoint, whole, len(token_ids), sample.topk_sample_logprobs)
            _fill_top(sequence.topk_sampled_logprobs, scored, 0, sample.topk_sample_logprobs)
    content: bytes = message.SerializeToString()
    return content, completions


async def _add_prompt_scores(
    endpoint: InferenceEndpoint, sample: Sample, token_ids: tuple[int, ...], message: Any
) -> None:
    num_tokens = len(token_ids)
    last = num_tokens if sample.prompt_logprobs_last_n is None else min(sample.prompt_logprobs_last_n, num_tokens)
    start = max(1, num_tokens - last)
    targets_NK = None if sample.target_prompt_logprobs is None else _targets(sample.target_prompt_logprobs, num_tokens)
    logprobs_N = np.full(num_tokens, np.nan, "<f4")
    scored = None
    if targets_NK is not None:
        start = 1
    if start < num_tokens:
        scored = await _score(endpoint, token_ids, start, sample.topk_prompt_logprobs, targets_NK)
        logprobs_N[start:] = scored.logprobs
        logprobs_N[: num_tokens - last] = np.nan
    if sample.prompt_logprobs or sample.topk_prompt_logprobs:
        message.prompt_logprobs = logprobs_N.tobytes()
    if sample.topk_prompt_logprobs:
        _fill_top(message.topk_prompt_logprobs, scored, start, sample.topk_prompt_logprobs)
    if targets_NK is not None and sample.target_prompt_logprobs is not None:
        found_NK = np.zeros(targets_NK.shape, "<f4") if scored is None else np.array(scored.candidate_logprobs, "<f4")
        _fill_targets(message.target_prompt_logprobs, sample.target_prompt_logprobs, targets_NK, found_NK)


async def _score(
    endpoint: InferenceEndpoint, token_ids: tuple[int, ...], start: int, top_k: int, targets_NK: Array | None = None
) -> ScoreResponse:
    if not isinstance(endpoint, ScoringEndpoint):
        raise UnsupportedError(f"{endpoint.name} does not support scoring, which prompt logprobs require")
    candidates = () if targets_NK is None else tuple(tuple(max(int(it), 0) for it in row) for row in targets_NK)
    request_id = f"tinker-{uuid.uuid4().hex}"
    try:
        request = ScoreRequest(
            request_id=request_id, token_ids=token_ids, start=start, top_k=top_k, candidates=candidates
        )
    except pydantic.ValidationError as error:
        raise InvalidRequestError(f"the prompt cannot be scored: {describe_problems(error, ScoreRequest)}") from error
    return await endpoint.score(request)


def _fill_top(message: Any, scored: ScoreResponse | None, num_before: int, k: int) -> None:
    """Write the likeliest tokens as rows of ``k``, after ``num_before`` empty rows."""
    rows = [] if scored is None else scored.top_token_ids
    ids_NK = np.zeros((num_before + len(rows), k), "<i4")
    logprobs_NK = np.full(ids_NK.shape, _EMPTY_CELL, "<f4")
    if scored is not None and rows:
        ids_NK[num_before:, : len(rows[0])] = rows
        logprobs_NK[num_before:, : len(rows[0])] = scored.top_logprobs
    message.token_ids, message.logprobs = ids_NK.tobytes(), logprobs_NK.tobytes()
    message.k, message.length = k, len(ids_NK)


def _targets(tensor: TensorData, num_tokens: int) -> Array:
    """Return the tokens to score in place of each prompt token but the first, int64 [N - 1, K]; -1 means none."""
    shape = tuple(tensor.shape or ())
    if len(shape) != 2 or shape[0] != num_tokens - 1 or shape[1] < 1:
        raise InvalidRequestError(
            f"target_prompt_logprobs has shape {list(shape)}, but must have [{num_tokens - 1}, K]"
        )
    if shape[1] > MAX_ALTERNATIVES:
        raise InvalidRequestError(
            f"target_prompt_logprobs has {shape[1]} targets for each token, but at most {MAX_ALTERNATIVES} are scored"
        )
    try:
        values: Array = numbers_of(tensor).astype(np.int64)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"target_prompt_logprobs cannot be read: {error}") from error
    if tensor.sparse_crow_indices is None:
        if values.size != shape[0] * shape[1]:
            raise InvalidRequestError(f"target_prompt_logprobs has {values.size} numbers for the shape {list(shape)}")
        return values.reshape(shape)
    rows, columns = np.array(tensor.sparse_crow_indices), np.array(tensor.sparse_col_indices or [], np.int64)
    counts = np.diff(rows)
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(columns) or len(values) != len(columns):
        raise InvalidRequestError("the sparse indices of target_prompt_logprobs do not fit its shape")
    if (counts < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise InvalidRequestError("the sparse indices of target_prompt_logprobs do not fit its shape")
    dense = np.full(shape, -1, np.int64)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _fill_targets(message: Any, asked: TensorData, targets_NK: Array, found_NK: Array) -> None:
    """Write the scores in the layout of the request; cells for which no score was requested receive 0."""
    found_NK = np.where(targets_NK < 0, np.float32(0.0), found_NK).astype("<f4")
    message.dtype = 1
    message.shape.extend(found_NK.shape)
    if asked.sparse_crow_indices is None:
        message.dense = found_NK.tobytes()
        return
    rows, columns = np.array(asked.sparse_crow_indices, "<i8"), np.array(asked.sparse_col_indices, "<i8")
    message.sparse_csr.values = found_NK[np.repeat(np.arange(len(found_NK)), np.diff(rows)), columns].tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = rows.tobytes(), columns.tobytes()
