"""Fast-LLM's sample stream: one entry per rollout, read by its data ranks in turn."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from inflight.base.shortened import shortened
from inflight.base.validation import describe_problems
from inflight.dialects.fast_llm.redis_streams import RedisStreams
from inflight.errors import InvalidRequestError
from inflight.types import OBSERVED, Rollout

SAMPLES = "fast_llm_streaming"
"""The key of the stream."""
_BINARY = {"tokens": "q", "old_log_probabilities": "f", "model_version": "q"}
"""Fields that may be sent as separate little-endian binary values, and the type codes of their numbers."""


@dataclass(frozen=True, slots=True)
class Document:
    """One rollout in the form in which Fast-LLM trains on it. Sequences have one entry for each token, including those
    of the prompt.
    """

    token_ids: Sequence[int]
    loss_masking_spans: Sequence[tuple[int, int]]
    """Spans [begin, end) of the tokens that are not trained on."""
    old_logprobs: Sequence[float] | None
    """Natural logprobs; 0.0 for tokens that were not sampled. Transmitted as float32."""
    model_versions: Sequence[int] | None
    """The version that sampled each token; -1 for prompt and observation tokens."""
    advantage: float | None
    reward: float | None


def document_of(rollout: Rollout, *, advantage: float, loss_mask: Sequence[bool] | None = None) -> Document:
    """Return a rollout as a document with one advantage for all of its tokens.

    ``loss_mask`` has one entry for each completion token; None selects all sampled tokens. Raises `InvalidRequestError`
    if there is no token to train on, if the mask selects a token that was not sampled, or if a number is not finite.
    """
    if not all(map(math.isfinite, (advantage, rollout.reward, *rollout.behaviour_logprobs))):
        raise InvalidRequestError("the advantage, the reward or a logprob of this rollout is not finite")
    num_prompt, versions = len(rollout.prompt_token_ids), rollout.token_versions()
    is_sampled = [version != OBSERVED for version in versions]
    trained = is_sampled if loss_mask is None else [bool(it) for it in loss_mask]
    if len(trained) != len(versions) or any(t and not s for t, s in zip(trained, is_sampled, strict=True)):
        raise InvalidRequestError(
            f"loss_mask must have an entry for each of the {len(versions)} completion tokens, true only where a token "
            "was sampled"
        )
    if not any(trained):
        raise InvalidRequestError("this rollout has no token to train on; do not send it")
    return Document(
        token_ids=(*rollout.prompt_token_ids, *rollout.completion_token_ids),
        loss_masking_spans=_spans_of([True] * num_prompt + [not it for it in trained]),
        old_logprobs=[0.0] * num_prompt + list(rollout.behaviour_logprobs),
        model_versions=[OBSERVED] * num_prompt + versions,
        advantage=advantage,
        reward=rollout.reward,
    )


def fields_of(document: Document) -> dict[str, bytes]:
    """Return the fields of a document's entry, with binary arrays."""
    data: dict[str, Any] = {"loss_masking_spans": [list(span) for span in document.loss_masking_spans]}
    data |= {"advantage": document.advantage, "reward": document.reward}
    arrays = {
        "tokens": document.token_ids,
        "old_log_probabilities": document.old_logprobs,
        "model_version": document.model_versions,
    }
    found = {name: _to_bytes(name, values) for name, values in arrays.items() if values is not None}
    text = json.dumps({name: value for name, value in data.items() if value is not None}, allow_nan=False)
    return found | {"data": text.encode()}


class _Data(BaseModel):
    """The JSON of an entry; its lists are used for fields that have no binary values. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True)

    tokens: list[int] | None = None
    loss_masking_spans: list[tuple[int, int]] | None = None
    old_log_probabilities: list[float] | None = None
    model_version: list[int] | None = None
    advantage: float | None = None
    reward: float | None = None


def parse_document(fields: Mapping[bytes, bytes]) -> Document:
    """Return the document of an entry, which may have binary arrays or only JSON. Raises `InvalidRequestError`."""
    try:
        data = _Data.model_validate_json(fields.get(b"data", b"{}"))
        tokens, logprobs, versions = (
            _from_bytes(name, fields[name.encode()]) if name.encode() in fields else getattr(data, name)
            for name in _BINARY
        )
    except ValidationError as error:
        raise InvalidRequestError(f"a sample cannot be used: {describe_problems(error)}") from error
    except ValueError as error:
        raise InvalidRequestError(f"a sample cannot be used: {error}") from error
    spans = data.loss_masking_spans or []
    if not tokens or any(it is not None and len(it) != len(tokens) for it in (logprobs, versions)):
        raise InvalidRequestError("a sample needs tokens, and as many logprobs and versions as tokens if it has them")
    if any(not 0 <= begin < end <= len(tokens) for begin, end in spans):
        raise InvalidRequestError(f"loss_masking_spans {shortened(spans)} do not lie within the {len(tokens)} tokens")
    return Document(tokens, spans, logprobs, versions, data.advantage, data.reward)


class SampleStream:
    """Writes documents to the stream.

    Fast-LLM never removes documents that it has read. With ``max_length``, Redis removes the oldest documents beyond
    about that number, even if they have not been read.
    """

    def __init__(self, redis: RedisStreams, *, max_length: int | None = None) -> None:
        self._redis = redis
        self._max_length = max_length

    def write(self, document: Document) -> None:
        """Add a document. Raises `TransferError`."""
        self._redis.add(SAMPLES, fields_of(document), self._max_length)


def _spans_of(masked: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the spans in which ``masked`` is true."""
    spans, begin = [], 0
    for value, run in groupby(masked):
        end = begin + len(list(run))
        if value:
            spans.append((begin, end))
        begin = end
    return spans


def _to_bytes(name: str, values: Sequence[float]) -> bytes:
    numbers = array(_BINARY[name], values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _from_bytes(name: str, data: bytes) -> list[Any]:
    """Return the numbers of a field. Raises ``ValueError`` if ``data`` is not a whole number of items."""
    numbers = array(_BINARY[name])
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
