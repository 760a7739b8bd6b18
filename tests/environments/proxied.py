"""Episodes behind a proxy, as tests play them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from inflight.contracts import InferenceEndpoint
from inflight.environments.playing import Generate, PlayingEpisode, Stream
from inflight.environments.proxy.run_server import ProxyServer
from inflight.environments.transcripts import ChatTemplate
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint
from inflight.types import OBSERVED
from inflight.wire import Completion, CompletionChunk, GenerateRequest, SamplingParams, VersionSpan
from tests.environments.tokenizers import tokenizer
from tests.servers import ServerProcess

SETTINGS = SamplingParams(max_tokens=12)


@dataclass(frozen=True)
class Open:
    """An episode that is being played, and the official client of its URL."""

    episode: PlayingEpisode
    url: str
    client: openai.AsyncOpenAI

    @property
    def key(self) -> str:
        return self.url.split("/")[-2]


def episode_on(
    endpoint: InferenceEndpoint,
    template: ChatTemplate,
    proxy: ProxyServer,
    *,
    settings: SamplingParams = SETTINGS,
    max_tokens: int = 1000,
    number: int = 0,
    streams: bool = True,
) -> PlayingEpisode:
    sampling_endpoint = SamplingEndpoint(endpoint)

    async def generate(request: GenerateRequest) -> Completion:
        (completion,) = await sampling_endpoint.sample(request)
        return completion

    return PlayingEpisode(
        f"test-{number}",
        number,
        template,
        generate,
        settings,
        max_tokens,
        proxy=proxy.serve,
        stream=sampling_endpoint.stream if streams else None,
    )


def scripted(
    template: ChatTemplate,
    proxy: ProxyServer,
    says: Callable[[int, Sequence[int]], tuple[int, ...]],
    *,
    end: int,
    streams: bool = False,
    max_tokens: int = 4000,
) -> PlayingEpisode:
    """Return an episode whose turns are given: ``says`` the tokens of turn i behind a prompt. ``end`` ends a turn."""
    num_turns = 0

    def completion(request: GenerateRequest) -> Completion:
        nonlocal num_turns
        said = says(num_turns, request.prompt_token_ids)
        num_turns += 1
        return Completion(
            index=0,
            token_ids=said,
            logprobs=tuple(-(num_turns + i / 1000) for i in range(len(said))),
            version_spans=(VersionSpan(version=num_turns, start=0, end=len(said)),),
            finish_reason="stop" if said[-1] == end else "length",
        )

    async def generate(request: GenerateRequest) -> Completion:
        return completion(request)

    async def stream(request: GenerateRequest) -> Any:
        whole = completion(request)
        for i, token_id in enumerate(whole.token_ids):
            yield CompletionChunk(
                request_id=request.request_id,
                index=0,
                start=i,
                token_ids=(token_id,),
                logprobs=(whole.logprobs[i],),
                version=whole.version_spans[0].version,
                finish_reason=whole.finish_reason if i + 1 == whole.num_tokens else None,
            )

    generates: Generate = generate
    chunks: Stream = stream
    return PlayingEpisode(
        "scripted",
        0,
        template,
        generates,
        SamplingParams(max_tokens=200),
        max_tokens,
        proxy=proxy.serve,
        stream=chunks if streams else None,
    )


@contextlib.asynccontextmanager
async def opened(episode: PlayingEpisode) -> AsyncIterator[Open]:
    """Serve an episode, to the official client too."""
    url = await episode.openai_url()
    async with openai.AsyncOpenAI(
        base_url=url,
        api_key="unused",
        timeout=60,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    ) as client:
        try:
            yield Open(episode, url, client)
        finally:
            await episode.aclose()


async def post(url: str, path: str, body: Any, **headers: str) -> httpx.Response:
    """Post JSON, or bytes as they are, beside the base URL of an episode."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(
            url.removesuffix("/v1") + path, content=content, headers={"content-type": "application/json", **headers}
        )


def check_every_token_is_trained_once(episode: PlayingEpisode) -> None:
    """Compare the rollouts with a plain reading of the record: each sampled token once, as it was sampled."""
    rollouts = episode.played(1.0).rollouts(0, 1.0)
    wanted = sorted(
        (call.prompt_token_ids, call.completion.token_ids, call.completion.logprobs, versions_of(call.completion))
        for call in episode.recording.calls
    )
    found = []
    for rollout in rollouts:
        stream = (*rollout.prompt_token_ids, *rollout.completion_token_ids)
        versions, num_prompt = rollout.token_versions(), len(rollout.prompt_token_ids)
        for turn in rollout.turns:
            found.append(
                (
                    stream[: num_prompt + turn.start],
                    tuple(rollout.completion_token_ids[turn.start : turn.end]),
                    tuple(rollout.behaviour_logprobs[turn.start : turn.end]),
                    tuple(versions[turn.start : turn.end]),
                )
            )
        num_sampled = sum(turn.end - turn.start for turn in rollout.turns)
        assert sum(version != OBSERVED for version in versions) == num_sampled
    assert sorted(found) == wanted


def versions_of(completion: Completion) -> tuple[int, ...]:
    return tuple(span.version for span in completion.version_spans for _ in range(span.start, span.end))


@functools.cache
def qwen() -> tuple[Any, ChatTemplate]:
    built = tokenizer("qwen3_instruct_2507")
    return built, ChatTemplate(built)


@functools.cache
def thinking_qwen() -> tuple[Any, ChatTemplate]:
    """Return the same with a chat template that opens the reasoning of each answer."""
    built = tokenizer("qwen3_instruct_2507")
    built.chat_template += "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
    return built, ChatTemplate(built)


def on_engine(
    server: ServerProcess, model: Path, play: Callable[[Open], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    """Play one episode on the server."""

    async def run() -> None:
        endpoint = HttpEndpoint(server.url)
        async with contextlib.aclosing(endpoint), ProxyServer("tiny") as proxy:
            async with opened(episode_on(endpoint, ChatTemplate(load_tokenizer(model)), proxy, **settings)) as it:
                await play(it)
            check_every_token_is_trained_once(it.episode)

    asyncio.run(asyncio.wait_for(run(), 90))


def on_script(
    turns: list[str],
    play: Callable[[Open], Coroutine[Any, Any, None]],
    *,
    streams: bool = False,
    ends: bool = True,
    trains_on_all: bool = True,
    model: Callable[[], tuple[Any, ChatTemplate]] = qwen,
) -> None:
    """Play one episode whose turns are these texts, and check that each sampled token is trained on once."""
    built, template = model()

    def says(number: int, prompt: Any) -> tuple[int, ...]:
        said = tuple(built(turns[number], add_special_tokens=False)["input_ids"])
        return (*said, built.eos_token_id) if ends else said

    async def run() -> None:
        async with ProxyServer("scripted") as proxy:
            async with opened(scripted(template, proxy, says, end=built.eos_token_id, streams=streams)) as it:
                await play(it)
            if trains_on_all:
                check_every_token_is_trained_once(it.episode)

    asyncio.run(asyncio.wait_for(run(), 60))
