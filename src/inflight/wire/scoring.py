"""Messages of scoring: logprobs of tokens that the caller chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from inflight.wire.fields import Items, Natural, RequestId, TokenId, WireModel
from inflight.wire.generation import VersionSpan, check_spans

MAX_ALTERNATIVES = 128
"""Maximum number of most likely tokens, and of candidates, for one scored token."""


class ScoreRequest(WireModel):
    """Asks for the logprob of each token from ``start`` on, given all tokens before it.

    Earlier tokens are only context. The first token has no logprob, so ``start`` is at least 1.
    """

    request_id: RequestId
    token_ids: Items[TokenId] = Field(min_length=2)
    start: int = Field(default=1, ge=1, le=2**31 - 1)
    top_k: int = Field(default=0, ge=0, le=MAX_ALTERNATIVES)
    """How many of the most likely tokens to return for each scored token."""
    candidates: Items[Annotated[Items[TokenId], Field(max_length=MAX_ALTERNATIVES)]] = ()
    """Other tokens to score at each scored token's position; empty if there are none. All rows have the same length."""

    @model_validator(mode="after")
    def _scores_its_tokens(self) -> ScoreRequest:
        if self.start >= len(self.token_ids):
            raise ValueError(f"start is {self.start}, but there are only {len(self.token_ids)} tokens")
        if self.candidates and len(self.candidates) != self.num_scored:
            raise ValueError(f"{self.num_scored} tokens are scored, but candidates has {len(self.candidates)} rows")
        if len({len(row) for row in self.candidates}) > 1:
            raise ValueError("the rows of candidates have different lengths")
        return self

    @property
    def num_scored(self) -> int:
        """Number of tokens from ``start`` on."""
        return len(self.token_ids) - self.start

    @property
    def num_candidates(self) -> int:
        """Number of candidates of each scored token."""
        return len(self.candidates[0]) if self.candidates else 0


class ScoreResponse(WireModel):
    """The scores of the tokens ``start <= i < start + len(logprobs)`` of a request.

    All logprobs are natural logs of the softmax of the unscaled logits (temperature 1, no filters), in float32 or
    wider.
    """

    request_id: str
    start: Natural
    logprobs: Items[float]
    """The logprob of each scored token."""
    top_token_ids: Items[Items[TokenId]] = ()
    """The ``top_k`` most likely tokens at each scored token's position, in order; empty unless requested."""
    top_logprobs: Items[Items[float]] = ()
    """The logprobs of ``top_token_ids``."""
    candidate_logprobs: Items[Items[float]] = ()
    """The logprobs of the candidates, in the order of the request; empty unless requested."""
    version_spans: Items[VersionSpan]
    """The versions of the weights that scored each token; index 0 is the first scored token."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> ScoreResponse:
        num = len(self.logprobs)
        for name in ("top_token_ids", "top_logprobs", "candidate_logprobs"):
            rows: Sequence[Sequence[object]] = getattr(self, name)
            if rows and (len(rows) != num or len({len(row) for row in rows}) > 1):
                raise ValueError(f"{num} tokens are scored, but {name} has {len(rows)} rows of different lengths")
        if [len(row) for row in self.top_token_ids] != [len(row) for row in self.top_logprobs]:
            raise ValueError("top_token_ids and top_logprobs differ in shape")
        check_spans(self.version_spans, num)
        return self
