"""Bodies whose structure costs more than their bytes are refused before they are parsed, and no others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.http.structure import check_structure

MB = 1 << 20
TEXT = "".join(['a "quoted" \\ text', "[{,}],", "\n", "\u0416", '\\"']) * 20_000

HOSTILE = {
    "lists": b"[" + b"[]," * 300_000 + b"0]",
    "objects": b"[" + b"{}," * 300_000 + b"0]",
    "deep lists": b"[" + (b"[" * 150 + b"]" * 150 + b",") * 3000 + b"0]",
    "lists after a text": b'["' + b'\\"' * 999 + b'",' + b"[]," * 300_000 + b"0]",
    "lists between texts": b"[" + b'"\\\\",[],' * 100_000 + b"0]",
    "values": b"[" + b"0," * 500_000 + b"0]",
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(90_000)) + b"}",
    "texts": b"[" + b'"",' * 330_000 + b"0]",
    "quotes alone": b'"' * MB,
}
USUAL = {
    "a long text": json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode(),
    "a text of brackets": json.dumps({"messages": [{"role": "user", "content": "[{" * 400_000}]}).encode(),
    "a thousand messages": json.dumps({"messages": [{"role": "user", "content": "and then?"}] * 1000}).encode(),
    "as many ids as the body may have": json.dumps({"prompt_token_ids": [49_151] * (MB // 16)}).encode(),
    "two hundred tools": json.dumps(
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"p": {"type": "string"}}}}] * 200}
    ).encode(),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_would_cost_much_more_than_its_bytes_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="it has"):
        check_structure(HOSTILE[name], MB)


@pytest.mark.parametrize("name", USUAL)
def test_what_clients_send_is_not_refused(name: str) -> None:
    check_structure(USUAL[name], 2 * MB)


@given(st.text(alphabet='[]{},"\\a\u0416', max_size=50))
def test_brackets_within_texts_do_not_count(text: str) -> None:
    content = json.dumps([text] * 400).encode()
    check_structure(content, 0)
    with pytest.raises(ValueError, match="lists and objects"):
        check_structure(content[:-1] + b"," + b"[]," * 2100 + b"0]", 0)
