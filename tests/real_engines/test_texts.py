"""Messages of chat completions on a real vLLM have no special tokens, and their pieces have all tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import AutoTokenizer

from inflight.contracts import InferenceEndpoint
from inflight.wire import ChatCompletion, ChatCompletionRequest, ChatMessage
from tests.real_engines.servers import RealEngine, muted, publish, run


@pytest.mark.parametrize("name", ["vllm"])
def test_sampled_special_tokens_are_in_the_pieces_and_not_in_the_message(
    engine_of: Callable[[str], RealEngine], name: str
) -> None:
    """With these weights every token is as likely: one of the two special ones comes every 129 tokens, 12 times."""
    engine = engine_of(name)
    with engine.publisher() as publisher:
        publish(publisher, muted(engine.tensors), 1)
    tokenizer = AutoTokenizer.from_pretrained(engine.model)
    special = set(tokenizer.all_special_ids)

    async def chat(endpoint: InferenceEndpoint) -> ChatCompletion:
        messages = (ChatMessage(role="user", content="Hello"),)
        model = (await endpoint.capabilities()).model
        return await endpoint.chat_completion(
            ChatCompletionRequest(
                model=model, messages=messages, n=8, max_tokens=200, temperature=1.0, ignore_eos=True, logprobs=True
            )
        )

    choices = run(engine.endpoint(), chat).choices
    assert any(special & set(choice.token_ids) for choice in choices)
    for choice in choices:
        assert choice.message.content == tokenizer.decode(list(choice.token_ids), skip_special_tokens=True)
        assert choice.logprobs is not None
        pieces = [piece.token for piece in choice.logprobs.content]
        assert pieces == [tokenizer.decode([token]) for token in choice.token_ids]
