"""The texts of chat completions on vLLM, whose route for decoding always includes special tokens. No engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inflight.conformance.models import make_tiny_model
from inflight.model.special_tokens import special_token_ids
from inflight.wire import ChatCompletionRequest, ChatMessage
from tests.engines.labelled_servers import LabelledVllm
from tests.engines.test_others_updates import run, served_model


@pytest.mark.parametrize(("special", "text"), [((1,), ""), ((2,), "<1><1><1>"), ((), "<1><1><1>")])
def test_the_message_has_no_special_tokens_and_the_pieces_have_all(
    tmp_path: Path, special: tuple[int, ...], text: str
) -> None:
    added = [{"id": token, "content": f"<{token}>", "special": token in special} for token in (1, 2)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    server = LabelledVllm(served_model(tmp_path))
    server.rendered = [1, 2, 3]
    ask = ChatCompletionRequest(
        model="tiny", messages=(ChatMessage(role="user", content="Hello"),), max_tokens=3, logprobs=True
    )

    async def call(client: Any) -> None:
        (choice,) = (await client.chat_completion(ask)).choices
        assert (choice.message.content, choice.token_ids) == (text, (1, 1, 1))
        assert [piece.token for piece in choice.logprobs.content] == ["<1>"] * 3

    run(server, call)


def test_special_tokens_are_those_that_a_tokenizer_leaves_out(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", tied=True, max_model_len=64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    special = special_token_ids(model)
    assert special == set(tokenizer.all_special_ids)
    ids = [*b"two ", *sorted(special), *b"words", *sorted(special)]
    left = [token for token in ids if token not in special]
    assert tokenizer.decode(left) == tokenizer.decode(ids, skip_special_tokens=True) == "two words"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"added_tokens": null}', "not JSON"])
def test_a_checkpoint_whose_tokenizer_cannot_be_read_has_no_known_special_tokens(tmp_path: Path, text: str) -> None:
    assert special_token_ids(tmp_path) == frozenset()
    (tmp_path / "tokenizer.json").write_text(text)
    assert special_token_ids(tmp_path) == frozenset()


def test_special_tokens_may_be_in_the_settings_of_the_tokenizer_alone(tmp_path: Path) -> None:
    decoder = {"7": {"content": "<s>", "special": True}, "8": {"content": "word", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert special_token_ids(tmp_path) == {7}
