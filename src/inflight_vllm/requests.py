"""The contract's requests as vLLM takes them, and vLLM's answers as the contract has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.engines.labels import began_under_another, spans_of
from inflight.errors import InvalidRequestError, NonFiniteError, ProtocolError, UnsupportedError
from inflight.wire import Capabilities, Completion, GenerateRequest, GenerateResponse, SamplingParams

_FLOOR = -9999.0
"""What vLLM answers instead of a logprob that is NaN or minus infinity."""


def check_request(request: GenerateRequest, can: Capabilities) -> None:
    """Raise `InvalidRequestError` if the request does not fit, `UnsupportedError` for filters in another order and
    for seeds that the server does not honour.
    """
    num_prompt, sampling = len(request.prompt_token_ids), request.sampling
    room = can.max_model_len - num_prompt
    if room < 1 or (sampling.max_tokens or 1) > room:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and max_tokens {sampling.max_tokens} exceed max_model_len {can.max_model_len}"
        )
    largest = max(request.prompt_token_ids)
    if largest >= can.vocab_size:
        raise InvalidRequestError(f"token id {largest} is outside of the vocabulary of {can.vocab_size}")
    if sampling.seed is not None and not can.seeds:
        raise UnsupportedError(
            f"seed {sampling.seed}: a seed ends this vLLM server when a prompt does not fit into one step; on a CPU "
            "start it with --no-enable-chunked-prefill"
        )
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise UnsupportedError(
            f"min_p {sampling.min_p:g} together with top_p {sampling.top_p:g}: vLLM applies min-p first, the contract "
            "last, and the kept sets differ. Give one of them"
        )


def bodies_of(request: GenerateRequest, can: Capabilities, salt: str) -> list[dict[str, Any]]:
    """Return the bodies of ``POST /inference/v1/generate``: several where vLLM does not take n completions at once."""
    largest_n, n = can.max_concurrent_sequences, request.sampling.n
    return [body_of(request, can, salt, start, min(largest_n, n - start)) for start in range(0, n, largest_n)]


def body_of(request: GenerateRequest, can: Capabilities, salt: str, start: int, num: int) -> dict[str, Any]:
    """Return the body for completions ``start`` to ``start + num``. Those of another salt share no cached prefix."""
    room = can.max_model_len - len(request.prompt_token_ids)
    return {
        "model": can.model,
        "request_id": f"{request.request_id}-{start}",
        "token_ids": list(request.prompt_token_ids),
        "cache_salt": salt,
        "sampling_params": _sampling(request.sampling, start, num, room),
    }


def _sampling(sampling: SamplingParams, start: int, num: int, room: int) -> dict[str, Any]:
    """Return the parameters of completions ``start`` to ``start + num``."""
    params: dict[str, Any] = {
        "n": num,
        "max_tokens": sampling.max_tokens or room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
        "logprobs": 0,
    }
    return params if sampling.seed is None else params | {"seed": _first_seed(sampling.seed) + start}


def _first_seed(seed: int) -> int:
    """Return the seed of completion 0. vLLM counts up from it, so that those of neighbouring seeds must lie apart."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())


def choices_of(answers: Sequence[Any]) -> list[Any]:
    """Return what vLLM answers to `bodies_of` for each completion. Raises `ProtocolError` if it cannot be read."""
    try:
        return [choice for answer in answers for choice in sorted(answer["choices"], key=lambda c: c["index"])]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"/inference/v1/generate answered no completion: {error!r}") from error


def began_late(choices: Sequence[Any], label: str) -> list[int]:
    """Return the indices of completions that may rest on weights older than those that sampled them.

    They were asked for with a salt made of ``label``. Raises `ProtocolError` if an answer cannot be read.
    """
    try:
        return [i for i, choice in enumerate(choices) if began_under_another(choice["weight_versions"], label)]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/inference/v1/generate answered no completion: {error!r}") from error


def response_of(request: GenerateRequest, choices: Sequence[Any]) -> GenerateResponse:
    """Return what vLLM answers for each completion as one.

    Raises `NonFiniteError` for broken weights, `ProtocolError` for what cannot be read.
    """
    try:
        completions = tuple(_completion(choice, index) for index, choice in enumerate(choices))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/inference/v1/generate answered no completion: {error!r}") from error
    return GenerateResponse(request_id=request.request_id, completions=completions)


def _completion(choice: Mapping[str, Any], index: int) -> Completion:
    token_ids = tuple(choice["token_ids"])
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = tuple(float(token["logprob"]) for token in content)
    if any(logprob <= _FLOOR for logprob in logprobs):
        raise NonFiniteError("sampled logprobs are not finite: the weights served are broken; publish whole ones")
    return Completion(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans_of(choice["weight_versions"], len(token_ids)),
        finish_reason=choice["finish_reason"],
    )
