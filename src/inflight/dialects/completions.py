"""OpenAI completions of token ids, as vLLM and what is built on it take and answer them. Says nothing of versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.errors import UnsupportedError
from inflight.wire import Completion, GenerateRequest, VersionSpan

ROUTE = "/v1/completions"
TOKEN_PREFIX = "token_id:"
"""How the text of a token begins where its id takes the text's place."""


def body_of(request: GenerateRequest, *, model: str, room: int) -> dict[str, Any]:
    """Return the body that asks for one completion; ``room`` is the number of tokens that fit after the prompt.

    Everything that changes the distribution is said, so that no default of the server applies. Raises
    `UnsupportedError` for filters in another order than the server's.
    """
    asked = request.sampling
    if asked.min_p > 0 and asked.top_p < 1:
        raise UnsupportedError("min_p together with top_p: vLLM applies min-p first, the contract last")
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
    """Return the ids that stand in the place of texts. Raises ``ValueError``."""
    if any(not token.startswith(TOKEN_PREFIX) for token in tokens):
        raise ValueError("texts of tokens, not their ids: start the server with --return-tokens-as-token-ids")
    return [int(token.removeprefix(TOKEN_PREFIX)) for token in tokens]


def completion_of(choice: Mapping[str, Any], token_ids: Sequence[int], index: int, version: int) -> Completion:
    """Return a choice of the answer, all of whose tokens ``version`` sampled. Raises what a malformed one raises."""
    logprobs = choice["logprobs"]["token_logprobs"]
    span = VersionSpan(version=version, start=0, end=len(token_ids)) if token_ids else None
    return Completion(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(float(logprob) for logprob in logprobs),
        version_spans=() if span is None else (span,),
        finish_reason=choice["finish_reason"],
    )
