"""Episodes with a real tokenizer and chat template, in which a function states what the model samples."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from inflight.contracts import Environment
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, play
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.types import TaskItem
from inflight.wire import Completion, GenerateRequest, SamplingParams, VersionSpan
from tests.environments.tokenizers import tokenizer


@functools.cache
def _made(template: str, added: tuple[str, ...] = ()) -> tuple[Any, ChatTemplate]:
    built = tokenizer(template)
    built.add_tokens([*added])
    return built, ChatTemplate(built)


def scripted_episode(
    says: Callable[[str], str], *, template: str = "qwen3", seed: int = 0, added: tuple[str, ...] = ()
) -> PlayingEpisode:
    """Return an episode whose every turn is what ``says`` makes of the prompt's text, and the end of the turn.

    The texts ``added`` are tokens. All tokens of turn ``i`` are of version ``i``, from 0, with logprobs of -1/8.
    """
    built, chat = _made(template, added)
    version = iter(range(10_000))

    async def generate(request: GenerateRequest) -> Completion:
        said = says(built.decode(list(request.prompt_token_ids), skip_special_tokens=False))
        token_ids = (*built(said, add_special_tokens=False)["input_ids"], built.eos_token_id)
        return Completion(
            index=0,
            token_ids=token_ids,
            logprobs=(-0.125,) * len(token_ids),
            version_spans=(VersionSpan(version=next(version), start=0, end=len(token_ids)),),
            finish_reason="stop",
        )

    return PlayingEpisode("scripted", seed, chat, generate, SamplingParams(), max_tokens=100_000)


def play_scripted(
    environment: Environment,
    index: int,
    says: Callable[[str], str],
    *,
    template: str = "qwen3",
    seed: int = 0,
    timeout_s: float = 10.0,
) -> PlayedEpisode:
    """Play one episode of an environment."""
    item: TaskItem = environment.item(index)
    return asyncio.run(_played(environment, item, says, template, seed, timeout_s))


async def _played(
    environment: Environment, item: TaskItem, says: Callable[[str], str], template: str, seed: int, timeout_s: float
) -> PlayedEpisode:
    async with aclosing(PlayLoop()) as loop:
        return await play(environment, item, scripted_episode(says, template=template, seed=seed), loop, timeout_s)


def text_of(played: PlayedEpisode, call: int, *, template: str = "qwen3") -> str:
    """Return the prompt of a call as text."""
    built, _ = _made(template)
    return str(built.decode(list(played.calls[call].prompt_token_ids), skip_special_tokens=False))
