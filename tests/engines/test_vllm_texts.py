"""The texts of chat completions on vLLM, whose route for decoding always includes special tokens. No engine."""

from __future__ import annotations

import itertools
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
from tests.gates import until


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


class ByteVllm(LabelledVllm):
    """Samples the bytes of a text, with a special token inside each character that has several."""

    text = "aé 🙂 ß" * 5
    special = 255
    """A byte that no text has."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.token_ids = [
            token_id
            for character in self.text
            for position, byte in enumerate(character.encode())
            for token_id in ([self.special, byte] if position == 1 else [byte])
        ]
        self.decoded: list[int] = []
        """Number of tokens in each call of /detokenize."""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/detokenize":
            self.decoded.append(len(body["tokens"]))
            return {"prompt": bytes(body["tokens"]).decode(errors="replace")}
        return super().answer(path, body)

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [choice | {"token_ids": self.token_ids} for choice in super()._choices(body)]


def test_a_chat_stream_decodes_once_for_each_chunk_and_gives_the_text_of_the_plain_answer(tmp_path: Path) -> None:
    added = [{"id": ByteVllm.special, "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    server = ByteVllm(served_model(tmp_path))
    server.rendered = [1, 2, 3]
    num_sent = 0

    async def decoded() -> None:
        """Return once the tokens sent so far were decoded, so that each of them is a chunk."""
        nonlocal num_sent
        await until(lambda: len(server.decoded) >= num_sent)
        num_sent += 1

    server.before_event = decoded
    ask = ChatCompletionRequest(
        model="tiny", messages=(ChatMessage(role="user", content="Hello"),), max_tokens=len(server.token_ids)
    )

    async def call(client: Any) -> None:
        streamed = ask.model_copy(update={"stream": True})
        chunks = [chunk.choices[0] async for chunk in client.chat_completion_stream(streamed)]
        assert [chunk.token_ids for chunk in chunks] == [(token_id,) for token_id in server.token_ids]
        assert len(server.decoded) == len(chunks)
        assert max(server.decoded[:-1]) < 24
        texts = list(itertools.accumulate(chunk.delta.content for chunk in chunks))
        assert all(server.text.startswith(text) for text in texts)
        assert len(set(texts)) == len(server.text), "each character comes with its last byte"
        (choice,) = (await client.chat_completion(ask)).choices
        assert texts[-1] == choice.message.content == server.text

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
