"""What a client without a token can make a server compute or keep is bounded, before it is computed."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.errors import BusyError, ContextFullError, InvalidRequestError
from inflight.http.listening import InLoopServer, bind
from inflight.http.server import create_app
from inflight.model.long_texts import LONG_TEXT, tokenise
from inflight.wire import ChatCompletionRequest
from tests.engine.reference import make_request, serving


class Counted:
    """A tokenizer that records the length of each text that it is given."""

    def __init__(self) -> None:
        self.tokenizer, self.lengths = byte_tokenizer(), list[int]()

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "[{,}]" * 20_000])
def test_a_text_that_cannot_fit_is_refused_after_a_part_of_it_is_tokenised(text: str) -> None:
    counted = Counted()
    with pytest.raises(ContextFullError, match=f"the rendered text of {len(text)} characters does not fit"):
        tokenise(counted, text, 8192)
    assert sum(counted.lengths) <= LONG_TEXT


def test_a_long_text_that_fits_has_the_tokens_of_the_whole() -> None:
    text = "words, and more; " * 3000
    tokenizer = byte_tokenizer()
    assert tokenise(tokenizer, text, 60_000) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_logprobs_of_too_many_tokens_are_refused_before_they_are_sampled(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            can = await endpoint.capabilities()
            fields = {"model": can.model, "messages": [{"role": "user", "content": "a"}], "n": 1024}
            with pytest.raises(InvalidRequestError, match="lower n or max_tokens, or read token_logprobs"):
                await endpoint.chat_completion(ChatCompletionRequest.model_validate({**fields, "logprobs": True}))

    asyncio.run(run())


def test_no_more_completions_wait_than_memory_allows(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir, max_concurrent=1) as endpoint:
            requests = [make_request(f"r{i}", [72], n=1024, max_tokens=900, ignore_eos=True) for i in range(17)]
            running = [asyncio.ensure_future(endpoint.generate(request)) for request in requests]
            done, _ = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            with pytest.raises(BusyError, match="completions are waiting and 1024 more are requested"):
                refused.result()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(run())


def test_what_exists_when_a_server_starts_is_left_out_of_collections_until_it_ends(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            server = InLoopServer(create_app(endpoint, token="secret"), bind("127.0.0.1", 0))
            await server.started()
            assert gc.get_freeze_count() > 100_000
            await server.aclose()
            assert gc.get_freeze_count() == 0

    asyncio.run(run())
