"""The limits of a request: the context length, the vocabulary and the memory for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidRequestError
from inflight.wire import GenerateRequest, ScoreRequest


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """The limits of an engine's requests.

    ``shortened_to_bytes`` is the size of the KV cache if it shortened the context, else None.
    """

    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    shortened_to_bytes: int | None = None

    def max_tokens_of(self, request: GenerateRequest) -> int:
        """Return the maximum number of tokens in a completion.

        Raises `InvalidRequestError` if the request does not fit.
        """
        num_prompt = len(request.prompt_token_ids)
        why = (
            f" (the number that fits in {self.shortened_to_bytes} bytes of KV cache)"
            if self.shortened_to_bytes is not None
            else ""
        )
        if num_prompt >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, but the context has only {self.max_model_len}{why}: shorten the "
                "prompt"
            )
        max_tokens = request.sampling.max_tokens or self.max_model_len - num_prompt
        if num_prompt + max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt's {num_prompt} tokens and max_tokens={max_tokens} exceed the context of "
                f"{self.max_model_len}{why}: request at most {self.max_model_len - num_prompt} tokens"
            )
        if (largest := max(request.prompt_token_ids)) >= self.vocab_size:
            raise InvalidRequestError(
                f"prompt token id {largest} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if request.sampling.stop and not self.has_tokenizer:
            raise InvalidRequestError("stop strings need a tokenizer, and this server has none; use stop_token_ids")
        return max_tokens

    def check_scored(self, request: ScoreRequest) -> None:
        """Raise `InvalidRequestError` if the request does not fit."""
        if (num_tokens := len(request.token_ids)) > self.max_model_len:
            raise InvalidRequestError(
                f"the request has {num_tokens} tokens to score, but the context has only {self.max_model_len}: "
                "shorten it"
            )
        largest = max(request.token_ids + tuple(token for row in request.candidates for token in row))
        if largest >= self.vocab_size:
            raise InvalidRequestError(f"token id {largest} is outside the vocabulary of {self.vocab_size} tokens")
