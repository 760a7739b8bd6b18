"""Prompts with images in the embedded engine, against transformers' own forward."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from inflight.engines.embedded.tiny_images import IMAGE
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import (
    MAX_IMAGES_LENGTH,
    ChatCompletionRequest,
    Completion,
    GenerateRequest,
    InFlightPolicy,
    PromptImage,
    SamplingParams,
)
from tests.engine.reference import TOLERANCE, generate_all, serving
from tests.gates import slowed, until
from tests.pictures import BLUE, RED, Reference, images_of, make_image_model, picture

pytestmark = pytest.mark.anyio
TEXT = b"what is it?\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def asked(path: Path, *urls: str, name: str = "one", n: int = 1, max_tokens: int = 16) -> GenerateRequest:
    """A request in which each image follows a letter."""
    rendered = [token for number in range(len(urls)) for token in (97 + number, IMAGE)]
    token_ids, images = images_of(path).placed((*rendered, *TEXT), urls)
    sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=token_ids, images=images, sampling=sampling)


def without_placeholders(completion: Completion) -> Completion:
    """A completion up to the first sampled placeholder, which plain transformers would take for an image."""
    ids = completion.token_ids
    end = ids.index(IMAGE) if IMAGE in ids else len(ids)
    return completion.model_copy(update={"token_ids": ids[:end], "logprobs": completion.logprobs[:end]})


async def test_logprobs_behind_images_are_transformers_own_also_beside_text_and_other_images(
    path: Path, reference: Reference
) -> None:
    requests = [
        asked(path, picture(RED), name="red", n=2),
        asked(path, picture(BLUE), name="blue", n=2),
        asked(path, picture(RED), picture(BLUE, size=40), name="both"),
        GenerateRequest(request_id="text", prompt_token_ids=tuple(TEXT), sampling=SamplingParams(max_tokens=16)),
    ]
    async with serving(path) as endpoint:
        assert (await endpoint.capabilities()).images
        responses = await generate_all(endpoint, requests)
    for request, response in zip(requests, responses, strict=True):
        for completion in response.completions:
            assert reference.gap(request, without_placeholders(completion)) < TOLERANCE
    red, blue = (response.completions[0] for response in responses[:2])
    assert abs(red.logprobs[0] - blue.logprobs[0]) > 100 * TOLERANCE or red.token_ids[0] != blue.token_ids[0]


async def test_running_requests_are_computed_again_with_their_images(path: Path, reference: Reference) -> None:
    """Under recompute, keys and values behind an image come from the image again."""
    request = asked(path, picture(RED), max_tokens=100)
    async with serving(path) as endpoint:
        engine = endpoint._engine
        stack = contextlib.ExitStack()
        stack.enter_context(slowed(endpoint, after=2))
        running = asyncio.ensure_future(endpoint.generate(request))
        await until(lambda: engine.stats().num_tokens >= 2)

        def recompute() -> None:
            engine.pauses.pause(InFlightPolicy.RECOMPUTE, lambda: None)
            engine.load(engine.weights.prepare([]), 1, InFlightPolicy.RECOMPUTE)
            engine.pauses.resume()

        await asyncio.wrap_future(engine.call(recompute))
        stack.close()
        (completion,) = (await running).completions
    assert [span.version for span in completion.version_spans] == [0, 1]
    assert reference.gap(request, without_placeholders(completion)) < TOLERANCE


async def test_a_chat_with_parts_is_rendered_to_the_expanded_placeholders(path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": picture(RED)}}, {"type": "text", "text": "what?"}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "seed": 1}
    request = ChatCompletionRequest.model_validate(body)
    async with serving(path) as endpoint:
        answer = await endpoint.chat_completion(request)
        assert answer.prompt_token_ids == (*[IMAGE] * 16, *b"what?\n")
        rendered = endpoint.chat_request(request)
        (completion,) = (await endpoint.generate(rendered)).completions
    assert rendered.images == (PromptImage(url=picture(RED), start=0, num_tokens=16),)
    assert answer.choices[0].token_ids == completion.token_ids


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_tokens": 15}, "fills 16 tokens in this model, not 15"),
        ({"start": 2}, "all must be the placeholder 258"),
        ({"url": "data:image/png;base64," + base64.b64encode(b"no picture").decode()}, "cannot be decoded"),
    ],
)
async def test_images_that_do_not_fit_are_refused(path: Path, change: dict[str, object], says: str) -> None:
    request = asked(path, picture(RED))
    wrong = request.model_copy(update={"images": (request.images[0].model_copy(update=change),)})
    async with serving(path) as endpoint:
        with pytest.raises(InvalidRequestError, match=says):
            await endpoint.generate(wrong)
        assert (await endpoint.generate(request)).completions


async def test_a_model_without_a_tower_refuses_images(path: Path, model_dir: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": picture(RED)}}]
    chat = {"model": model_dir.name, "messages": [{"role": "user", "content": parts}]}
    async with serving(model_dir) as endpoint:
        assert not (await endpoint.capabilities()).images
        with pytest.raises(UnsupportedError, match="does not support images"):
            await endpoint.generate(asked(path, picture(RED)))
        with pytest.raises(UnsupportedError, match="does not support images"):
            await endpoint.chat_completion(ChatCompletionRequest.model_validate(chat))


@pytest.mark.parametrize(
    "url", ["http://example.com/a.png", "file:///etc/passwd", "data:text/plain;base64,YQ==", "data:image/png;base64,*"]
)
def test_only_data_urls_are_taken(url: str) -> None:
    with pytest.raises(ValidationError, match=r"nothing is fetched|is not base64"):
        PromptImage(url=url, start=0, num_tokens=1)


def test_images_are_bounded_in_order_and_within_the_prompt() -> None:
    image = PromptImage(url=picture(RED), start=0, num_tokens=2)
    later = image.model_copy(update={"start": 1})
    for images in ((image, later), (image.model_copy(update={"start": 3}),)):
        with pytest.raises(ValidationError, match="in order"):
            GenerateRequest(request_id="x", prompt_token_ids=(1, 1, 1, 1), images=images)
    with pytest.raises(ValidationError, match="at most"):
        PromptImage(url="data:image/png;base64," + "A" * MAX_IMAGES_LENGTH, start=0, num_tokens=2)


def test_a_request_without_images_says_nothing_of_them() -> None:
    assert "images" not in GenerateRequest(request_id="x", prompt_token_ids=(1,)).model_dump_json()
