"""Answers to the proxy's clients: a request contains a history of messages, and its answer is a turn of one episode.

If a request begins with the messages of a conversation, it continues that conversation; otherwise it starts a new one.
An agent that edits or compacts its context therefore continues in a branch. Sampled text is never tokenized again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.contents import refuse_damaged_images, rendered_message
from inflight.environments.proxy.histories import Histories, history_of, identity
from inflight.environments.proxy.requests import (
    ChatRequest,
    CompletionRequest,
    ProxyGenerateRequest,
    Request,
    RewardRequest,
)
from inflight.environments.tools.reasoning import (
    Reasoning,
    certain_reply,
    num_reasoning_tokens,
    opens_reasoning,
    whole_reply,
)
from inflight.environments.tools.tool_calls import openai_tool_calls
from inflight.environments.transcripts import Prompt, ReplyText, Transcript
from inflight.errors import ContextFullError, InvalidRequestError
from inflight.http.chat import before_stop
from inflight.http.streamed_text import StreamedText
from inflight.types import Message, ToolCall
from inflight.wire import Completion, CompletionChunk, PromptImage, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's reply in one turn."""

    id: str
    """Identifies the turn within its episode."""
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    text: str
    """The text without special tokens and stop strings, and without any tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """The contents of the ``<think>`` tags before the text, if the client receives reasoning separately."""
    num_reasoning_tokens: int = 0
    """The number of sampled tokens in the reasoning, including its tags."""
    stop: str | None = None
    """The stop string that ended the answer, if any."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.tool_calls:
            return "tool_calls"
        return "stop" if self.completion.finish_reason == "stop" else "length"

    @property
    def message(self) -> Message:
        """The answer as a message of an OpenAI chat."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": openai_tool_calls(self.tool_calls)}


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """One streamed piece of an answer."""

    id: str
    text: str
    """Text that can no longer change and was not in an earlier piece."""
    chunk: CompletionChunk | None
    """The tokens of this piece; None if the piece only completes the text of earlier tokens."""
    reasoning: str = ""
    """Reasoning that was not in an earlier piece."""
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request, ready to be sampled."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    may_call: bool
    note: Callable[[Answer, ReplyText], None]
    """Stores the conversation up to and including an answer."""
    images: tuple[PromptImage, ...] = ()
    reasoning: Reasoning = "kept"
    is_open: bool = False
    """Whether the prompt ends with the tag that opens the reasoning."""
    model: str = ""
    """The model that the client specified, if the request was converted from another dialect; otherwise empty."""
    has_tools: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A chat request that has been answered."""

    request: ChatRequest
    answer: Answer
    history: list[bytes]
    """The conversation up to and including the answer."""
    transcript: Transcript


class Answers:
    """Answers the requests of one role of an episode, possibly several at once, and records them.

    Every method raises `InvalidRequestError` if a request cannot be rendered, `ContextFullError` if it leaves no room
    for an answer, and the errors from the endpoint, after which the episode has failed. An incomplete answer is not
    recorded.
    """

    def __init__(self, episode: PlayingEpisode, role: str = "") -> None:
        self.episode = episode
        self.role = role
        self._histories = Histories()
        self._texts: list[tuple[str, tuple[int, ...]]] = []
        """The text and tokens up to and including each answer to a plain-text prompt."""
        self._calls: dict[str, dict[str, Any]] = {}
        """The sampled tool calls, by their ids."""
        self._chat_turns: dict[str, ChatTurn] = {}
        """The chat turns, by the answer's id."""
        self._turns: dict[str, int] = {}
        """The number of each answer's turn, by the answer's id."""
        self._rendering = asyncio.Lock()
        self._num_requests = itertools.count()
        self._num_calls = itertools.count()

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request, once it is recorded."""
        asked = await self._prepare(request)
        number, completion = await self.episode.sample(asked.token_ids, self.role, asked.sampling, asked.images)
        return self._answered(asked, number, completion)

    async def stream(self, request: Request) -> AsyncGenerator[AnswerPiece | Answer, None]:
        """Yield an answer in pieces as it is sampled; the complete, recorded answer comes last."""
        asked = await self._prepare(request)
        text = StreamedText(asked.sampling.stop)
        sent = thought = ""
        num_prompt_tokens = len(asked.token_ids)
        sampling = self.episode.sample_stream(asked.token_ids, self.role, asked.sampling, asked.images)
        async with aclosing(sampling) as stream:
            async for one in stream:
                if isinstance(one, CompletionChunk):
                    said = text.add(one.token_ids, self.episode.template.plain)
                    reasoning, certain = certain_reply(
                        said, asked.reasoning, is_open=asked.is_open, may_call=asked.may_call
                    )
                    yield AnswerPiece(asked.id, certain[len(sent) :], one, reasoning[len(thought) :], num_prompt_tokens)
                    sent, thought = max(sent, certain, key=len), reasoning
                else:
                    answer = self._answered(asked, *one, sent)
                    rest, unseen = answer.text[len(sent) :], answer.reasoning[len(thought) :]
                    yield AnswerPiece(asked.id, rest, None, unseen, num_prompt_tokens)
                    yield answer

    def overridden(self, request: Request) -> str:
        """Return a description of the sampling settings of a request that differ from the episode's."""
        drawn = request.sampling_params if isinstance(request, ProxyGenerateRequest) else request
        return ", ".join(drawn.overridden(self.episode.sampling))

    def reward(self, request: RewardRequest) -> None:
        """Give a reward to the turn that the request specifies or, if it specifies none, to the role or the episode.

        Raises `InvalidRequestError` if the turn is unknown.
        """
        if request.turn is None and self.role:
            self.episode.role_rewards[self.role] = request.reward
        elif request.turn is None:
            self.episode.whole_reward = request.reward
        elif request.turn in self._turns:
            self.episode.recording.reward(self._turns[request.turn], request.reward)
        else:
            raise InvalidRequestError(f"turn {request.turn!r} is not the id of an answer of this episode")

    async def _prepare(self, request: Request) -> _PreparedRequest:
        """Return a request, rendered and tokenized in a thread.

        Raises `ContextFullError` if the prompt fills the context, so that no token of an answer fits.
        """
        asked = await self._rendered(lambda: self._asked(request))
        if len(asked.token_ids) > self._most_in_prompt:
            raise self._too_long(f"{len(asked.token_ids)}")
        return asked

    async def _rendered(self, render: Callable[[], T]) -> T:
        """Return what ``render`` returns in a thread. Requests are rendered one after another."""
        async with self._rendering:
            try:
                return await asyncio.to_thread(render)
            except ContextFullError as error:
                raise self._too_long(f"more than {self._most_in_prompt}") from error

    @property
    def _most_in_prompt(self) -> int:
        return self.episode.max_tokens - 1

    def _too_long(self, num_tokens: str) -> ContextFullError:
        # Claude Code and other clients recognise this error by the beginning of Anthropic's message.
        return ContextFullError(
            f"prompt is too long: {num_tokens} tokens > {self._most_in_prompt} maximum. The context of "
            f"{self.episode.max_tokens} tokens must also hold at least one token of the answer: shorten the messages, "
            "or start a new conversation"
        )

    def _asked(self, request: Request) -> _PreparedRequest:
        number = next(self._num_requests)
        match request:
            case ChatRequest():
                history, prompt = self._prompt(request)
                return _PreparedRequest(
                    f"{request.id_prefix}{number}",
                    prompt.token_ids,
                    request.sampling(self.episode.sampling),
                    request.may_call,
                    lambda answer, reply_text: self._note_chat(request, history, prompt, answer, reply_text),
                    prompt.images,
                    "split" if request.is_converted else "kept",
                    opens_reasoning(prompt.text),
                    (request.model or "") if request.is_converted else "",
                    bool(request.tools),
                )
            case CompletionRequest():
                before, token_ids = self._text_and_tokens(request.one_prompt)
                return _PreparedRequest(
                    f"cmpl-{number}",
                    token_ids,
                    request.sampling(self.episode.sampling),
                    False,
                    lambda answer, reply_text: self._note_text(before, answer, reply_text),
                )
            case ProxyGenerateRequest():
                asked = request.sampling_params
                self.episode.template.check_known((*request.token_ids, *(asked.stop_token_ids or ())))
                sampling = asked.sampling(self.episode.sampling)
                return _PreparedRequest(
                    f"gen-{number}", request.token_ids, sampling, False, lambda answer, reply_text: None
                )

    def _answered(self, asked: _PreparedRequest, number: int, completion: Completion, sent: str = "") -> Answer:
        """Return the answer for a recorded turn; it begins with the text that was already sent."""
        reply_text = self.episode.template.decode_reply(completion.token_ids, completion.finish_reason)
        said = before_stop(reply_text.spoken, asked.sampling.stop)
        stop = next((it for it in asked.sampling.stop if reply_text.spoken.startswith(it, len(said))), None)
        reasoning, text, calls = whole_reply(said, asked.reasoning, is_open=asked.is_open, may_call=asked.may_call)
        calls = tuple(ToolCall(f"call_{next(self._num_calls)}", call.name, call.arguments) for call in calls)
        text = text if text.startswith(sent) else sent
        num_thought = num_reasoning_tokens(completion.token_ids, self.episode.template.plain) if reasoning else 0
        answer = Answer(asked.id, asked.token_ids, completion, text, calls, reasoning, num_thought, stop)
        self.episode.recording.describe(number, model=asked.model, has_tools=asked.has_tools)
        self._turns[asked.id] = number
        asked.note(answer, reply_text)
        return answer

    # ----------------------------------------------------------------------------------------------------------- chat

    def turn(self, answer_id: str) -> ChatTurn | None:
        """Return the chat turn that ended with an answer, or None if there is none."""
        return self._chat_turns.get(answer_id)

    async def num_prompt_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens in a request's prompt. Samples and records nothing."""
        _, prompt = await self._rendered(lambda: self._prompt(request))
        return len(prompt.token_ids)

    def _prompt(self, request: ChatRequest) -> tuple[list[bytes], Prompt]:
        """Return the history of a request, and its prompt."""
        given = (
            [self._as_sampled(message) for message in request.messages] if request.is_converted else request.messages
        )
        messages = [rendered_message(message, number) for number, message in enumerate(given)]
        tools, template, most = request.tools or (), self.episode.template, self.episode.max_tokens
        history = history_of(messages, tools)
        found = self._histories.find(history)
        before = self.turn(request.continues or "")
        if before is not None and history[: len(before.history)] == before.history:
            found = before.transcript, len(before.history) - 1
        if request.is_converted and messages[-1]["role"] == "assistant" and (not found or found[1] < len(messages)):
            raise InvalidRequestError(
                "the last message is an assistant message that the model did not write: prefilling an answer is not "
                "supported"
            )
        try:
            if found is None:
                return history, template.opening(messages, tools, most)
            transcript, num_known = found
            return history, template.following(transcript, messages[num_known:], most)
        except InvalidRequestError:
            refuse_damaged_images(given)
            raise

    def _as_sampled(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its tool calls as they were sampled, because clients rewrite numbers and fields."""
        if not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._calls.get(call["id"], call) for call in message["tool_calls"]]}

    def _note_chat(
        self, request: ChatRequest, history: Sequence[bytes], prompt: Prompt, answer: Answer, reply_text: ReplyText
    ) -> None:
        self.episode.num_rewritten += prompt.rewritten is not None
        completion = answer.completion
        transcript = self.episode.template.transcript(
            prompt, completion.token_ids, completion.finish_reason, reply_text
        )
        known = [*history, identity(answer.message)]
        self._histories.add(known, transcript)
        self._chat_turns[answer.id] = ChatTurn(request, answer, known, transcript)
        self._calls |= {call["id"]: call for call in openai_tool_calls(answer.tool_calls)}

    # ------------------------------------------------------------------------------------------------------ plain text

    def _text_and_tokens(self, prompt: str | Sequence[int]) -> tuple[str | None, tuple[int, ...]]:
        """Return a prompt as text (None if it was given as tokens) and as tokens, reusing those of the answer that it
        continues.
        """
        template = self.episode.template
        if not isinstance(prompt, str):
            template.check_known(prompt)
            if not prompt:
                raise InvalidRequestError("the prompt is empty: send text or token ids")
            return None, tuple(prompt)
        known = [(text, token_ids) for text, token_ids in self._texts if prompt.startswith(text)]
        text, token_ids = max(known, key=lambda one: len(one[0]), default=("", ()))
        token_ids += template.encoded(prompt[len(text) :], self.episode.max_tokens, is_start=not token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: send text or token ids")
        return prompt, token_ids

    def _note_text(self, before: str | None, answer: Answer, reply_text: ReplyText) -> None:
        """Remember text and tokens, except for the token that ended the answer, because no client sends it back."""
        if before is not None:
            template, completion = self.episode.template, answer.completion
            is_ended = template.is_ended(completion.token_ids, completion.finish_reason)
            said = completion.token_ids[: completion.num_tokens - is_ended]
            self._texts.append((before + reply_text.raw, answer.prompt_token_ids + said))
