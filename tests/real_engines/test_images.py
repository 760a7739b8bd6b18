"""Images in real engines, against transformers' logprobs, before and after the vision tower is published."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.tiny_images import IMAGE
from inflight.errors import InvalidRequestError
from inflight.wire import ChatCompletionRequest, Completion, GenerateRequest, GenerateResponse, SamplingParams
from tests.pictures import BLUE, RED, Reference, images_of, make_image_model, picture
from tests.real_engines.servers import RealEngine, publish, run, running

TOLERANCE = 1e-4
"""Of logprobs in float32: kernels sum in another order than transformers'."""
TOWER = ("vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "seeing", hidden_size=64, num_heads=2)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RealEngine]:
    with running("vllm", model) as started:
        yield started


def asked(model: Path, name: str, *urls: str) -> GenerateRequest:
    rendered = [token for number in range(len(urls)) for token in (97 + number, IMAGE)]
    token_ids, images = images_of(model).placed((*rendered, *b"what is it?\n"), urls)
    sampling = SamplingParams(n=2, max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=token_ids, images=images, sampling=sampling)


def requests(model: Path, name: str) -> list[GenerateRequest]:
    return [
        asked(model, f"{name}-red", picture(RED)),
        asked(model, f"{name}-blue", picture(BLUE)),
        asked(model, f"{name}-both", picture(RED), picture(BLUE)),
        GenerateRequest(
            request_id=f"{name}-text",
            prompt_token_ids=tuple(b"hello"),
            sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        ),
    ]


async def answers(endpoint: InferenceEndpoint, asked: list[GenerateRequest]) -> list[GenerateResponse]:
    return await asyncio.gather(*(endpoint.generate(request) for request in asked))


def without_placeholders(completion: Completion) -> Completion:
    ids = completion.token_ids
    end = ids.index(IMAGE) if IMAGE in ids else len(ids)
    return completion.model_copy(update={"token_ids": ids[:end], "logprobs": completion.logprobs[:end]})


def largest_gap(reference: Reference, sent: list[GenerateRequest], found: list[GenerateResponse]) -> float:
    return max(
        reference.gap(request, without_placeholders(completion))
        for request, response in zip(sent, found, strict=True)
        for completion in response.completions
    )


def test_logprobs_behind_images_are_transformers_own_also_after_the_tower_was_published(
    engine: RealEngine, model: Path
) -> None:
    reference = Reference(model)
    assert run(engine.endpoint(), lambda endpoint: endpoint.capabilities()).images
    before = requests(model, "before")
    assert largest_gap(reference, before, run(engine.endpoint(), lambda e: answers(e, before))) < TOLERANCE
    tensors = {
        name: tensor * 1.3 if name.startswith(TOWER) and tensor.dim() > 1 else tensor
        for name, tensor in engine.tensors.items()
    }
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            if name.removeprefix("model.").startswith(TOWER) and parameter.dim() > 1:
                parameter.mul_(1.3)
    after = requests(model, "after")
    with engine.publisher() as publisher:
        assert publish(publisher, tensors, 1).applied_everywhere
        found = run(engine.endpoint(), lambda e: answers(e, after))
        assert {span.version for it in found for c in it.completions for span in c.version_spans} == {1}
        assert largest_gap(reference, after, found) < TOLERANCE
        publish(publisher, engine.tensors, 2)


def test_a_chat_is_rendered_with_its_images(engine: RealEngine, model: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": picture(RED)}}, {"type": "text", "text": "what?"}]
    name = run(engine.endpoint(), lambda endpoint: endpoint.capabilities()).model
    body = {"model": name, "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "seed": 1}
    chat = ChatCompletionRequest.model_validate(body)
    answer = run(engine.endpoint(), lambda endpoint: endpoint.chat_completion(chat))
    token_ids, images = images_of(model).placed([IMAGE, *b"what?\n"], [picture(RED)])
    assert answer.prompt_token_ids == token_ids
    request = GenerateRequest(
        request_id="chat", prompt_token_ids=token_ids, images=images, sampling=SamplingParams(max_tokens=6, seed=1)
    )
    (completion,) = run(engine.endpoint(), lambda endpoint: endpoint.generate(request)).completions
    assert completion.token_ids == answer.choices[0].token_ids


def test_an_image_that_is_not_where_the_request_says_is_refused(engine: RealEngine, model: Path) -> None:
    request = asked(model, "stray", picture(RED))
    stray = request.model_copy(
        update={
            "prompt_token_ids": (IMAGE, *request.prompt_token_ids),
            "images": (request.images[0].model_copy(update={"start": 2}),),
        }
    )
    with pytest.raises(InvalidRequestError, match=r"vLLM places images at .*, but the request at \[\(2, 16\)\]"):
        run(engine.endpoint(), lambda endpoint: endpoint.generate(stray))
