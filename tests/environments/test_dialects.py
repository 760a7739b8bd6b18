"""``/v1/messages`` and ``/v1/responses`` through the official clients of Anthropic and OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from inflight.environments.proxy import app
from inflight.errors import EndpointError
from inflight.wire import CompletionChunk, GenerateRequest
from tests.environments.proxied import Open, on_engine, on_script, post, qwen, versions_of
from tests.gates import BrakedServer
from tests.servers import ServerProcess

pytestmark = pytest.mark.timeout(120)

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call>'
ANSWERS = [f"I will compute it.{CALL}", "It is 42."]
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
MESSAGES_TOOL: Any = {"name": "python", "description": "Runs code.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "name": "python", "description": "Runs code.", "parameters": SCHEMA}


@contextlib.asynccontextmanager
async def anthropic_client(it: Open) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=it.url.removesuffix("/v1"),
        api_key="unused",
        timeout=60,
        max_retries=0,
        http_client=httpx2.AsyncClient(trust_env=False),
    ) as client:
        yield client


def check_tokens(it: Open, number: int, said: Any) -> None:
    """Check the additional fields of an answer against the record of its turn."""
    call = it.episode.recording.calls[number]
    assert tuple(said.prompt_token_ids) == call.prompt_token_ids
    assert tuple(said.token_ids) == call.completion.token_ids
    assert tuple(said.token_logprobs) == call.completion.logprobs
    assert [(it["version"], it["start"], it["end"]) for it in said.version_spans] == [
        (it.version, it.start, it.end) for it in call.completion.version_spans
    ]


def is_one_rollout(it: Open, num_turns: int) -> bool:
    (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
    return len(rollout.turns) == num_turns and it.episode.num_rewritten == 0


# ---------------------------------------------------------------------------------------------------------------
# Messages


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_anthropics_sdk_calls_a_tool_and_stays_in_one_rollout(streams: bool) -> None:
    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            settings: Any = {"model": "m", "max_tokens": 32_000, "tools": [MESSAGES_TOOL]}
            system: Any = [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;\nBe brief."},
                {"type": "text", "text": " And exact.", "cache_control": {"type": "ephemeral"}},
            ]
            history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is 6 * 7?"}]}]

            async def ask() -> Any:
                if not streams:
                    return await client.messages.create(system=system, messages=history, **settings)
                async with client.messages.stream(system=system, messages=history, **settings) as stream:
                    async for _ in stream:
                        pass
                    return await stream.get_final_message()

            first = await ask()
            assert first.stop_reason == "tool_use" and [it.type for it in first.content] == ["text", "tool_use"]
            text, call = first.content
            assert text.text == "I will compute it." and (call.name, call.input) == ("python", {"code": "6*7"})
            assert first.usage.input_tokens == len(it.episode.recording.calls[0].prompt_token_ids)
            if not streams:  # the SDK's accumulator drops what its types do not name
                check_tokens(it, 0, first)
            history.append({"role": "assistant", "content": [it.model_dump() for it in first.content]})
            history.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]}
            )
            system[0]["text"] = "x-anthropic-billing-header: cch=2;\nBe brief."
            last = await ask()
            assert last.stop_reason == "end_turn" and last.content[0].text == "It is 42."
            assert is_one_rollout(it, 2)

    on_script(ANSWERS, play, streams=streams)


def test_streamed_messages_carry_the_tokens_in_their_last_delta(shared_server: ServerProcess, model_dir: Path) -> None:
    async def play(it: Open) -> None:
        body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = await post(it.url.removesuffix("/v1"), "/v1/messages", body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names == [event["type"] for event in events]
        assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
        call = it.episode.recording.calls[0]
        assert tuple(events[-2]["token_ids"]) == call.completion.token_ids
        assert tuple(events[-2]["token_logprobs"]) == call.completion.logprobs
        assert events[-2]["usage"]["output_tokens"] == call.completion.num_tokens
        assert [span["version"] for span in events[-2]["version_spans"]] == [versions_of(call.completion)[0]]

    on_engine(shared_server, model_dir, play)


def test_a_stream_that_waits_for_the_engine_is_kept_alive(
    braked_server: BrakedServer, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_QUIET_S", 0.01)

    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            asked: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            async with client.messages.stream(**asked) as stream:
                said = await stream.get_final_message()
            assert said.usage.output_tokens == it.episode.recording.calls[0].completion.num_tokens
            answer = await post(it.url.removesuffix("/v1"), "/v1/messages", asked | {"stream": True})
        assert ": waiting\n\n" in answer.text
        assert answer.text.rstrip().endswith("}") and "message_stop" in answer.text

    with braked_server.brake:  # a step takes ten times as long
        on_engine(braked_server, model_dir, play)


def test_tokens_are_counted_and_nothing_is_recorded() -> None:
    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            asked: Any = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "What is it?"}]}
            counted = await client.messages.count_tokens(**asked)
            assert not it.episode.recording.calls
            said = await client.messages.create(max_tokens=50, **asked)
            assert counted.input_tokens == said.usage.input_tokens
            models = await client.models.list()
            assert [it.id for it in models.data] == ["scripted"]

    on_script(ANSWERS[1:], play)


def test_background_calls_are_recorded_and_not_trained_on() -> None:
    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            title = await client.messages.create(
                model="small", max_tokens=50, messages=[{"role": "user", "content": "A title for: what is 6 * 7?"}]
            )
            assert title.content[0].type == "text"
            asked: Any = {"model": "large", "max_tokens": 50, "tools": [MESSAGES_TOOL]}
            await client.messages.create(messages=[{"role": "user", "content": "What is 6 * 7?"}], **asked)
            assert len(it.episode.recording.calls) == 2
            (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
            assert tuple(rollout.completion_token_ids) == it.episode.recording.calls[1].completion.token_ids

    on_script(["Sums", "It is 42."], play, trains_on_all=False)


def test_reasoning_comes_apart_and_is_not_needed_to_continue() -> None:
    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            history: list[Any] = [{"role": "user", "content": "What is 6 * 7?"}]
            async with client.messages.stream(model="m", max_tokens=50, messages=history) as stream:
                first = await stream.get_final_message()
            assert [it.type for it in first.content] == ["thinking", "text"]
            assert first.content[0].thinking == "Six sevens." and first.content[1].text == "It is 42."
            history += [
                {"role": "assistant", "content": [first.content[1].model_dump()]},
                {"role": "user", "content": "Sure?"},
            ]
            last = await client.messages.create(model="m", max_tokens=50, messages=history)
            assert last.content[0].text == "Yes."
            transcripts = [call.prompt_token_ids for call in it.episode.recording.calls]
            assert qwen()[0].decode(transcripts[1]).count("Six sevens.") in (0, 1)

    on_script(["<think>\nSix sevens.\n</think>\n\nIt is 42.", "Yes."], play, streams=True)


def image_message(source: Any) -> dict[str, Any]:
    """Return a request with an image. Its system prompt, which is a separate field, becomes the first chat message."""
    return {"system": "s", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role is 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0 has the type"),
        ({"system": [{"type": "image"}]}, "only text blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content is [], which contains nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "contains nothing for the model to see"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is None"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "must have an id and a name"),
        (
            image_message({"type": "file", "file_id": "x"}),
            "messages.0.content.0.source is {'type': 'file', 'file_id': 'x'}, but must have the type 'base64'",
        ),
        (image_message({"type": "url", "url": "http://a/b.png"}), "messages.0.content.0.source.url cannot be used"),
        (
            image_message({"type": "base64", "media_type": "image/gif", "data": ""}),
            "messages.0.content.0.source cannot be used: url: only data URLs of PNG",
        ),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1 (got 0)"),
        ({"tool_choice": {"type": "bogus"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice has the type 'tool', but no name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name is None"),
    ],
)
def test_what_messages_cannot_be_is_refused_in_anthropics_shape(change: dict[str, Any], says: str) -> None:
    async def play(it: Open) -> None:
        body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **change}
        answer = await post(it.url.removesuffix("/v1"), "/v1/messages", body)
        assert answer.status_code == 400
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert says in error["error"]["message"], error

    on_script([], play)


@pytest.mark.parametrize("length", [5000, 200_000])
def test_a_full_context_is_reported_in_the_words_of_anthropics_message(length: int) -> None:
    async def play(it: Open) -> None:
        async with anthropic_client(it) as client:
            long: Any = [{"role": "user", "content": "x" * length}]
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(model="m", max_tokens=5, messages=long)
        error = refused.value.body["error"]  # type: ignore[index]
        assert error["type"] == "invalid_request_error"
        words = r"prompt is too long[^0-9]*(\d+) tokens? > 3999 maximum"  # as clients read it
        found = re.match(words, error["message"])
        assert found and int(found[1]) >= 3999 and "train." not in error["message"]

    on_script([], play)


def test_a_key_that_names_no_episode_is_an_authentication_error() -> None:
    async def play(it: Open) -> None:
        base = it.url.removesuffix(f"/e/{it.key}/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="does not belong to an episode"):
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
        async with anthropic.AsyncAnthropic(base_url=base, api_key=it.key, max_retries=0) as client:
            said = await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            assert said.content[0].type == "text"

    on_script(ANSWERS[1:], play)


# ---------------------------------------------------------------------------------------------------------------
# Responses


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_an_agent_of_openais_sdk_calls_a_tool_by_responses_and_stays_in_one_rollout(streams: bool, by_id: bool) -> None:
    async def play(it: Open) -> None:
        settings: Any = {"model": "m", "tools": [RESPONSES_TOOL], "instructions": "Be brief.", "store": False}

        async def ask(given: Any, **more: Any) -> Any:
            if not streams:
                return await it.client.responses.create(input=given, **settings, **more)
            async with it.client.responses.stream(input=given, **settings, **more) as stream:
                seen = [event async for event in stream]
                assert [event.sequence_number for event in seen] == list(range(len(seen)))
                return await stream.get_final_response()

        first = await ask("What is 6 * 7?")
        assert first.status == "completed" and [it.type for it in first.output] == ["message", "function_call"]
        assert first.output_text == "I will compute it."
        call = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("python", {"code": "6*7"})
        check_tokens(it, 0, first)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        if by_id:
            last = await ask([result], previous_response_id=first.id)
        else:
            echoed = [it.model_dump(exclude_none=True) for it in first.output]
            last = await ask([{"role": "user", "content": "What is 6 * 7?"}, *echoed, result])
        assert last.output_text == "It is 42."
        check_tokens(it, 1, last)
        assert is_one_rollout(it, 2)

    on_script(ANSWERS, play, streams=streams)


def test_custom_tools_and_the_local_shell_get_calls_of_their_own_kinds() -> None:
    async def play(it: Open) -> None:
        inner = {"type": "function", "name": "spawn", "parameters": SCHEMA}
        tools: Any = [
            {"type": "custom", "name": "apply_patch"},
            {"type": "local_shell"},
            {"type": "web_search"},
            {"type": "namespace", "name": "agents", "tools": [inner]},
        ]
        asked = await it.client.responses.create(model="m", input="Patch it.", tools=tools)
        patch, shell, spawn = asked.output
        assert spawn.type == "function_call" and (spawn.name, spawn.namespace) == ("spawn", "agents")
        assert patch.type == "custom_tool_call" and patch.input == "*** Begin"
        assert shell.type == "local_shell_call" and shell.action.command == ["ls"]
        given: Any = [
            {"role": "user", "content": "Patch it."},
            *(it.model_dump(exclude_none=True) for it in asked.output),
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
            {"type": "local_shell_call_output", "call_id": shell.call_id, "output": "a b"},
            {"type": "function_call_output", "call_id": spawn.call_id, "output": "spawned"},
        ]
        last = await it.client.responses.create(model="m", input=given, tools=tools)
        assert last.output_text == "Done." and is_one_rollout(it, 2)

    calls = [{"name": "apply_patch", "arguments": {"input": "*** Begin"}}]
    calls.append({"name": "local_shell", "arguments": {"command": ["ls"]}})
    calls.append({"name": "spawn", "arguments": {"code": "1"}})
    on_script(["\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls), "Done."], play)


def test_an_answer_that_is_cut_is_incomplete_and_reasoning_is_an_item() -> None:
    async def play(it: Open) -> None:
        asked = await it.client.responses.create(model="m", input="What is 6 * 7?")
        assert [it.type for it in asked.output] == ["reasoning", "message"]
        assert asked.status == "incomplete" and asked.incomplete_details is not None
        assert asked.incomplete_details.reason == "max_output_tokens"
        assert asked.output[1].status == "incomplete"
        async with it.client.responses.stream(model="m", input="And 6 * 8?") as stream:
            events = [event async for event in stream]
            kinds = [event.type for event in events]
            assert "response.reasoning_summary_text.delta" in kinds and kinds[-1] == "response.incomplete"
            dones = [event.item for event in events if event.type == "response.output_item.done"]
            assert [getattr(item, "status", None) for item in dones] == [None, "incomplete"]
            assert events[-1].type == "response.incomplete" and events[-1].response.output[1].status == "incomplete"

    on_script(["<think>Six sevens.</think>It is", "<think>Six eights.</think>It is"], play, streams=True, ends=False)


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_states_the_values_in_force(streams: bool) -> None:
    async def play(it: Open) -> None:
        asked: Any = {"model": "m", "input": "hi", "temperature": 0.1, "top_p": 0.5, "truncation": "auto"}
        asked |= {"parallel_tool_calls": False, "metadata": {"a": "b"}, "store": False, "max_output_tokens": 900}
        asked |= {"tools": [RESPONSES_TOOL], "tool_choice": "required", "reasoning": {"effort": "low"}}
        if streams:
            async with it.client.responses.stream(**asked) as stream:
                said = await stream.get_final_response()
        else:
            said = await it.client.responses.create(**asked)
        assert (said.temperature, said.top_p, said.max_output_tokens) == (1.0, 1.0, 200)
        assert (said.truncation, said.parallel_tool_calls, said.tool_choice) == ("disabled", True, "auto")
        assert (said.metadata, getattr(said, "store", None)) == ({"a": "b"}, True)
        thought = qwen()[0].decode(said.token_ids[: said.usage.output_tokens_details.reasoning_tokens])
        assert thought.startswith("<think>abc</think>") and len(thought) < len("<think>abc</think>x y z")
        plain = await it.client.responses.create(model="m", input="hi", max_output_tokens=7)
        assert (plain.max_output_tokens, plain.metadata) == (7, {})
        assert plain.usage is not None and plain.usage.output_tokens_details.reasoning_tokens == 0

    on_script(["<think>abc</think>x y z", "x"], play, streams=streams)


def failing(has_begun: asyncio.Event, texts: Sequence[str]) -> Any:
    """Return a stream that yields the tokens of these texts, and fails after them once the event is set."""

    async def stream(request: GenerateRequest) -> Any:
        token_ids = [qwen()[0](text, add_special_tokens=False)["input_ids"] for text in texts]
        for start, token_id in enumerate(itertools.chain(*token_ids)):
            yield CompletionChunk(
                request_id=request.request_id,
                index=0,
                start=start,
                token_ids=(token_id,),
                logprobs=(-1.0,),
                version=3,
                finish_reason=None,
            )
        await has_begun.wait()
        raise EndpointError("the engine is gone")

    return stream


@pytest.mark.parametrize("texts", [[], ["<think>hm", "</think>", "It is"]], ids=["before the answer", "within it"])
def test_a_failed_response_has_its_id_and_the_output_so_far(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_QUIET_S", 0.01)

    async def play(it: Open) -> None:
        has_begun = asyncio.Event()
        it.episode.stream = failing(has_begun, texts)
        asked = {"model": "m", "input": "hi", "stream": True}
        events = []
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("POST", f"{it.url}/responses", json=asked) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith(":"):
                    has_begun.set()
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.failed"]
        ids = {event["response"]["id"] for event in events if "response" in event}
        assert len(ids) == 1 and min(ids).startswith("resp_")
        failed = events[-1]["response"]
        assert failed["error"]["message"] == "the engine is gone"
        said = [(item["type"], item.get("status")) for item in failed["output"]]
        assert said == ([("reasoning", None), ("message", "incomplete")] if texts else [])
        if texts:
            assert failed["output"][1]["content"][0]["text"] == "It is"

    on_script([], play, streams=True)


def image_input(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **part}]}]}


@pytest.mark.parametrize("choice", [
    "auto",
    {"type": "function", "name": "python"},
    {"type": "allowed_tools", "mode": "auto", "tools": []},
    {"type": "web_search_preview"},
], ids=str)  # fmt: skip
def test_tool_choices_of_the_responses_api_are_accepted_and_reported(choice: Any) -> None:
    async def play(it: Open) -> None:
        body = {"model": "m", "input": "hi", "tools": [RESPONSES_TOOL], "tool_choice": choice}
        answer = await post(it.url.removesuffix("/v1"), "/v1/responses", body)
        assert answer.status_code == 200, answer.text
        assert ("tool_choice" in answer.headers.get("x-inflight-overridden", "")) == (choice != "auto")

    on_script(["ok"], play)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"previous_response_id": "resp_9"}, "'resp_9' is not the id of an answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0 has the type 'item_reference'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"input": []}, "input has no messages"),
        ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater than or equal to 1 (got 0)"),
        ({"tool_choice": {"type": "bogus"}}, "tool_choice: {'type': 'bogus'} is not supported"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: {'type': 'function'} is not supported"),
        ({"instructions": "s", **image_input({"image_url": "http://a"})}, "input.0.content.0.image_url cannot be used"),
        (image_input({"file_id": "x"}), "input.0.content.0.image_url is None, but must be a string with a data URL"),
        (image_input({"type": "input_text"}), "input.0.content.0.text is None, but must be a string"),
        ({"conversation": "x"}, "conversation"),
    ],
)
def test_what_responses_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    async def play(it: Open) -> None:
        answer = await post(it.url.removesuffix("/v1"), "/v1/responses", {"model": "m", "input": "hi", **change})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]

    on_script([], play)


# ---------------------------------------------------------------------------------------------------------------
# What clients and models do that is unusual


def tool_call(arguments: str, name: str = "python") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def messages(it: Open, **body: Any) -> httpx.Response:
    asked = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **body}
    return await post(it.url.removesuffix("/v1"), "/v1/messages", asked)


@pytest.mark.parametrize("arguments", ['{"code": "\\ud83d"}', '{"code": NaN}', '{"code": 1e999}'])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_json_cannot_carry_stays_text(arguments: str, streams: bool) -> None:
    async def play(it: Open) -> None:
        answer = await messages(it, tools=[MESSAGES_TOOL], stream=streams)
        assert answer.status_code == 200 and "<tool_call>" in answer.text and "tool_use" not in answer.text
        said = await it.client.responses.create(model="m", input="hi", tools=[RESPONSES_TOOL])
        assert [it.type for it in said.output] == ["message"]

    on_script([tool_call(arguments)] * 2, play, streams=streams)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_of_reasoning_alone_has_a_message_and_continues(streams: bool) -> None:
    async def play(it: Open) -> None:
        user = {"role": "user", "content": "hi"}
        if streams:
            async with it.client.responses.stream(model="m", input=[user]) as stream:
                first = await stream.get_final_response()
        else:
            first = await it.client.responses.create(model="m", input=[user])
        assert [it.type for it in first.output] == ["reasoning", "message"]
        echoed = [it.model_dump(exclude_none=True) for it in first.output]
        await it.client.responses.create(model="m", input=[user, *echoed, user])
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == 2

    on_script(["<think>hm</think>", "Done"], play, streams=streams)


def test_a_response_id_names_one_of_two_equal_answers() -> None:
    async def play(it: Open) -> None:
        first = await it.client.responses.create(model="m", input="q")
        await it.client.responses.create(model="m", input="q")
        await it.client.responses.create(model="m", input="sure?", previous_response_id=first.id)
        calls = it.episode.recording.calls
        start = len(calls[0].prompt_token_ids)
        assert calls[2].prompt_token_ids[start:][: calls[0].completion.num_tokens] == calls[0].completion.token_ids

    on_script(["<think>one</think>Yes", "<think>two</think>Yes", "ok"], play)


def test_a_call_is_recognised_by_its_id_however_the_client_writes_its_arguments() -> None:
    async def play(it: Open) -> None:
        first = (await messages(it, tools=[MESSAGES_TOOL])).json()
        (call,) = first["content"]
        assert call["input"] == {"x": 1.0, "y": 100.0, "z": 2**60}
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call | {"input": {"x": 1, "y": 100, "z": float(2**60)}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "1"}]},
        ]
        await messages(it, tools=[MESSAGES_TOOL], messages=history)
        assert is_one_rollout(it, 2)

    on_script([tool_call(f'{{"x": 1.0, "y": 1e2, "z": {2**60}}}'), "ok"], play)


def test_parallel_calls_are_one_answer_in_whatever_order_their_outputs_come() -> None:
    async def play(it: Open) -> None:
        user: Any = {"role": "user", "content": "hi"}
        tools: Any = [RESPONSES_TOOL, {"type": "local_shell"}]
        first = await it.client.responses.create(model="m", input=[user], tools=tools)
        python, shell = first.output
        assert shell.type == "local_shell_call" and shell.action.timeout_ms == 1000
        given = [
            user,
            python.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": python.call_id, "output": "1"},
            shell.model_dump(exclude_none=True),
            {"type": "local_shell_call_output", "call_id": shell.call_id, "output": "a"},
        ]
        await it.client.responses.create(model="m", input=given, tools=tools)
        assert is_one_rollout(it, 2)

    calls = [tool_call('{"code": "1"}'), tool_call('{"command": ["ls"], "timeout_ms": 1000}', "local_shell")]
    on_script(["\n".join(calls), "ok"], play)


def test_answers_that_were_cut_are_continued_one_by_one() -> None:
    async def play(it: Open) -> None:
        given: list[Any] = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            said = await it.client.responses.create(model="m", input=given, tools=[RESPONSES_TOOL])
            assert said.status == "incomplete"
            given += [it.model_dump(exclude_none=True) for it in said.output]
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == 3

    on_script(["one", "two", tool_call('{"code": "1"}') + "\n<tool_call>"], play, ends=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text": {"format": "text"}}, "text.format"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input.0.content.0 has the type '[]'"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content is a int"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": 5}]}, "'function_call'"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": ["x"]}]}, "tools.0.tools.0 is 'x'"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 5}]}, "tools.0.tools is a int"),
        ({"tools": [{"type": "function", "name": ["x"]}]}, "tools.0 is"),
        ({"tools": [{"type": "apply_patch"}]}, "tools.0 is"),
        ({"tools": [RESPONSES_TOOL, {"type": "namespace", "name": "a", "tools": [RESPONSES_TOOL]}]}, "'python'"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"x": float("nan")}}]}, "not finite"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}, "did not write"),
    ],
)
def test_responses_of_wrong_types_are_refused(change: dict[str, Any], says: str) -> None:
    async def play(it: Open) -> None:
        answer = await post(it.url.removesuffix("/v1"), "/v1/responses", {"model": "m", "input": "hi", **change})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text

    on_script([], play)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tools": [{"type": "memory_20250818", "name": "memory"}]}, "'memory_20250818', which is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}, "did not write"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is None"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "image", "source": {"type": "url", "url": "data:image/png;base64,"}}],
                    }
                ]
            },
            "contains an image",
        ),
    ],
)
def test_messages_that_would_mean_something_else_are_refused(change: dict[str, Any], says: str) -> None:
    async def play(it: Open) -> None:
        answer = await messages(it, **change)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text

    on_script([], play)


def test_errors_have_the_shape_of_their_api_whatever_fails() -> None:
    async def play(it: Open) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{it.url}/messages")).json()["type"] == "error"
            assert "type" not in (await client.get(f"{it.url}/nothing")).json()

    on_script([], play)


# ---------------------------------------------------------------------------------------------------------------
# The example that calls all three


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_the_program_of_the_tool_task_plays_by_each_api(api: str) -> None:
    item = {"prompt": "Look in the hall.", "places": {"hall": "go to the well", "well": "blue"}, "answer": "blue"}
    calls = [
        f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'at': place}})}\n</tool_call>"
        for place in item["places"]
    ]

    async def play(it: Open) -> None:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parents[2] / "examples" / "tool_agent.py"),
            api,
            env={
                "OPENAI_BASE_URL": it.url,
                "OPENAI_API_KEY": it.key,
                "ANTHROPIC_BASE_URL": it.url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": it.key,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(program.communicate(json.dumps(item).encode() + b"\n"), 60)
        assert json.loads(said) == {"reward": 1.0}
        assert is_one_rollout(it, 3)

    on_script([*calls, "blue"], play)
