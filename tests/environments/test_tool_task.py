"""The tool task of the examples: what its model imitates is what it is asked, and it learns."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from inflight.engines.embedded.tiny import EOS, byte_tokenizer
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, play
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.rollouts.tasks import load_task
from inflight.wire import Completion, GenerateRequest, SamplingParams, VersionSpan
from tests.run.runs import RunProcess
from tests.zygote import python

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def played(says: dict[str, str]) -> tuple[PlayedEpisode, list[str]]:
    """Play item 7 with a model that answers each rendered prompt as ``says``, or not at all; and what it was asked."""
    vault, asked = load_task("tool_task:vault", {}, 0), []
    tokenizer = byte_tokenizer()

    async def generate(request: GenerateRequest) -> Completion:
        asked.append(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
        token_ids = (*tokenizer(says.get(asked[-1], "hm"))["input_ids"], EOS)
        return Completion(
            index=0,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            version_spans=(VersionSpan(version=0, start=0, end=len(token_ids)),),
            finish_reason="stop",
        )

    async def run() -> PlayedEpisode:
        loop = PlayLoop()
        episode = PlayingEpisode("item-7", 0, ChatTemplate(tokenizer), generate, SamplingParams(), max_tokens=500)
        try:
            return await play(vault, vault.item(7), episode, loop, 10.0)
        finally:
            await loop.aclose()

    return asyncio.run(run()), asked


def demonstrations() -> dict[str, str]:
    """What a warm start imitates of item 7, by prompt as its model reads it."""
    turns = load_task("tool_task:vault_turns", {}, 0)
    items = [turns.item(7, turn) for turn in range(3)]
    return {item.prompt + "\n": item.answer for item in items}


def test_what_the_model_imitates_is_what_the_environment_asks() -> None:
    says = demonstrations()
    episode, asked = played(says)
    assert asked == [*says]
    assert episode.reward == 1.0
    assert (episode.num_rewritten, episode.failure) == (0, None)
    (rollout,) = episode.rollouts(0, 1.0)
    assert len(rollout.turns) == 3


@pytest.mark.parametrize(("num_right", "reward"), [(0, 0.0), (1, 0.25), (2, 0.5)])
def test_the_answer_cannot_be_had_without_the_tool(num_right: int, reward: float) -> None:
    says = dict([*demonstrations().items()][:num_right])
    assert played(says)[0].reward == reward


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_tiny_model_learns_the_tool_task(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "examples"))}
    model = tmp_path / "vault"
    subprocess.run(
        [
            *(python(), "-m", "inflight", "tiny-model", str(model)),
            *("--task", "tool_task:vault_turns", "--style", "answer"),
        ],
        check=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    run = RunProcess(tmp_path, model, environment=environment, config=ROOT / "examples" / "tool_task.toml")
    assert run.wait(timeout_s=900) == 0, run.output()
    assert run.summary()["last_reward"] > run.summary()["first_reward"] + 0.4
