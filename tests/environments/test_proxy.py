"""The recording proxy, through the official client of OpenAI, on the embedded engine or with scripted turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.environments.moving import MovingSampler, TurnSampler
from inflight.environments.proxy.answers import Answers
from inflight.environments.proxy.requests import ChatRequest
from inflight.environments.proxy.run_server import ProxyServer
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import EndpointError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.wire import CompletionChunk, GenerateRequest
from tests.environments.proxied import (
    SETTINGS,
    Open,
    check_every_token_is_trained_once,
    episode_on,
    on_engine,
    on_script,
    opened,
    post,
    qwen,
    scripted,
    thinking_qwen,
    versions_of,
)
from tests.gates import SOON_S, BrakedServer
from tests.servers import ServerProcess

pytestmark = pytest.mark.timeout(120)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs code.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_of_several_turns_is_one_rollout_of_what_the_engine_sampled(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def play(it: Open) -> None:
        messages: list[Any] = [user("Say hello.")]
        for _ in range(3):
            answer = await it.client.chat.completions.create(
                model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
            )
            call = it.episode.recording.calls[-1]
            (choice,) = answer.choices
            assert tuple(answer.prompt_token_ids) == call.prompt_token_ids
            assert tuple(choice.token_ids) == call.completion.token_ids
            assert tuple(choice.token_logprobs) == call.completion.logprobs
            assert [span["version"] for span in choice.version_spans] == [0]
            assert [entry.logprob for entry in choice.logprobs.content] == list(call.completion.logprobs)
            assert answer.usage.completion_tokens == call.completion.num_tokens
            messages += [choice.message, user("and then?")]
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == 3
        assert versions_of(call.completion) == (0,) * call.completion.num_tokens

    on_engine(shared_server, model_dir, play)


CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call>'


def test_an_agent_with_tools_stays_in_one_rollout_though_it_writes_its_history_anew() -> None:
    async def play(it: Open) -> None:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, user("What is 6 * 7?")]
        first = await it.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will compute it.")
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("python", '{"code": "6*7"}')
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": choice.message.content}],
                "refusal": None,
                "annotations": [],
                "tool_calls": [
                    {"id": call.id, "type": "function", "function": {"arguments": '{"code":"6*7"}', "name": "python"}}
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ]
        second = await it.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 42."
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == 2

    on_script([f"I will compute it.\n{CALL}", "It is 42."], play)


def test_calls_are_told_apart_by_their_ids_in_the_whole_episode() -> None:
    async def play(it: Open) -> None:
        ids = []
        for _ in range(2):
            answer = await it.client.chat.completions.create(model="m", messages=[user("go")], tools=TOOLS)
            ids += [call.id for call in answer.choices[0].message.tool_calls or ()]
        assert len(set(ids)) == len(ids) == 3

    on_script([f"{CALL}\n{CALL}", CALL], play)


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none"])
def test_calls_stay_in_the_text_of_an_agent_that_wants_none(options: dict[str, Any]) -> None:
    async def play(it: Open) -> None:
        answer = await it.client.chat.completions.create(model="m", messages=[user("go")], **options)
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")

    on_script([CALL], play)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<think>maybe {CALL} no</think>Done.", f"<think>maybe {CALL} no</think>Done."),
        (f"<think>\n{CALL}", f"<think>\n{CALL}"),
        (f"<think>maybe {CALL}</think>\n\nSo:\n{CALL}\n", f"<think>maybe {CALL}</think>\n\nSo:"),
        ('<think>hm</think>\n{"name": "python", "parameters": {"code": "6*7"}}', "<think>hm</think>"),
    ],
    ids=["inside", "not closed", "both", "a JSON object after"],
)
@pytest.mark.parametrize("is_open", [False, True], ids=["the model opens", "the template opens"])
@pytest.mark.parametrize("streams", [False, True])
def test_tool_calls_inside_the_reasoning_are_not_returned_as_calls(
    text: str, content: str, is_open: bool, streams: bool
) -> None:
    if is_open:
        text, content = text.removeprefix("<think>"), content.removeprefix("<think>")
    num_calls = int(text != content)

    async def play(it: Open) -> None:
        options: dict[str, Any] = {"model": "m", "messages": [user("go")], "tools": TOOLS}
        (choice,) = (await it.client.chat.completions.create(**options)).choices
        assert (choice.message.content, len(choice.message.tool_calls or ())) == (content, num_calls)
        assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
        said, calls = "", 0
        async for chunk in await it.client.chat.completions.create(**options, stream=True):
            said += chunk.choices[0].delta.content or ""
            calls += len(chunk.choices[0].delta.tool_calls or ())
        assert (said, calls) == (content, num_calls)

    on_script([text, text], play, streams=streams, model=thinking_qwen if is_open else qwen)


@pytest.mark.parametrize("text", [
    "It is 42.",
    f"I will compute it.\n{CALL}",
    f"{CALL}\n{CALL}",
    " leading and trailing ",
    '{"name": "python", "parameters": {"code": "1"}}',
    "a < b and <tool_cal is not a call",
    "<tool_call>broken</tool_call> and on",
    f"\n{CALL}",
    "ends in a stop STOP and on",
    "ends in a ST",
    "naïve 🙂 text",
])  # fmt: skip
@pytest.mark.parametrize("streams", [True, False], ids=["engine streams", "engine does not"])
def test_a_streamed_answer_is_the_same_message(text: str, streams: bool) -> None:
    async def play(it: Open) -> None:
        options: dict[str, Any] = {"model": "m", "messages": [user("go")], "tools": TOOLS, "stop": ["STOP"]}
        whole = (await it.client.chat.completions.create(**options)).choices[0]
        content, reasons, roles, calls = "", [], [], []
        usage = None
        async for chunk in await it.client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasons.append(choice.finish_reason)
                roles.append(choice.delta.role)
                calls += [(call.index, call.function) for call in choice.delta.tool_calls or ()]
        assert content == (whole.message.content or "")
        assert calls == [
            (index, openai_function(call.function)) for index, call in enumerate(whole.message.tool_calls or ())
        ]
        assert reasons[-1] == whole.finish_reason
        assert set(reasons[:-1]) <= {None}
        assert roles[0] == "assistant"
        assert usage is not None
        assert usage.completion_tokens == it.episode.recording.calls[1].completion.num_tokens
        assert it.episode.recording.calls[0].completion.token_ids == it.episode.recording.calls[1].completion.token_ids

    on_script([text, text], play, streams=streams)


def openai_function(function: Any) -> Any:
    from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCallFunction

    return ChoiceDeltaToolCallFunction(name=function.name, arguments=function.arguments)


def test_a_stream_brings_the_tokens_logprobs_and_spans_of_the_record(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def play(it: Open) -> None:
        token_ids: list[int] = []
        logprobs: list[float] = []
        texts: list[str] = []
        spans = prompt = None
        stream = await it.client.chat.completions.create(
            model="m", messages=[user("Say hello.")], stream=True, extra_body={"return_token_ids": True}
        )
        async for chunk in stream:
            (choice,) = chunk.choices
            if choice.finish_reason is None:
                texts.append(choice.delta.content or "")
                token_ids += getattr(choice, "token_ids", ())
                logprobs += getattr(choice, "token_logprobs", ())
            else:
                spans, prompt = choice.version_spans, chunk.prompt_token_ids
        (call,) = it.episode.recording.calls
        assert (tuple(token_ids), tuple(logprobs)) == (call.completion.token_ids, call.completion.logprobs)
        assert spans == [{"version": 0, "start": 0, "end": call.completion.num_tokens}]
        assert tuple(prompt) == call.prompt_token_ids
        heard = it.episode.template.decode_reply(call.completion.token_ids, call.completion.finish_reason)
        assert "".join(texts) == heard.spoken

    on_engine(shared_server, model_dir, play)


def test_text_is_sent_while_the_rest_is_sampled() -> None:
    """The sampler gives its second token once the client has read the first."""
    built, template = qwen()
    token_ids = tuple(built("hello there", add_special_tokens=False)["input_ids"])
    has_read = asyncio.Event()

    async def stream(request: GenerateRequest) -> Any:
        for i, token_id in enumerate(token_ids):
            if i == 1:
                await has_read.wait()
            yield CompletionChunk(
                request_id=request.request_id,
                index=0,
                start=i,
                token_ids=(token_id,),
                logprobs=(-1.0,),
                version=3,
                finish_reason="length" if i + 1 == len(token_ids) else None,
            )

    async def run() -> None:
        async with ProxyServer("gated") as proxy:
            episode = scripted(template, proxy, lambda number, prompt: token_ids, end=built.eos_token_id)
            episode.stream = stream
            async with opened(episode) as it:
                text = ""
                async for chunk in await it.client.chat.completions.create(
                    model="m", messages=[user("go")], tools=TOOLS, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
                    if text:
                        has_read.set()
                assert text == "hello there"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_retry_and_an_edited_context_are_branches() -> None:
    async def play(it: Open) -> None:
        async def ask(messages: list[Any]) -> Any:
            answer = await it.client.chat.completions.create(model="m", messages=messages)
            return answer.choices[0].message

        start = [user("Say hello.")]
        one = await ask(start)
        two = await ask([*start, one, user("again")])
        await ask([*start, one, user("again")])  # a retry
        await ask([*start, one, user("again"), two, user("more")])  # the first try continues
        await ask([user("In short: hello was said."), two, user("more")])  # a compacted context
        rollouts = it.episode.played(1.0).rollouts(0, 1.0)
        whole = [it.episode.template.plain(rollout.completion_token_ids) for rollout in rollouts]
        assert [len(rollout.turns) for rollout in rollouts] == [2, 2, 1]  # the first turn is trained on once
        assert ["two" in text and "three" in text for text in whole] == [False, True, False]

    on_script(["one", "two", "another two", "three", "four"], play)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_and_nothing_is_recorded(
    braked_server: BrakedServer, model_dir: Path, stream: bool
) -> None:
    async def play(it: Open) -> None:
        endpoint = HttpEndpoint(braked_server.url)
        braked_server.brake.put_on()
        calling = asyncio.ensure_future(
            it.client.chat.completions.create(model="m", messages=[user("go")], stream=stream)
        )
        try:
            await until(lambda: endpoint, running=True)
            if stream:
                answer = await calling
                await answer.close()
            else:
                calling.cancel()
            await until(lambda: endpoint, running=False)
        finally:
            braked_server.brake.release()
            calling.cancel()
            await endpoint.aclose()
        assert len(it.episode.recording) == 0
        assert it.episode.error is None
        answer = await it.client.chat.completions.create(model="m", messages=[user("go")], max_tokens=3)
        assert len(it.episode.recording) == 1

    settings = SETTINGS.model_copy(update={"max_tokens": 900, "ignore_eos": True})
    on_engine(braked_server, model_dir, play, settings=settings)


def test_an_episode_whose_client_leaves_a_streamed_answer_continues() -> None:
    """As a run plays it, on an endpoint that is held after the first chunk."""
    built, template = qwen()
    reached, gate, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def says(number: int, prompt: Any) -> tuple[int, ...]:
        return (*built("some words", add_special_tokens=False)["input_ids"], built.eos_token_id)

    def give_up(error: Exception) -> None:
        raise error

    async def play(it: Open) -> None:
        answer = await it.client.chat.completions.create(model="m", messages=[user("go")], stream=True)
        await reached.wait()
        await answer.close()
        await has_ended.wait()
        again = await it.client.chat.completions.create(model="m", messages=[user("go")])
        assert again.choices[0].message.content == "some words"
        assert it.episode.error is None
        assert len(it.episode.recording) == 1

    async def run() -> None:
        async with ProxyServer("scripted") as proxy:
            episode = scripted(template, proxy, says, end=built.eos_token_id, streams=True)
            stream, moving = episode.stream, MovingSampler((EndpointError,), give_up)
            assert stream is not None

            async def held(request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
                try:
                    async for chunk in stream(request):
                        yield chunk
                        reached.set()
                        await gate.wait()
                finally:
                    await asyncio.sleep(0)  # as a connection takes a moment to be closed
                    has_ended.set()

            moving.go_to(TurnSampler(episode.generate, held))
            episode.generate, episode.stream = moving.generate, moving.stream
            async with opened(episode) as it:
                await play(it)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(endpoint: Callable[[], HttpEndpoint], *, running: bool) -> None:
    async with asyncio.timeout(SOON_S):
        while ((await endpoint().weight_version()).num_running > 0) != running:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.01)


def test_a_wrong_key_opens_nothing_and_the_key_may_be_the_api_key(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def play(it: Open) -> None:
        root = it.url.partition("/e/")[0]
        body = {"messages": [user("go")]}
        wrong = [
            await post(f"{root}/e/{it.key[:-1]}x/v1", "/v1/chat/completions", body),
            await post(root, "/v1/chat/completions", body),
            await post(root, "/v1/chat/completions", body, authorization=f"Bearer {it.key}x"),
            await post(f"{root}/e/nobody/v1", "/reward", {"reward": 1.0}),
        ]
        for answer in wrong:
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert it.key not in answer.text
        right = await post(root, "/v1/chat/completions", body, authorization=f"Bearer {it.key}")
        assert right.status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await it.client.with_options(base_url=f"{root}/v1").chat.completions.create(
                model="m", messages=[user("go")]
            )

    on_engine(shared_server, model_dir, play)


def test_a_finished_episode_answers_nobody(shared_server: ServerProcess, model_dir: Path) -> None:
    async def play(it: Open) -> None:
        waiting = asyncio.ensure_future(post(it.url, "/v1/chat/completions", {"messages": [user("go")]}))
        endpoint = HttpEndpoint(shared_server.url)
        await until(lambda: endpoint, running=True)
        await it.episode.aclose()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")
        await until(lambda: endpoint, running=False)
        await endpoint.aclose()
        assert (await post(it.url, "/v1/chat/completions", {"messages": [user("go")]})).status_code == 401
        assert len(it.episode.recording) == 0

    settings = SETTINGS.model_copy(update={"max_tokens": 900, "ignore_eos": True})
    on_engine(shared_server, model_dir, play, settings=settings)


def test_bodies_are_bounded(shared_server: ServerProcess, model_dir: Path) -> None:
    async def play(it: Open) -> None:
        answer = await post(it.url, "/v1/chat/completions", b"[" * 2_000_000)
        assert answer.status_code == 413
        assert "2000000 bytes" in answer.json()["error"]["message"]
        assert it.key not in answer.text
        assert (await post(it.url, "/reward", b" " * 100_000)).status_code == 413

    on_engine(shared_server, model_dir, play)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, ("n is '2', which is not supported", "omit it, or send 1")),
        ({"frequency_penalty": 0.5}, ("frequency_penalty", "0.5")),
        ({"response_format": {"type": "json_object"}}, ("response_format", "json_object")),
        ({"tool_choice": "sometimes", "tools": TOOLS}, ("tool_choice", "sometimes")),
        ({"reasoning_effort": "high"}, ("reasoning_effort",)),
        ({"top_logprobs": 3}, ("top_logprobs",)),
        ({"something_new": 1}, ("something_new",)),
        ({"messages": []}, ("messages",)),
        ({"messages": [{"content": "x"}]}, ("messages.0.role",)),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ("image_url",)),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,"}]}]},
            ("messages.0.content.0.image_url is 'data:image/png;base64,'", "must be an object", "{'url'"),
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ("messages.0.content.0.text is None",)),
        ({"messages": [{"role": "user", "content": ["a"]}]}, ("messages.0.content.0 is 'a'", "an object with a type")),
        ({"tool_choice": {"type": "bogus"}}, ("tool_choice: {'type': 'bogus'} is not supported",)),
        ({"tool_choice": {"type": "function"}}, ("tool_choice: {'type': 'function'} is not supported",)),
        ({"messages": [{"role": "user", "content": 7}]}, ("messages.0.content",)),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, ("messages.0.tool_calls",)),
        ({"messages": [user("\ud800")]}, ("JSON", "escape")),
        ({"stop": ""}, ("stop",)),
        ({"max_tokens": 0}, ("max_tokens: Input should be greater than or equal to 1 (got 0)",)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_change_an_answer_and_is_not_done_is_refused_by_name(
    body: dict[str, Any], words: tuple[str, ...]
) -> None:
    async def play(it: Open) -> None:
        for stream in (False, True):
            answer = await post(it.url, "/v1/chat/completions", {"messages": [user("go")], "stream": stream, **body})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            for word in words:
                assert word in error["message"], error
            assert "pydantic" not in error["message"]
        assert it.episode.error is None

    on_script([], play)


def test_fields_that_change_no_answer_are_accepted_and_the_settings_of_the_run_hold(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    async def play(it: Open) -> None:
        response = await it.client.chat.completions.with_raw_response.create(
            model="gpt-4o",
            messages=[user("go")],
            temperature=0.2,
            top_p=1.0,
            seed=7,
            n=1,
            user="u",
            store=False,
            metadata={"a": "b"},
            frequency_penalty=0,
            presence_penalty=0,
            logit_bias={},
            parallel_tool_calls=True,
            tools=TOOLS,
            tool_choice="required",
            response_format={"type": "text"},
            service_tier="auto",
            max_completion_tokens=5,
        )
        assert response.headers["x-inflight-overridden"].split(", ") == [
            "temperature=0.2 (the run uses 1)",
            "seed=7 (the run uses its own value)",
            "tool_choice=required (calls are never forced)",
        ]
        answer = response.parse()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        long = await it.client.chat.completions.create(model="m", messages=[user("go")], max_tokens=10_000)
        assert long.usage is not None
        assert long.usage.completion_tokens <= 12

    on_engine(shared_server, model_dir, play, settings=SETTINGS.model_copy(update={"ignore_eos": True}))


def test_a_full_context_has_the_code_that_agents_know(shared_server: ServerProcess, model_dir: Path) -> None:
    async def play(it: Open) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await it.client.chat.completions.create(model="m", messages=[user("x" * 100)])
        assert refused.value.code == "context_length_exceeded"
        message = refused.value.body["message"]  # type: ignore[index]
        assert message.startswith("prompt is too long: 101 tokens > 59 maximum.") and "train." not in message
        for body in ({"prompt": "x" * 60}, {"prompt": "x" * 3000}):
            error = (await post(it.url, "/v1/completions", body)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert re.match(r"prompt is too long: (more than )?\d+ tokens > 59 maximum", error["message"])
        assert it.episode.error is None
        await it.client.chat.completions.create(model="m", messages=[user("x")])

    on_engine(shared_server, model_dir, play, max_tokens=60)


def test_an_endpoint_that_fails_ends_the_episode_and_agents_do_not_try_again(model_dir: Path) -> None:
    async def run() -> None:
        endpoint = HttpEndpoint("http://127.0.0.1:9")
        async with (
            ProxyServer("gone") as proxy,
            opened(episode_on(endpoint, ChatTemplate(load_tokenizer(model_dir)), proxy)) as it,
        ):
            for stream in (False, True):
                answer = await post(it.url, "/v1/chat/completions", {"messages": [user("go")], "stream": stream})
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")
                assert answer.headers["x-should-retry"] == "false"
            assert it.episode.error is not None
        await endpoint.aclose()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_rewards_are_of_the_episode_or_of_one_answer() -> None:
    async def play(it: Open) -> None:
        messages: list[Any] = [user("go")]
        first = await it.client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, user("on")]
        await it.client.chat.completions.create(model="m", messages=messages)
        assert it.episode.posted_reward is None
        assert (await post(it.url, "/reward", {"reward": 0.5, "turn": first.id})).status_code == 200
        assert (await post(it.url, "/reward", {"reward": 2})).status_code == 200
        assert it.episode.posted_reward == 2.0
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert [turn.reward for turn in rollout.turns] == [0.5, None]
        wrong = await post(it.url, "/reward", {"reward": 1, "turn": "chatcmpl-99"})
        assert (wrong.status_code, "chatcmpl-99" in wrong.text) == (400, True)
        for reward in (b"NaN", b"1e999", b"1e308", b"-2e9", b"true", b'"1"', b"null"):
            assert (await post(it.url, "/reward", b'{"reward": %s}' % reward)).status_code == 400, reward
        assert it.episode.posted_reward == 2.0

    on_script(["one", "two"], play)


def test_each_role_has_a_url_conversations_and_a_reward_of_its_own() -> None:
    async def play(it: Open) -> None:
        messages: list[Any] = [user("go")]
        urls = {role: await it.episode.openai_url(role) for role in ("white", "black")}
        assert len({it.url, *urls.values()}) == 3
        for role, url in urls.items():
            answer = await post(url, "/v1/chat/completions", {"messages": messages})
            assert answer.json()["choices"][0]["message"]["content"] == {"white": "one", "black": "two"}[role]
        assert it.episode.posted_reward is None
        assert (await post(urls["white"], "/reward", {"reward": 1})).status_code == 200
        assert (await post(urls["black"], "/reward", {"reward": -0.5})).status_code == 200
        assert it.episode.posted_reward == 0.25
        rollouts = it.episode.played(0.25).rollouts(0, 1.0)
        assert [(rollout.role, rollout.reward) for rollout in rollouts] == [("white", 1.0), ("black", -0.5)]

    on_script(["one", "two"], play)


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "token ids"])
def test_an_empty_prompt_is_refused(shared_server: ServerProcess, model_dir: Path, prompt: Any) -> None:
    async def play(it: Open) -> None:
        with pytest.raises(openai.BadRequestError, match="prompt is empty"):
            await it.client.completions.create(model="m", prompt=prompt)

    on_engine(shared_server, model_dir, play)


@pytest.mark.parametrize("prompt", ["Once upon", list(b"Once upon")], ids=["text", "token ids"])
def test_completions_continue_texts_and_tokens(shared_server: ServerProcess, model_dir: Path, prompt: Any) -> None:
    async def play(it: Open) -> None:
        whole = await it.client.completions.create(
            model="m", prompt=prompt, max_tokens=6, logprobs=0, extra_body={"return_token_ids": True}
        )
        (call,) = it.episode.recording.calls
        assert bytes(call.prompt_token_ids) == b"Once upon"
        (choice,) = whole.choices
        assert tuple(choice.token_ids) == call.completion.token_ids
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(call.completion.logprobs)
        text = ""
        stream = await it.client.completions.create(model="m", prompt=prompt, max_tokens=6, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].text
        sampled = it.episode.recording.calls[1].completion
        assert text == it.episode.template.decode_reply(sampled.token_ids, sampled.finish_reason).spoken
        refused = await post(it.url, "/v1/completions", {"prompt": [5, 99_999]})
        assert (refused.status_code, "99999" in refused.text) == (400, True)
        assert (await post(it.url, "/v1/completions", {"prompt": ""})).status_code == 400
        assert (await post(it.url, "/v1/completions", {"prompt": ["a", "b"]})).status_code == 400
        assert (await post(it.url, "/v1/completions", {"prompt": ["a"]})).status_code == 200

    on_engine(shared_server, model_dir, play)


def test_a_text_that_goes_on_from_an_answer_keeps_its_tokens() -> None:
    async def play(it: Open) -> None:
        first = await it.client.completions.create(model="m", prompt="Thought:")
        text = "Thought:" + first.choices[0].text + "Observation: 42\nThought:"
        await it.client.completions.create(model="m", prompt=text)
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == 2

    on_script([" hello there\n", " the answer"], play, ends=False)


def test_vllms_generate_has_the_shape_that_train_clients_read(shared_server: ServerProcess, model_dir: Path) -> None:
    async def play(it: Open) -> None:
        sampling = {"stop_token_ids": [257], "logprobs": 1, "skip_special_tokens": False, "temperature": 1.0}
        body = {"model": "m", "token_ids": list(b"hello"), "sampling_params": sampling | {"max_tokens": 5}}
        answer = await post(it.url, "/inference/v1/generate", body)
        assert answer.status_code == 200, answer.text
        (call,) = it.episode.recording.calls
        (choice,) = answer.json()["choices"]
        assert tuple(choice["token_ids"]) == call.completion.token_ids
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == list(call.completion.logprobs)
        assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": call.completion.num_tokens}]
        listed = await it.client.models.list()
        assert [(model.id, model.max_model_len) for model in listed.data] == [("tiny", 1000)]
        refused = await post(it.url, "/inference/v1/generate", body | {"features": {"mm_hashes": {}}})
        assert (refused.status_code, "features" in refused.text) == (400, True)

    on_engine(shared_server, model_dir, play)


@pytest.mark.parametrize("streams", [False, True])
def test_vllms_generate_is_streamed_in_chunks_of_its_shape(
    shared_server: ServerProcess, model_dir: Path, streams: bool
) -> None:
    async def play(it: Open) -> None:
        body = {"token_ids": list(b"hello"), "sampling_params": {"logprobs": 1, "max_tokens": 5}, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        answer = await post(it.url, "/inference/v1/generate", body)
        *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        *chunks, last, usage = map(json.loads, events)
        (call,) = it.episode.recording.calls
        entries = [entry for chunk in [*chunks, last] for entry in chunk["choices"][0]["logprobs"]["content"]]
        token_ids = [token_id for chunk in [*chunks, last] for token_id in chunk["choices"][0]["token_ids"]]
        assert tuple(token_ids) == call.completion.token_ids
        assert [entry["token_id"] for entry in entries] == token_ids
        assert [entry["logprob"] for entry in entries] == list(call.completion.logprobs)
        assert len(chunks) >= 2 if streams else not chunks
        assert [*chunks, last][0]["prompt_token_ids"] == list(b"hello")
        assert last["choices"][0]["finish_reason"] == call.completion.finish_reason
        assert last["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": len(token_ids)}]
        assert usage["usage"]["completion_tokens"] == len(token_ids)

    on_engine(shared_server, model_dir, play, streams=streams)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("num_episodes", [32, pytest.param(256, marks=pytest.mark.exhaustive)])
def test_many_episodes_are_played_at_once(shared_server: ServerProcess, model_dir: Path, num_episodes: int) -> None:
    num_turns = 3

    async def run() -> None:
        template = ChatTemplate(load_tokenizer(model_dir))
        short = SETTINGS.model_copy(update={"max_tokens": 3})
        async with (
            contextlib.aclosing(HttpEndpoint(shared_server.url)) as endpoint,
            ProxyServer("tiny") as proxy,
            httpx.AsyncClient(trust_env=False, timeout=280, limits=httpx.Limits(max_connections=None)) as client,
        ):

            async def play(number: int) -> None:
                episode = episode_on(endpoint, template, proxy, settings=short, number=number)
                url = await episode.openai_url()
                messages: list[Any] = [user(f"episode {number}")]
                for turn in range(num_turns):
                    answer = await client.post(f"{url}/chat/completions", json={"messages": messages})
                    messages += [answer.json()["choices"][0]["message"], user(f"turn {turn}")]
                await episode.aclose()
                (rollout,) = episode.played(1.0).rollouts(0, 1.0)
                assert len(rollout.turns) == num_turns
                assert bytes(rollout.prompt_token_ids).decode() == f"episode {number}\n"
                check_every_token_is_trained_once(episode)

            await asyncio.gather(*map(play, range(num_episodes)))

    asyncio.run(asyncio.wait_for(run(), 300))


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_histories_clients_send_every_sampled_token_is_trained_on_once(data: st.DataObject) -> None:
    """Clients continue, try again, edit, compact, and change their tools; some answers are cut."""
    built, template = qwen()
    texts = ["yes", "no", f"so {CALL}", "<think>\nhm\n</think>\n\nit is", " spaced ", "", "42\n\n"]

    def says(number: int, prompt: Any) -> tuple[int, ...]:
        said = tuple(built(data.draw(st.sampled_from(texts)), add_special_tokens=False)["input_ids"])
        said += tuple(data.draw(st.lists(st.integers(0, 400), max_size=3)))
        return said if said and data.draw(st.booleans()) else (*said, built.eos_token_id)

    async def run() -> None:
        async with ProxyServer("scripted") as proxy:
            episode = scripted(template, proxy, says, end=built.eos_token_id, streams=data.draw(st.booleans()))
            answers = Answers(episode)
            histories: list[tuple[list[Any], Any]] = []
            for number in range(data.draw(st.integers(1, 8))):
                action = data.draw(st.sampled_from(["begin", "continue", "try again", "edit", "compact"]))
                tools = data.draw(st.sampled_from([None, TOOLS]))
                said_before, tools_before = data.draw(st.sampled_from(histories)) if histories else ([], None)
                history = list(said_before)
                if not history or action == "begin":
                    history = [user(f"begin {data.draw(st.integers(0, 1))}")]
                elif action == "continue":
                    history += [user(f"and {number}?")]
                elif action == "try again":
                    history = history[:-1]
                elif action == "edit":
                    history[-1] = history[-1] | {"content": "what I never said"}
                    history += [user("well?")]
                else:
                    history = [user("so far: nothing"), *history[len(history) // 2 :], user("well?")]
                before, num_rewritten = len(episode.recording), episode.num_rewritten
                request = ChatRequest.model_validate({"messages": history, "tools": tools})
                if data.draw(st.booleans()):
                    answer = await answers.answer(request)
                else:
                    async for part in answers.stream(request):
                        answer = part  # type: ignore[assignment]
                assert len(episode.recording) == before + 1
                assert episode.recording.calls[-1].completion == answer.completion
                if action == "continue" and said_before and tools == tools_before:
                    *earlier, last = episode.recording.calls
                    known = [(*call.prompt_token_ids, *call.completion.token_ids) for call in earlier]
                    is_continued = any(last.prompt_token_ids[: len(one)] == one for one in known)
                    assert is_continued or episode.num_rewritten > num_rewritten
                histories.append(([*history, json.loads(json.dumps(answer.message))], tools))
            check_every_token_is_trained_once(episode)

    asyncio.run(asyncio.wait_for(run(), 60))
