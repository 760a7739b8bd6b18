"""Text that is sent while tokens arrive never has to be taken back."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.engines.embedded.tiny import byte_tokenizer
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


def test_text_is_not_held_back_longer_than_it_must() -> None:
    streamed = StreamedText(["stop"])
    said = [streamed.add([byte], BYTES.plain) for byte in "aé sto stops".encode()]
    assert said[:6] == ["a", "a", "aé", "aé ", "aé ", "aé "]
    assert said[-1] == "aé sto "
