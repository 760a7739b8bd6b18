"""Chat over SGLang's own tokenizer: its routes render messages to token ids and decode token ids to text."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engines.routes import EngineRoutes, words_of
from inflight.errors import InvalidRequestError
from inflight.wire import ChatCompletionRequest


async def rendered(routes: EngineRoutes, request: ChatCompletionRequest) -> list[int]:
    """Return the token ids of the messages behind the model's template. Raises `InvalidRequestError` if it refuses."""
    body = request.model_dump(include={"model", "messages"})
    status, answer = await routes.ask("POST", "/v1/tokenize", body)
    if status != 200:
        raise InvalidRequestError(f"SGLang refused the messages: {words_of(answer)}")
    return list(answer["tokens"])


async def decoded(
    routes: EngineRoutes, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the text of each of these; SGLang decodes no empty ones."""
    asked = [list(ids) for ids in token_ids if ids]
    if not asked:
        return [""] * len(token_ids)
    answer = await routes.post("/v1/detokenize", {"tokens": asked, "skip_special_tokens": skip_special_tokens})
    texts = iter(answer["text"])
    return [str(next(texts)) if ids else "" for ids in token_ids]
