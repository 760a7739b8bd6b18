"""Chats with options that an engine's server cannot serve are refused before it renders the messages. No engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import ChatCompletionRequest, ChatMessage, ImageAddress, ImagePart
from tests.engines.labelled_servers import SERVERS, LabelledServer
from tests.engines.test_others_updates import run, served_model

IMAGE = ImagePart(type="image_url", image_url=ImageAddress(url="data:image/png;base64,AAAA"))
PICTURE = (ChatMessage(role="user", content=(IMAGE,)),)
RENDERING = {"vllm": "/v1/chat/completions/render", "sglang": "/v1/tokenize"}
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (engine, options, error, says)
    for engine in SERVERS
    for options, error, says in (
        ({"model": "another"}, InvalidRequestError, "model 'another' is not served"),
        ({"max_tokens": 100}, InvalidRequestError, "max_tokens 100 leaves no room for the messages"),
        ({"max_completion_tokens": 100}, InvalidRequestError, "max_tokens 100 leaves no room for the messages"),
        ({"messages": PICTURE}, UnsupportedError, "does not support images"),
    )
] + [
    ("vllm", {"min_p": 0.1, "top_p": 0.9}, UnsupportedError, "Set only one of them"),
    ("sglang", {"top_k": 5, "top_p": 0.9}, UnsupportedError, "Set only one of them"),
    ("sglang", {"seed": 1}, UnsupportedError, "--enable-deterministic-inference"),
]


def chat(**options: Any) -> ChatCompletionRequest:
    plain = {"model": "tiny", "messages": (ChatMessage(role="user", content="Hello"),), "max_tokens": 2}
    return ChatCompletionRequest.model_validate(plain | options)


async def streamed(client: Any, asked: ChatCompletionRequest) -> None:
    async for _ in client.chat_completion_stream(asked.model_copy(update={"stream": True})):
        pass


def server_of(engine: str, directory: Path) -> LabelledServer:
    server = SERVERS[engine](served_model(directory))
    server.rendered = [1, 2, 3]
    server.is_streamed = True
    return server


@pytest.mark.parametrize(("engine", "options", "error", "says"), REFUSED)
def test_an_option_that_the_engine_cannot_serve_is_refused_before_the_messages_are_rendered(
    engine: str, options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    server = server_of(engine, tmp_path)

    async def call(client: Any) -> None:
        for ask in (client.chat_completion(chat(**options)), streamed(client, chat(**options))):
            with pytest.raises(error, match=says):
                await ask
        assert RENDERING[engine] not in server.asked

    run(server, call)


@pytest.mark.parametrize("engine", SERVERS)
def test_logprobs_in_the_openai_shape_are_refused_in_a_stream_alone(engine: str, tmp_path: Path) -> None:
    server = server_of(engine, tmp_path)

    async def call(client: Any) -> None:
        with pytest.raises(InvalidRequestError, match="logprobs=true cannot be streamed"):
            await streamed(client, chat(logprobs=True))
        assert RENDERING[engine] not in server.asked
        await client.chat_completion(chat(logprobs=True))
        await streamed(client, chat())
        assert server.asked.count(RENDERING[engine]) == 2

    run(server, call)


def test_a_chat_stream_is_refused_before_the_messages_are_rendered_by_an_engine_that_cannot_stream(
    tmp_path: Path,
) -> None:
    server = server_of("sglang", tmp_path)
    server.is_streamed = False

    async def call(client: Any) -> None:
        with pytest.raises(UnsupportedError, match="does not support streaming"):
            await streamed(client, chat())
        assert RENDERING["sglang"] not in server.asked

    run(server, call)
