"""Conversations as token ids. Sampled tokens are kept unchanged; only new text is rendered and tokenized.

A chat template converts messages to text. As long as it renders the conversation so far exactly as it was sent and
sampled, the next prompt consists of the ids so far, followed by the ids of the text that the template adds. If it would
render the history differently (it drops reasoning, trims white space, or ends a turn with a different token), the
conversation continues from a fresh rendering, and the reason is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.environments.tools.reasoning import opens_reasoning, whole_reply
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.model.images import ImageProcessor, as_parts, image_urls_of, refuse_images, text_of
from inflight.model.long_texts import tokenise
from inflight.types import Message, Tool, ToolCall
from inflight.wire import PromptImage


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one turn."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    text: str
    """The conversation as the template renders it, up to where the reply begins."""
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()
    """The images of the whole conversation, with indices into ``token_ids``."""
    rewritten: str | None = None
    """Why the prompt does not begin with the conversation's tokens so far; None if it does, or if it is the first
    prompt.
    """


@dataclass(frozen=True, slots=True)
class ReplyText:
    """A reply as text: what the next rendering must contain, and what environments and clients see."""

    raw: str
    """The whole sampled text, without the token that ended the turn."""
    spoken: str
    """The text without special tokens."""
    text: str
    """The text without special tokens and tool calls."""
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation up to the end of a reply."""

    messages: tuple[Message, ...]
    """The messages, the last of which is the reply, as it was sampled."""
    tools: tuple[Tool, ...]
    text: str
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]
    is_ended: bool
    """Whether the last token ended the turn; if not, the reply was cut off."""


class ChatTemplate:
    """Renders messages with a Hugging Face tokenizer.

    A tokenizer without a chat template supports only a single user message, as plain text. ``images`` is the processor
    of a model that accepts images. If it is None, a message that contains an image raises `UnsupportedError`.
    """

    def __init__(self, tokenizer: Any, images: ImageProcessor | None = None) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._special_ids = frozenset(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    @property
    def takes_images(self) -> bool:
        return self._images is not None

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = (), max_tokens: int | None = None) -> Prompt:
        """Return the prompt of a new conversation.

        Raises `InvalidRequestError` if the template refuses a message, or if a text cannot fit in ``max_tokens``.
        """
        text = self._render(messages, tools)
        token_ids, images = self._placed(self._encode(text, max_tokens, is_start=True), messages)
        return Prompt(tuple(messages), tuple(tools), text, token_ids, images)

    def following(self, before: Transcript, messages: Sequence[Message], max_tokens: int | None = None) -> Prompt:
        """Return the prompt that continues a conversation with further messages.

        Raises the same errors as `opening`.
        """
        everything = (*before.messages, *messages)
        text = self._render(everything, before.tools)
        if not text.startswith(before.text):
            return self._fresh(everything, before, text, _difference(before.text, text), max_tokens)
        added = self._encode(text[len(before.text) :], max_tokens, is_start=False)
        if before.is_ended:
            if added[:1] != before.token_ids[-1:]:
                ended = self._decoded([before.token_ids[-1]])
                why = f"the template does not end the turn with {ended!r}"
                return self._fresh(everything, before, text, why, max_tokens)
            added = added[1:]
        added, images = self._placed(added, messages, start=len(before.token_ids))
        return Prompt(everything, before.tools, text, before.token_ids + added, before.images + images)

    def decode_reply(self, token_ids: Sequence[int], finish_reason: str, *, is_open: bool = False) -> ReplyText:
        """Return the text of sampled tokens, and the tool calls after any reasoning.

        ``is_open`` states that the prompt already ends with the tag that opens the reasoning.
        """
        is_ended = self.is_ended(token_ids, finish_reason)
        spoken = list(token_ids[:-1] if is_ended else token_ids)
        raw = self._decoded(spoken)
        plain = raw if self._special_ids.isdisjoint(spoken) else self.plain(spoken)
        _, text, calls = whole_reply(plain, "kept", is_open=is_open, may_call=True)
        return ReplyText(raw, plain, text, calls)

    def plain(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._decoded(token_ids, without_special=True)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, decoded separately."""
        return [self._decoded([token_id]) for token_id in token_ids]

    def encoded(self, text: str, max_tokens: int, *, is_start: bool) -> tuple[int, ...]:
        """Return the tokens of plain text, at the start of a stream or after other tokens.

        Raises the same errors as `opening`.
        """
        return self._encode(text, max_tokens, is_start=is_start)

    def check_known(self, token_ids: Sequence[int]) -> None:
        """Raise `InvalidRequestError` unless the tokenizer knows all of these tokens."""
        num_known = len(self._tokenizer)
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < num_known), None)
        if unknown is not None:
            raise InvalidRequestError(f"token id {unknown} is outside the tokenizer's range 0 to {num_known - 1}")

    def transcript(
        self, prompt: Prompt, token_ids: Sequence[int], finish_reason: str, reply_text: ReplyText | None = None
    ) -> Transcript:
        """Return the conversation after a reply to a prompt. Pass ``reply_text`` if it is already decoded."""
        reply_text = reply_text or self.decode_reply(token_ids, finish_reason, is_open=opens_reasoning(prompt.text))
        return Transcript(
            messages=(*prompt.messages, {"role": "assistant", "content": reply_text.raw}),
            tools=prompt.tools,
            text=prompt.text + reply_text.raw,
            token_ids=prompt.token_ids + tuple(token_ids),
            images=prompt.images,
            is_ended=self.is_ended(token_ids, finish_reason),
        )

    def is_ended(self, token_ids: Sequence[int], finish_reason: str) -> bool:
        """Return whether the last token ended the turn, and is therefore not part of the reply."""
        return finish_reason == "stop" and len(token_ids) > 0 and token_ids[-1] in self._special_ids

    def _fresh(
        self, messages: tuple[Message, ...], before: Transcript, text: str, why: str, max_tokens: int | None
    ) -> Prompt:
        token_ids, images = self._placed(self._encode(text, max_tokens, is_start=True), messages)
        return Prompt(messages, before.tools, text, token_ids, images, why)

    def _placed(
        self, token_ids: tuple[int, ...], messages: Sequence[Message], start: int = 0
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the tokens of rendered messages, with the placeholders of images expanded, and the images."""
        urls = image_urls_of(messages)
        if not urls:
            return token_ids, ()
        assert self._images is not None  # `_render` has refused the messages otherwise
        return self._images.placed(token_ids, urls, start)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        if self._images is None:
            refuse_images(messages)
            messages = [{**message, "content": text_of(message)} for message in messages]
        else:
            messages = [as_parts(message) for message in messages]
        if not self._tokenizer.chat_template:
            if len(messages) != 1 or tools:
                raise UnsupportedError(
                    f"the tokenizer has no chat template, which a conversation with {len(messages)} messages and "
                    f"{len(tools)} tools requires: add chat_template.jinja to the model"
                )
            return str(messages[0]["content"])
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[tool if callable(tool) else dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:  # templates may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _encode(self, text: str, max_tokens: int | None, *, is_start: bool) -> tuple[int, ...]:
        """Return the tokens of a text from the template, which already contains its special tokens.

        Some tokenizers prepend a space to every text. With these, a continuation is encoded after a special token.
        """
        special = is_start and not self._tokenizer.chat_template
        token_ids = tuple(tokenise(self._tokenizer, text, max_tokens, add_special_tokens=special))
        anchor = self._tokenizer.eos_token
        if is_start or not text or anchor is None or self._is_text_of(token_ids, text):
            return token_ids
        behind = tuple(tokenise(self._tokenizer, anchor + text, max_tokens))
        return behind[1:] if behind[:1] == (self._tokenizer.eos_token_id,) else token_ids

    def _is_text_of(self, token_ids: Sequence[int], text: str) -> bool:
        return self._decoded(token_ids) == text

    def _decoded(self, token_ids: Sequence[int], *, without_special: bool = False) -> str:
        """Return the exact text of tokens, without the clean-up of spaces that some tokenizers do."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=without_special, clean_up_tokenization_spaces=False
            )
        )


def _difference(before: str, now: str) -> str:
    """Return a description of where the template renders the history differently."""
    at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    return f"the template rewrites the history: {before[at : at + 40]!r} became {now[at : at + 40]!r}"
