"""Conversations with images: each stays where it is among the tokens, and no token is trained on with another image."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.engines.embedded.tiny import EOS
from inflight.engines.embedded.tiny_images import IMAGE, TinyImageShape, create_tiny_image_model, tiny_processor
from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.answers import Answers
from inflight.environments.proxy.contents import rendered_message
from inflight.environments.proxy.episode_service import EpisodeService
from inflight.environments.proxy.messages import MessagesRequest
from inflight.environments.proxy.requests import ChatRequest
from inflight.environments.proxy.responses import ResponsesRequest
from inflight.environments.recording import EpisodeRecording, PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.http.listening import InLoopServer, bind
from inflight.model.images import ImageProcessor
from inflight.types import Message
from inflight.wire import Completion, GenerateRequest, PromptImage, SamplingParams, VersionSpan
from tests.engine.reference import TOLERANCE, serving
from tests.pictures import BLUE, RED, Reference, images_of, make_image_model, picture
from tests.servers import TOKEN


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    processor = tiny_processor()
    config = create_tiny_image_model(TinyImageShape(hidden_size=32, num_heads=2), 0).config
    return ChatTemplate(processor.tokenizer, ImageProcessor(processor, config))


def shown(url: str, text: str) -> Message:
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def test_images_of_earlier_turns_stay_where_they_are(template: ChatTemplate) -> None:
    first = template.opening([shown(picture(RED), "what?")])
    assert first.token_ids == (*[IMAGE] * 16, *b"what?\n")
    said = template.transcript(first, [*b"red", EOS], "stop")
    second = template.following(said, [{"role": "user", "content": "and "}, shown(picture(BLUE), "this?")])
    assert second.rewritten is None
    before = (*first.token_ids, *b"red", EOS)
    assert second.token_ids == (*before, 10, *b"and \n", *[IMAGE] * 16, *b"this?\n")
    start = len(before) + 6
    assert second.images == (
        PromptImage(url=picture(RED), start=0, num_tokens=16),
        PromptImage(url=picture(BLUE), start=start, num_tokens=16),
    )


def test_a_sampled_placeholder_is_an_ordinary_token(template: ChatTemplate) -> None:
    first = template.opening([shown(picture(RED), "what?")])
    said = template.transcript(first, [97, IMAGE, EOS], "stop")
    second = template.following(said, [shown(picture(BLUE), "?")])
    assert [image.start for image in second.images] == [0, len(first.token_ids) + 4]


def test_a_placeholder_in_a_text_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(InvalidRequestError, match="1 images, but as rendered they have 2 placeholders '<image>'"):
        template.opening([shown(picture(RED), "what is an <image>?")])


def test_images_are_refused_for_a_model_that_takes_none() -> None:
    with pytest.raises(UnsupportedError, match="no vision tower"):
        ChatTemplate(tiny_processor().tokenizer).opening([shown(picture(RED), "what?")])


def test_a_call_continues_another_only_with_the_same_images() -> None:
    """Placeholders of different images are the same tokens."""

    def said(*token_ids: int) -> Completion:
        return Completion(
            index=0,
            token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids),
            version_spans=(VersionSpan(version=0, start=0, end=len(token_ids)),),
            finish_reason="stop",
        )

    red, blue = (PromptImage(url=picture(colour), start=0, num_tokens=2) for colour in (RED, BLUE))
    later = PromptImage(url=picture(BLUE), start=4, num_tokens=2)
    recording = EpisodeRecording()
    recording.add([IMAGE, IMAGE, 1], said(2), images=[red])
    recording.add([IMAGE, IMAGE, 1, 2, 3], said(4), images=[blue])
    recording.add([IMAGE, IMAGE, 1, 2, IMAGE, IMAGE], said(5), images=[red, later])

    rollouts = PlayedEpisode(calls=recording.calls, reward=1.0).rollouts(0, 1.0)
    assert [(list(it.completion_token_ids), list(it.images)) for it in rollouts] == [
        ([4], [blue]),
        ([2, IMAGE, IMAGE, 5], [red, later]),
    ]


def test_the_proxy_takes_parts_with_images_and_refuses_addresses() -> None:
    part = {"type": "image_url", "image_url": {"url": picture(RED), "detail": "low"}}
    message = rendered_message({"role": "user", "content": [part, {"type": "text", "text": "what?"}]}, 0)
    assert message["content"] == shown(picture(RED), "what?")["content"]
    assert rendered_message({"role": "user", "content": [{"type": "text", "text": "a"}]}, 0)["content"] == "a"
    for wrong in ({"url": "https://example.com/a.png"}, {}, "text"):
        with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.0\.image_url"):
            rendered_message({"role": "user", "content": [{"type": "image_url", "image_url": wrong}]}, 0)


@pytest.mark.anyio
async def test_a_damaged_image_is_named_by_its_field(template: ChatTemplate) -> None:
    async def generate(request: GenerateRequest) -> Completion:
        raise AssertionError("nothing is sampled")

    damaged = "data:image/png;base64,AAAA"
    head, _, data = picture(RED).partition(",")
    cut = f"{head},{data[: len(data) // 8 * 4]}"
    answers = Answers(PlayingEpisode("one", 0, template, generate, SamplingParams(), max_tokens=200))

    def blocks(*urls: str) -> list[dict[str, Any]]:
        sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
        return [{"type": "image", "source": source} for source in sources]

    result = {"type": "tool_result", "tool_use_id": "x", "content": blocks(damaged)}
    inputs = [{"type": "input_image", "image_url": url} for url in (picture(RED), damaged)]
    requests: dict[str, ChatRequest] = {
        "messages.1.content.0.image_url.url": ChatRequest(messages=(shown(picture(RED), "a"), shown(damaged, "b"))),
        "messages.0.content.1.source": MessagesRequest.model_validate(
            {"system": "s", "messages": [{"role": "user", "content": blocks(picture(RED), damaged)}]}
        ).as_chat(),
        "messages.0.content.0.content.0.source": MessagesRequest.model_validate(
            {"system": "s", "messages": [{"role": "user", "content": [result]}]}
        ).as_chat(),
        "input.0.content.1.image_url": ResponsesRequest.model_validate(
            {"instructions": "s", "input": [{"role": "user", "content": inputs}]}
        ).as_chat(lambda _: None),
    }
    for field, request in requests.items():
        with pytest.raises(InvalidRequestError) as refused:
            await answers.answer(request)
        assert str(refused.value) == (
            f"{field} is an image that cannot be decoded: it is not a PNG, JPEG or WebP image. Its data URL has 26 "
            "characters and begins with 'data:image/png;base64,AAAA': send the whole file in base64"
        )
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.0\.image_url\.url is an image.*truncated"):
        await answers.answer(ChatRequest(messages=(shown(cut, "a"),)))


@pytest.mark.anyio
async def test_the_rollouts_of_the_service_have_their_images(tmp_path: Path) -> None:
    """Pictures of two colours have the same tokens, so only the images distinguish the rollouts."""
    model = make_image_model(tmp_path / "seeing")
    chat = ChatTemplate(tiny_processor().tokenizer, images_of(model))
    service = EpisodeService(
        chat, SamplingParams(max_tokens=2), token=TOKEN, model="seeing", max_episodes=2, idle_timeout_s=60.0
    )
    async with serving(model) as endpoint:
        await service.attach([endpoint])
        server = InLoopServer(service.app(), bind("127.0.0.1", 0))
        own = {"authorization": f"Bearer {TOKEN}"}
        async with (
            contextlib.aclosing(server),
            httpx.AsyncClient(base_url=await server.started(), headers=own, trust_env=False, timeout=60) as client,
        ):
            for colour in (RED, BLUE):
                made = (await client.post("/episodes")).json()
                body = {"messages": [shown(picture(colour), "what?")]}
                assert (await client.post(made["openai_url"] + "/chat/completions", json=body)).status_code == 200
                finished = await client.post(f"/episodes/{made['key']}/finish", json={"reward": 1.0})
                (rollout,) = finished.json()["rollouts"]
                assert rollout["prompt_token_ids"] == [*[IMAGE] * 16, *b"what?\n"]
                assert rollout["images"] == [{"url": picture(colour), "start": 0, "num_tokens": 16}]
                again = await client.post(f"/episodes/{made['key']}/finish", json={"reward": 1.0})
                assert again.content == finished.content


@pytest.mark.anyio
async def test_an_agent_that_shows_images_is_recorded_with_them(tmp_path: Path) -> None:
    """Two requests in OpenAI's format, of which the second continues the first: one rollout, with both images."""
    model = make_image_model(tmp_path / "seeing")
    images = images_of(model)
    async with serving(model) as endpoint:

        async def generate(request: GenerateRequest) -> Completion:
            (completion,) = (await endpoint.generate(request)).completions
            return completion

        chat = ChatTemplate(tiny_processor().tokenizer, images)
        episode = PlayingEpisode("one", 0, chat, generate, SamplingParams(max_tokens=6), max_tokens=200)
        answers = Answers(episode)
        messages = [shown(picture(RED), "what?")]
        first = await answers.answer(ChatRequest(model="seeing", messages=tuple(messages)))
        messages += [{"role": "assistant", "content": first.text}, shown(picture(BLUE), "and this?")]
        await answers.answer(ChatRequest(model="seeing", messages=tuple(messages)))
    calls = episode.recording.calls
    assert [len(call.images) for call in calls] == [1, 2]
    reference, num_compared = Reference(model), 0
    for call in calls:
        request = GenerateRequest(request_id="x", prompt_token_ids=call.prompt_token_ids, images=call.images)
        if call.prompt_token_ids.count(IMAGE) == 16 * len(call.images):  # none was sampled
            ids = call.completion.token_ids
            end = ids.index(IMAGE) if IMAGE in ids else len(ids)
            compared = call.completion.model_copy(
                update={"token_ids": ids[:end], "logprobs": call.completion.logprobs[:end]}
            )
            assert end == 0 or reference.gap(request, compared) < TOLERANCE
            num_compared += end
    assert num_compared > 0
