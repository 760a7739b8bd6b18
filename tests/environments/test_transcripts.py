"""Conversations keep the ids that were sampled, with the templates of real models and tokens that merge."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.environments.transcripts import ChatTemplate, Prompt, Transcript
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.types import ToolCall
from tests.environments.tokenizers import SPECIAL, tokenizer

TEMPLATES = sorted(SPECIAL)
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


@functools.cache
def made(template: str) -> tuple[Any, ChatTemplate]:
    built = tokenizer(template)
    return built, ChatTemplate(built)


def encode(template: str, text: str) -> list[int]:
    return list(made(template)[0](text, add_special_tokens=False)["input_ids"])


def decode(template: str, token_ids: Any) -> str:
    return str(made(template)[0].decode(list(token_ids), skip_special_tokens=False))


def after(template: str, prompt: Prompt, reply: str, *, ends: bool = True) -> Transcript:
    token_ids = encode(template, reply) + ([made(template)[0].eos_token_id] if ends else [])
    return made(template)[1].transcript(prompt, token_ids, "stop" if ends else "length")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_prompt_is_what_was_sampled_and_what_the_template_adds(template: str, data: st.DataObject) -> None:
    """Replies are random tokens, so few are what the tokenizer makes of their text."""
    built, chat = made(template)
    prompt = chat.opening([user("go\n")])
    assert decode(template, prompt.token_ids) == prompt.text
    for turn in range(data.draw(st.integers(1, 4))):
        sampled = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=12))
        ends = data.draw(st.booleans())
        before = chat.transcript(prompt, [*sampled, *[built.eos_token_id] * ends], "stop" if ends else "length")
        message = data.draw(st.sampled_from(["next\n", " a", "\n\nand then?", "42"]))
        prompt = chat.following(before, [user(message)])
        rendered = built.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        assert prompt.text == rendered
        keeps = rendered.startswith(before.text)
        assert (prompt.rewritten is None) == keeps, turn
        if keeps:
            assert prompt.token_ids[: len(before.token_ids)] == before.token_ids
            added = prompt.token_ids[len(before.token_ids) :]
            turn_end = "" if ends else built.eos_token
            assert decode(template, added).startswith(turn_end)
            assert before.text + built.eos_token * ends + decode(template, added) == rendered
        else:
            assert decode(template, prompt.token_ids) == rendered


def test_merges_over_the_end_of_a_turn_do_not_change_what_was_sampled() -> None:
    """Nothing special ends a turn in this template, and the tokenizer joins the end of the reply with what follows."""
    built = tokenizer("qwen3")
    built.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    chat = ChatTemplate(built)
    reply = "user"
    sampled = built(reply, add_special_tokens=False)["input_ids"]
    whole = built(f"{reply}\nassistant\n", add_special_tokens=False)["input_ids"]
    assert whole[: len(sampled)] != sampled
    prompt = chat.opening([user("q")])
    before = chat.transcript(prompt, sampled, "length")
    following = chat.following(before, [user("assistant")])
    assert following.rewritten is None
    assert following.token_ids[: len(before.token_ids)] == before.token_ids
    assert built.decode(following.token_ids) == "q\nuser\nassistant\n"


def test_qwen3_drops_reasoning_before_a_new_question_and_keeps_it_before_the_result_of_a_tool() -> None:
    _, chat = made("qwen3")
    prompt = chat.opening([user("what is 6 * 7?")], [TOOL])
    call = '{"name": "python", "arguments": {"code": "6*7"}}'
    reply = f"<think>\nthe tool knows\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    before = after("qwen3", prompt, reply)
    heard = chat.decode_reply(before.token_ids[len(prompt.token_ids) :], "stop")
    assert heard.tool_calls == (ToolCall("call_0", "python", {"code": "6*7"}),)
    result = chat.following(before, [{"role": "tool", "content": "42"}])
    assert result.rewritten is None
    assert result.token_ids[: len(before.token_ids)] == before.token_ids
    asked = chat.following(before, [user("and 6 * 8?")])
    assert asked.rewritten is not None
    assert "think" in asked.rewritten
    assert "the tool knows" not in asked.text


@pytest.mark.parametrize("reply", [" leading", "trailing \n"])
def test_llama3_trims_white_space_and_that_is_found(reply: str) -> None:
    _, chat = made("llama3")
    prompt = chat.opening([user("q")])
    following = chat.following(after("llama3", prompt, reply), [user("again")])
    assert following.rewritten is not None
    clean = chat.following(after("llama3", prompt, reply.strip()), [user("again")])
    assert clean.rewritten is None


def test_a_turn_that_ended_with_another_token_than_the_template_writes_is_found() -> None:
    built, chat = made("llama3_2")
    eom = built.convert_tokens_to_ids("<|eom_id|>")
    prompt = chat.opening([user("q")])
    before = chat.transcript(prompt, [*encode("llama3_2", "hm"), eom], "stop")
    following = chat.following(before, [user("again")])
    assert following.rewritten is not None
    assert "<|eom_id|>" in following.rewritten


def test_llama3_calls_a_tool_with_one_json_object() -> None:
    _, chat = made("llama3_2")
    heard = chat.decode_reply(encode("llama3_2", '{"name": "python", "parameters": {"code": "1"}}'), "length")
    assert (heard.text, heard.tool_calls) == ("", (ToolCall("call_0", "python", {"code": "1"}),))


@pytest.mark.parametrize(
    ("opening", "is_open"), [("<think>perhaps ", False), ("perhaps ", True)], ids=["own tag", "the template's tag"]
)
def test_a_tool_call_inside_the_reasoning_is_not_returned_as_a_call(opening: str, is_open: bool) -> None:
    call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    chat = made("qwen3")[1]
    heard = chat.decode_reply(encode("qwen3", f"{opening}{call}</think>No."), "length", is_open=is_open)
    assert (heard.text, heard.tool_calls) == (f"{opening}{call}</think>No.", ())
    heard = chat.decode_reply(encode("qwen3", f"{opening}{call}</think>{call}"), "length", is_open=is_open)
    assert (heard.text, len(heard.tool_calls)) == (f"{opening}{call}</think>", 1)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>not json</tool_call>", '<tool_call>{"name": 3}</tool_call>', "{}", '{"name": "x"}', "<tool_call>"],
)
def test_what_cannot_be_read_as_a_call_stays_text(text: str) -> None:
    heard = made("qwen3")[1].decode_reply(encode("qwen3", text), "length")
    assert (heard.text, heard.tool_calls) == (text, ())


def test_messages_that_the_template_refuses_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="chat template refused"):
        made("llama3")[1].opening([{"content": "no role"}])


def test_without_a_chat_template_there_is_one_message_of_text() -> None:
    built = tokenizer("qwen3")
    built.chat_template = None
    chat = ChatTemplate(built)
    assert chat.opening([user("plain")]).text == "plain"
    with pytest.raises(UnsupportedError, match="chat_template"):
        chat.following(chat.transcript(chat.opening([user("plain")]), [65], "length"), [user("more")])
