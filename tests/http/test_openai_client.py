"""Chat completions through the openai package, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inflight.wire import ChatCompletion
from tests.engine.reference import assert_close, forward_logprobs, load_reference
from tests.servers import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def client(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1",
        api_key="unused",
        timeout=60,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client


def test_a_chat_completion_has_the_openai_shape_and_the_facts(client: openai.OpenAI, model_dir: Path) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, max_tokens=20, temperature=0.8, seed=4, logprobs=True
    )
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    facts = ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
    assert bytes(facts.prompt_token_ids) == b"Say hello.\n"
    num_tokens = sum(len(choice.token_ids) for choice in facts.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, num_tokens)
    assert answer.usage.total_tokens == 11 + num_tokens
    model = load_reference(model_dir)
    for choice, fact in zip(answer.choices, facts.choices, strict=True):
        assert choice.message.role == "assistant"
        assert choice.finish_reason == fact.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.logprob for entry in choice.logprobs.content] == list(fact.token_logprobs)
        assert_close(fact.token_logprobs, forward_logprobs(model, facts.prompt_token_ids, fact.token_ids, 0.8))


def test_a_seed_repeats_a_chat_and_streams_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "n": 2, "max_tokens": 60, "seed": 11}
    first = client.chat.completions.create(**options)
    second = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.message.content for choice in second.choices] == texts
    streamed, roles, reasons = ["", ""], [[], []], [[], []]
    for chunk in client.chat.completions.create(**options, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
            reasons[choice.index].append(choice.finish_reason)
    assert streamed == texts
    for index in (0, 1):
        assert roles[index] == ["assistant"] + [None] * (len(roles[index]) - 1)
        assert reasons[index] == [None] * (len(reasons[index]) - 1) + [first.choices[index].finish_reason]


@pytest.mark.parametrize("as_list", [False, True])
def test_text_ends_before_a_stop_string_streamed_or_not(client: openai.OpenAI, as_list: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 2}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole is not None
    stop = next(whole[i : i + 2] for i in range(5, len(whole)) if "\ufffd" not in whole[i : i + 2])
    options["stop"] = ["never here", stop] if as_list else stop
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == whole[: whole.index(stop)]
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_max_completion_tokens_bounds_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, seed=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_can_ignore_the_end_of_sequence(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "n": 8, "seed": 1, "max_tokens": 200, "temperature": 2.0}
    ended = client.chat.completions.create(**options).choices
    assert "stop" in [choice.finish_reason for choice in ended]
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True}).choices
    assert {choice.finish_reason for choice in whole} == {"length"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frequency_penalty": 0.5}, ("frequency_penalty", "0.5")),
        ({"extra_body": {"best_of": 3}}, ("best_of", "3")),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ("tools",)),
        ({"top_logprobs": 2, "logprobs": True}, ("top_logprobs",)),
        ({"model": "gpt-9"}, ("'gpt-9'", "'tiny'")),
        ({"messages": []}, ("messages", "at least 1")),
        ({"stop": ""}, ("stop",)),
        ({"stop": ["x", ""]}, ("stop",)),
        ({"max_tokens": 5000}, ("5000", "1024")),
        ({"temperature": -1}, ("temperature", "-1")),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_chat_cannot_use_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], words: tuple[str, ...], stream: bool
) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "stream": stream, **options}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**arguments)
    for word in words:
        assert word in refused.value.message


def test_logprobs_of_a_stream_are_not_promised_and_then_left_out(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token_logprobs"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, logprobs=True)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
