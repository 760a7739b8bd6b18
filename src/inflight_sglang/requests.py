"""Conversion of the contract's requests to SGLang's `/generate` format, and of its answers to the contract's.

A request for n completions is sent as a batch of n requests, each with its own id and, if the server honours seeds, its
own seed. SGLang's ``n`` would give all of them the same seed.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from inflight.engines.requests import SentRequest, check_fit, protocol_errors, unsampled_completion
from inflight.engines.version_labels import spans_of
from inflight.errors import InvalidRequestError, NonFiniteError, ProtocolError, UnsupportedError
from inflight.wire import (
    DTYPE_SIZES,
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    VersionSpan,
    WeightUpdate,
)

_MAX_CANDIDATES = 1024
_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The settings of a server that limit its requests."""

    vocab_size: int
    max_model_len: int
    largest_kept_set: int
    """Maximum number of tokens that a filter may keep: ``--sampling-mask-max-tokens``."""
    has_seeds: bool
    """Whether the server honours ``sampling_seed``: ``--enable-deterministic-inference``. Min-p crashes such a
    server."""

    def has_top_k(self, sampling: SamplingParams) -> bool:
        return 0 < sampling.top_k < self.vocab_size


def check_request(request: GenerateRequest, limits: RequestLimits) -> None:
    """Raise `InvalidRequestError` or `UnsupportedError` if the request cannot be served as the contract requires."""
    check_fit(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
    check_sampling(request.sampling, limits)


def check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raise `UnsupportedError` if the server cannot sample as the contract requires."""
    if sampling.seed is not None and not limits.has_seeds:
        raise UnsupportedError(
            f"seed {sampling.seed}: SGLang honours seeds only under --enable-deterministic-inference, "
            "and this server was started without it"
        )
    if sampling.temperature == 0:
        return
    has_top_k = limits.has_top_k(sampling)
    if has_top_k and sampling.top_p < 1:
        raise UnsupportedError(
            f"top_k {sampling.top_k} together with top_p {sampling.top_p:g}: SGLang uses the nucleus of the whole "
            "distribution, the contract uses that of the tokens that top-k keeps. Set only one of them"
        )
    if has_top_k and sampling.top_k > limits.largest_kept_set:
        raise UnsupportedError(
            f"top_k {sampling.top_k}: SGLang reports the logprobs of at most {limits.largest_kept_set} kept tokens; "
            f"start the server with --sampling-mask-max-tokens {sampling.top_k}"
        )
    if sampling.min_p > 0 and limits.has_seeds:
        raise UnsupportedError(
            f"min_p {sampling.min_p:g}: SGLang cannot sample with seeds under min-p; start the server without "
            "--enable-deterministic-inference"
        )


def is_filtered(sampling: SamplingParams, limits: RequestLimits) -> bool:
    """Return whether any filter is active. Greedy decoding takes the likeliest token regardless of filters."""
    return sampling.temperature > 0 and (limits.has_top_k(sampling) or sampling.top_p < 1 or sampling.min_p > 0)


def body_of(request: GenerateRequest, limits: RequestLimits, asked: Mapping[int, SentRequest]) -> dict[str, Any]:
    """Return the body of ``POST /generate`` for the completions with these indices."""
    sampling, room = request.sampling, limits.max_model_len - len(request.prompt_token_ids)
    params = _sampling_params(sampling, room, limits)
    body = {
        "input_ids": [list(request.prompt_token_ids)] * len(asked),
        "rid": [it.name for it in asked.values()],
        "sampling_params": [params | _seed(sampling, index, limits) for index in asked],
        "return_logprob": True,
        "extra_key": [it.cache_key for it in asked.values()],
    }
    # SGLang's plain logprobs describe the distribution before filters; with the mask it also reports the filtered ones.
    return body | ({"return_sampling_mask": True} if is_filtered(sampling, limits) else {})


def _sampling_params(sampling: SamplingParams, room: int, limits: RequestLimits) -> dict[str, Any]:
    greedy = sampling.temperature == 0
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens or room,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1,
        "min_p": 0.0 if greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
        # These override what --preferred-sampling-params may have set.
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    if is_filtered(sampling, limits):
        params["top_k"] = min(sampling.top_k or limits.vocab_size, limits.vocab_size, limits.largest_kept_set)
    return params


def _seed(sampling: SamplingParams, index: int, limits: RequestLimits) -> dict[str, int]:
    """Return the seed of completion ``index``.

    If the request has none, the seed is random, because a server that honours seeds would otherwise repeat itself.
    """
    if not limits.has_seeds:
        return {}
    if sampling.seed is None:
        return {"sampling_seed": random.getrandbits(62)}
    digest = hashlib.sha256(f"{sampling.seed}:{index}".encode()).digest()
    return {"sampling_seed": int.from_bytes(digest[:8], "little") >> 2}


def scoring_body_of(request: ScoreRequest, asked: SentRequest) -> dict[str, Any]:
    """Return the body of ``POST /generate`` that scores tokens; one more token is sampled after them.

    SGLang scores the same candidates at the position of each token. Raises `InvalidRequestError` if there are too many.
    """
    candidates = sorted({token for row in request.candidates for token in row})
    if len(candidates) > _MAX_CANDIDATES:
        raise InvalidRequestError(
            f"the request has {len(candidates)} different candidates, but at most {_MAX_CANDIDATES} are sent, "
            "because SGLang scores each of them at every position; split the request"
        )
    body = {
        "input_ids": [list(request.token_ids)],
        "rid": [asked.name],
        "sampling_params": [{"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}],
        "return_logprob": True,
        "logprob_start_len": request.start - 1,
        "top_logprobs_num": request.top_k,
        "extra_key": [asked.cache_key],
    }
    return body | ({"token_ids_logprob": [candidates]} if candidates else {})


def scores_of(request: ScoreRequest, item: Mapping[str, Any], version: int, vocab_size: int) -> ScoreResponse:
    """Return SGLang's logprobs of a prompt as scores of ``version``.

    SGLang scores the vocabulary's last token correctly, but reports its id as 0 (in ``LogprobResultProcessor``).

    Raises `NonFiniteError` for broken weights, and `ProtocolError` if the answer cannot be read.
    """
    num = request.num_scored
    with protocol_errors("/generate"):
        meta = item["meta_info"]
        scored = meta["input_token_logprobs"][-num:]
        reported = [token if token < vocab_size - 1 else 0 for token in request.token_ids[request.start :]]
        if [token for _, token, *_ in scored] != reported:
            raise ValueError("it scored tokens other than those of the request")
        if not all(math.isfinite(logprob) for logprob, *_ in scored):
            raise NonFiniteError("scored logprobs are not finite: the served weights are broken; publish valid weights")
        top = meta["input_top_logprobs"][-num:] if request.top_k else []
        asked = [
            {token: logprob for logprob, token, *_ in row}
            for row in (meta["input_token_ids_logprobs"][-num:] if request.candidates else [])
        ]
        response = ScoreResponse(
            request_id=request.request_id,
            start=request.start,
            logprobs=tuple(logprob for logprob, *_ in scored),
            top_token_ids=tuple(tuple(token for _, token, *_ in row) for row in top),
            top_logprobs=tuple(tuple(logprob for logprob, *_ in row) for row in top),
            candidate_logprobs=tuple(
                tuple(found[token] for token in row) for found, row in zip(asked, request.candidates, strict=True)
            ),
            version_spans=(VersionSpan(version=version, start=0, end=num),),
        )
    return response


def items_of(answer: Any, num: int) -> list[Any]:
    """Return SGLang's answer for each of ``num`` completions. Raises `ProtocolError` if their number differs."""
    if not isinstance(answer, list) or len(answer) != num:
        raise ProtocolError(f"/generate did not answer with {num} completions: {str(answer)[:200]}")
    return answer


def version_labels_of(item: Mapping[str, Any]) -> Any:
    """Return the version labels of a completion's tokens."""
    return item["meta_info"].get("weight_versions")


def response_of(request: GenerateRequest, items: Sequence[Any], limits: RequestLimits) -> GenerateResponse:
    """Return SGLang's answers for all completions as one response; None stands for a completion that was not sampled.

    Raises `NonFiniteError` for broken weights, and `ProtocolError` if the answers cannot be read.
    """
    with protocol_errors("/generate"):
        completions = tuple(
            unsampled_completion(i) if item is None else _completion(i, item, request.sampling, limits)
            for i, item in enumerate(items)
        )
    return GenerateResponse(request_id=request.request_id, completions=completions)


def _completion(index: int, item: Mapping[str, Any], sampling: SamplingParams, limits: RequestLimits) -> Completion:
    token_ids, logprobs, reason = tokens_of(item, sampling, limits)
    return Completion(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans_of(version_labels_of(item), len(token_ids)),
        finish_reason=cast(FinishReason, reason),
    )


def tokens_of(
    item: Mapping[str, Any], sampling: SamplingParams, limits: RequestLimits
) -> tuple[tuple[int, ...], tuple[float, ...], FinishReason | None]:
    """Return the tokens, the logprobs and the finish reason of a completion, or of a part of one.

    The finish reason is None if the completion continues after this part.
    """
    meta = item["meta_info"]
    token_ids: Sequence[int] = item["output_ids"]
    reason = (meta["finish_reason"] or {"type": None})["type"]
    if reason not in (None, *_REASONS):
        raise ValueError(f"unknown finish reason {reason!r}")
    if is_filtered(sampling, limits):
        logprobs = meta.get("output_token_sampling_logprobs", [])
        _refuse_cut_sets(meta.get("output_token_sampling_mask", []), sampling, limits)
    else:
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
    if any(logprob is None for logprob in logprobs):  # how SGLang writes NaN and infinity
        raise NonFiniteError("sampled logprobs are not finite: the served weights are broken; publish valid weights")
    num_tokens = len(token_ids)
    if reason == "abort":
        # SGLang samples one more token, without checking whether it ends the completion. If a request is aborted in the
        # queue, SGLang answers with the tokens and logprobs that it last reported, whose numbers may differ.
        num_tokens = max(0, min(num_tokens, len(logprobs)) - 1)
    if sampling.ignore_eos and sampling.stop_token_ids:
        num_tokens, reason = _up_to_stop(token_ids[:num_tokens], sampling, reason)
    return tuple(token_ids[:num_tokens]), tuple(logprobs[:num_tokens]), cast(FinishReason | None, reason)


def _up_to_stop(token_ids: Sequence[int], sampling: SamplingParams, reason: str | None) -> tuple[int, str | None]:
    """Return where a completion ends, and why.

    If a request ignores the end of sequence, SGLang ignores its stop tokens too.
    """
    ends = [i for i, token in enumerate(token_ids) if token in sampling.stop_token_ids]
    return (ends[0] + 1, "stop") if ends else (len(token_ids), reason)


def _refuse_cut_sets(masks: Sequence[Sequence[int]], sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raise `UnsupportedError` if a kept set was truncated to the largest size that SGLang can report."""
    if limits.has_top_k(sampling) or limits.largest_kept_set >= limits.vocab_size:
        return
    if any(len(mask) >= limits.largest_kept_set for mask in masks):
        raise UnsupportedError(
            f"top_p {sampling.top_p:g} and min_p {sampling.min_p:g} kept more than {limits.largest_kept_set} tokens, "
            "and SGLang truncates the set there; start the server with a larger --sampling-mask-max-tokens, or set "
            "top_k"
        )


def misaligned(update: WeightUpdate) -> str | None:
    """Return why SGLang cannot load an update's buckets, or None if it can.

    SGLang cannot load a tensor that is not aligned to its element size.
    """
    for bucket in update.buckets:
        offset = 0
        for tensor in update.manifest.tensors[bucket.start : bucket.stop]:
            if offset % DTYPE_SIZES[tensor.dtype]:
                return (
                    f"tensor {tensor.name!r} ({tensor.dtype}) begins at byte {offset} of bucket {bucket.index}, which "
                    "SGLang cannot load; order tensors of larger dtypes first"
                )
            offset += tensor.size_bytes
    return None
