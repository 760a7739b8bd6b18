"""Chat with a tokenizer in this process: its template renders messages, and it decodes completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import ContextFullError, InvalidRequestError
from inflight.http.chat import generate_request_of
from inflight.model.images import ImageProcessor, as_parts, image_urls_of, text_of
from inflight.model.long_texts import tokenise
from inflight.wire import ChatCompletionRequest, GenerateRequest


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A Hugging Face tokenizer with a chat template. ``images`` is None if the model does not accept images."""

    tokenizer: Any
    max_model_len: int
    images: ImageProcessor | None = None

    def render(self, request: ChatCompletionRequest) -> GenerateRequest:
        """Return the request with the messages as token ids.

        Raises `InvalidRequestError` if the template refuses the messages, or if they do not fit into the context.
        """
        messages = [message.model_dump() for message in request.messages]
        urls = image_urls_of(messages)
        if self.images is None:
            messages = [{**message, "content": text_of(message)} for message in messages]
        else:
            messages = [dict(as_parts(message)) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        try:
            token_ids = tokenise(self.tokenizer, text, self.max_model_len)
        except ContextFullError as error:
            raise InvalidRequestError(str(error)) from error
        if not urls:
            return generate_request_of(request, token_ids)
        assert self.images is not None
        return generate_request_of(request, *self.images.placed(token_ids, urls))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def streamed_text(self, token_ids: Sequence[int]) -> str:
        """Return `text`. Serves as the decoder for `inflight.http.streamed_text.chat_chunks_of`."""
        return self.text(token_ids)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in token_ids]
