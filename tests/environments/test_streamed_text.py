"""Text that is sent while tokens arrive never has to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.environments.tools.reasoning import Reasoning, certain_reply, whole_reply
from inflight.environments.tools.tool_calls import before_calls, split_tool_calls
from inflight.environments.transcripts import ChatTemplate
from inflight.http.chat import before_stop
from inflight.http.streamed_text import StreamedText
from tests.environments.tokenizers import tokenizer

MERGES, BYTES = ChatTemplate(tokenizer("qwen3")), ChatTemplate(byte_tokenizer())
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXTS = st.lists(
    st.sampled_from([" ", "\n", "a", "b <", "<tool_call>", "<tool", "</tool_call>", CALL, CALL[11:41], "{", "é", "🙂"]),
    max_size=8,
).map("".join)


@settings(max_examples=300)
@example("a " + CALL)
@example(f"\n{CALL} b {CALL}\n")
@example(f"a{CALL[:-1]}")
@example('{"name": "f", "parameters": {}}')
@example('<|python_tag|>{"name": "f", "parameters": {}}')
@given(text=TEXTS)
def test_what_comes_before_calls_is_the_same_however_the_reply_goes_on(text: str) -> None:
    whole, _ = split_tool_calls(text)
    for end in range(len(text) + 1):
        assert whole.startswith(before_calls(text[:end]))


THOUGHTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</t", "\n", " ", "a", CALL, "<tool_call>", "{"]), max_size=6
).map("".join)


@pytest.mark.parametrize("reasoning", ["kept", "split"])
@settings(max_examples=60)
@example(text=f" <think>a{CALL}</think>\n\nb {CALL} ", is_open=False, may_call=True)
@example(text=f"a{CALL}</think>\n{CALL} ", is_open=True, may_call=True)
@given(text=THOUGHTS, is_open=st.booleans(), may_call=st.booleans())
def test_certain_parts_of_a_reply_with_reasoning_grow_to_the_whole(
    reasoning: Reasoning, text: str, is_open: bool, may_call: bool
) -> None:
    thought, said, calls = whole_reply(text, reasoning, is_open=is_open, may_call=may_call)
    for end in range(len(text) + 1):
        certain = certain_reply(text[:end], reasoning, is_open=is_open, may_call=may_call)
        assert thought.startswith(certain[0]) and said.startswith(certain[1])
    split = whole_reply(text, "split", is_open=is_open, may_call=may_call)
    assert split[2] == calls and "".join(split[1].split()) in "".join(said.split())


@given(
    text=TEXTS,
    cut=st.integers(1, 3),
    stop=st.lists(st.sampled_from(["a", "b <t", "🙂", "\n\n"]), max_size=2),
    data=st.data(),
)
def test_certain_text_grows_to_the_whole_with_any_tokens(
    text: str, cut: int, stop: list[str], data: st.DataObject
) -> None:
    template, num_known = data.draw(st.sampled_from([(MERGES, 420), (BYTES, 258)]))
    token_ids = list(template.encoded(text, 1 << 20, is_start=False)) + data.draw(
        st.lists(st.integers(0, num_known - 1), max_size=6)
    )
    streamed, sent = StreamedText(stop), ""
    for start in range(0, len(token_ids), cut):
        certain = streamed.add(token_ids[start : start + cut], template.plain)
        assert certain.startswith(sent)
        sent = certain
    assert before_stop(template.plain(token_ids), stop).startswith(sent)


def without_first_space(token_ids: Sequence[int]) -> str:
    """Decode bytes as tokenizers do that omit a space at the beginning."""
    return BYTES.plain(token_ids).removeprefix(" ")


def with_marks(token_ids: Sequence[int]) -> str:
    """Decode pieces of words: a piece that continues a word has a mark if no piece precedes it."""
    pieces = [f"##{token_id}" if token_id % 3 else f" {token_id}" for token_id in token_ids]
    return "".join(it.removeprefix("##") if at else it.removeprefix(" ") for at, it in enumerate(pieces))


@given(
    decode=st.sampled_from([BYTES.plain, without_first_space, with_marks]),
    pieces=st.lists(
        st.sampled_from([b" ", b"  ", b"a", b" b", b"\xff", b"\xf0", *map(str.encode, "é🙂\n")]), max_size=60
    ),
    cut=st.integers(1, 12),
)
def test_text_is_that_of_all_tokens_decoded_at_once_whatever_a_tokenizer_does_at_the_beginning(
    decode: Callable[[Sequence[int]], str], pieces: list[bytes], cut: int
) -> None:
    token_ids = [*b"".join(pieces), *b"the end"]
    streamed, sent = StreamedText(), ""
    for start in range(0, len(token_ids), cut):
        certain = streamed.add(token_ids[start : start + cut], decode)
        assert certain.startswith(sent)
        sent = certain
    whole = decode(token_ids)
    assert whole.startswith(sent)
    if decode is not with_marks:  # where text may come with the next tokens instead
        assert sent == whole


@pytest.mark.parametrize("decode", [BYTES.plain, without_first_space])
@pytest.mark.parametrize("cut", [1, 3, 20])
def test_each_token_is_decoded_a_few_times_however_long_the_completion_is(
    decode: Callable[[Sequence[int]], str], cut: int
) -> None:
    token_ids = list((" some words, é and 🙂\n" * 100).encode())
    decoded = []

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    streamed = StreamedText()
    for start in range(0, len(token_ids), cut):
        text = streamed.add(token_ids[start : start + cut], counted)
    assert text == decode(token_ids)
    assert len(decoded) == len(range(0, len(token_ids), cut))
    assert max(decoded) < 20 + 3 * cut


def test_text_is_not_held_back_longer_than_it_must() -> None:
    streamed = StreamedText(["stop"])
    said = [streamed.add([byte], BYTES.plain) for byte in "aé sto stops".encode()]
    assert said[:6] == ["a", "a", "aé", "aé ", "aé ", "aé "]
    assert said[-1] == "aé sto "
