"""OpenAI completions with token ids, as served by vLLM and systems built on it. They carry no weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.errors import UnsupportedError
from inflight.wire import Completion, GenerateRequest, VersionSpan

ROUTE = "/v1/completions"
TOKEN_PREFIX = "token_id:"
"""The prefix of a token's text if the server returns token ids in place of text."""


def body_of(request: GenerateRequest, *, model: str, room: int) -> dict[str, Any]:
    """Return the body of a request for one completion; ``room`` is the number of tokens that fit after the prompt.

    The body sets every parameter that affects the distribution, so that no default of the server applies. Raises
    `UnsupportedError` for filters that the server would apply in a different order.
    """
    asked = request.sampling
    if asked.min_p > 0 and asked.top_p < 1:
        raise UnsupportedError(
            "min_p and top_p cannot be combined: vLLM applies min_p first, but the contract applies it last"
        )
    shared = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}
    return asked.model_dump(mode="json", include=shared) | {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "n": 1,
        "max_tokens": asked.max_tokens or room,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def ids_of_tokens(tokens: Sequence[str]) -> list[int]:
    """Return the token ids that the server sent in place of the tokens' texts. Raises ``ValueError``."""
    if any(not token.startswith(TOKEN_PREFIX) for token in tokens):
        raise ValueError(
            "the answer contains the text of tokens instead of their ids: start the server with "
            "--return-tokens-as-token-ids"
        )
    return [int(token.removeprefix(TOKEN_PREFIX)) for token in tokens]


def completion_of(choice: Mapping[str, Any], token_ids: Sequence[int], index: int, version: int) -> Completion:
    """Return a choice as a completion sampled entirely with ``version``. Raises an error if the choice is malformed."""
    logprobs = choice["logprobs"]["token_logprobs"]
    span = VersionSpan(version=version, start=0, end=len(token_ids)) if token_ids else None
    return Completion(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(float(logprob) for logprob in logprobs),
        version_spans=() if span is None else (span,),
        finish_reason=choice["finish_reason"],
    )
