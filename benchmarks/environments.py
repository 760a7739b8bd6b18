"""Environments that a tiny model learns, most of other libraries: ``python benchmarks/environments.py tictactoe``.

First a byte-level model imitates demonstrations, which are legal but chosen at random, in conversations of the
environment itself. Then ``inflight train`` runs the example of the same name. Writes
``benchmarks/results/environments-NAME.json``: the mean reward of every step, and what it took. ``--only-model`` stops
after the model, which the example needs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from inflight.contracts import Environment
from inflight.engines.embedded.tiny import EOS, TinyShape, byte_tokenizer, create_tiny_model, save_tiny_model
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, play
from inflight.environments.transcripts import ChatTemplate
from inflight.rollouts.tasks import load_task
from inflight.run.config import load_config
from inflight.types import Rollout, TaskItem
from inflight.wire import Completion, GenerateRequest, SamplingParams, VersionSpan
from results import write_results

ROOT = Path(__file__).parents[1]
NUM_DEMONSTRATIONS = 1000
Says = Callable[[TaskItem, str, random.Random], str]
"""What a demonstration says to an item, after the text so far."""


def random_cell(item: TaskItem, text: str, rng: random.Random) -> str:
    """Take any free field of the board that was shown last."""
    cells = text.splitlines()[-1]
    return f"[{rng.choice([i for i, cell in enumerate(cells) if cell == '.'])}]"


def random_number(item: TaskItem, text: str, rng: random.Random) -> str:
    """Guess any number that has not been guessed."""
    guessed = {int(found) for found in re.findall(r"\[(\d+)\]", text)}
    return f"[{rng.choice(sorted({*range(1, 21)} - guessed))}]"


def random_guess(item: TaskItem, text: str, rng: random.Random) -> str:
    """Call the tool with any number, until it is right."""
    if text.splitlines()[-1] == "right":
        return "done"
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {rng.randrange(10)}}}}}</tool_call>'


_VAULT = ("--task", "tool_task:vault_turns", "--style", "answer")


@dataclass(frozen=True)
class Case:
    """One example, and how its model is made."""

    example: str
    says: Says | tuple[str, ...]
    """What demonstrations say, or the arguments of ``inflight tiny-model``."""
    num_steps: int = 600
    shape: TinyShape = field(default_factory=TinyShape)
    overrides: tuple[str, ...] = ()


def tool_agent(api: str) -> Case:
    """Return the tool task, played by a program that calls an API."""
    params = f'{{ command = ["python", "examples/tool_agent.py", "{api}"], tasks = "tool_task:vault_item" }}'
    directory = f"runs/tool_agent_{api}"
    return Case("tool_agent", _VAULT, overrides=("--task.params", params, "--run.directory", directory))


CASES = {
    "tictactoe": Case("textarena", random_cell),
    "guess_number": Case("guess_number", random_number),
    "retry": Case("retry", ()),
    "tool_task": Case("tool_task", _VAULT),
    "tool_agent": tool_agent("chat"),
    "tool_agent_messages": tool_agent("messages"),
    "tool_agent_responses": tool_agent("responses"),
    "trl": Case("trl_environment", random_guess, num_steps=400),
    "harbor": Case(
        "harbor",
        ("--task", "harbor_turns:HarborTurns", "--style", "answer", "--steps", "800", "--wrong-fraction", "0"),
    ),
    "pictures": Case(
        "pictures", ("--images", "--task", "pictures:Pictures", "--wrong-fraction", "0.5", "--steps", "150")
    ),
}


def demonstrations(environment: Environment, says: Says, seed: int) -> Iterator[Rollout]:
    """Yield what is said in episodes of items that a run does not reach, for ever."""
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer)
    rng = random.Random(seed)

    async def one(index: int) -> list[Rollout]:
        item = environment.item(index)

        async def generate(request: GenerateRequest) -> Completion:
            text = re.sub("<eos>", "", tokenizer.decode(list(request.prompt_token_ids)))
            token_ids = (*says(item, text, rng).encode(), EOS)
            return Completion(
                index=0,
                token_ids=token_ids,
                logprobs=(0.0,) * len(token_ids),
                version_spans=(VersionSpan(version=0, start=0, end=len(token_ids)),),
                finish_reason="stop",
            )

        episode = PlayingEpisode(str(index), index, template, generate, SamplingParams(), max_tokens=100_000)
        async with aclosing(PlayLoop()) as loop:
            played = await play(environment, item, episode, loop, 60.0)
        assert played.failure is None, played.failure
        return played.rollouts(0, 1.0)

    index = 1_000_000
    while True:
        yield from asyncio.run(one(index))
        index += 1


def make_model(case: Case, path: Path) -> None:
    """Write a model that imitates the demonstrations of a case."""
    if isinstance(case.says, tuple):
        command = [sys.executable, "-m", "inflight", "tiny-model", str(path), *case.says]
        folders = os.pathsep.join(filter(None, (str(ROOT / "examples"), os.environ.get("PYTHONPATH"))))
        subprocess.run(command, env={**os.environ, "PYTHONPATH": folders}, check=True)
        return
    config = load_config(ROOT / "examples" / f"{case.example}.toml", [])
    environment = load_task(config.task.name, config.task.params, 0)
    assert isinstance(environment, Environment)
    rng = random.Random(0)
    shown = list(itertools.islice(demonstrations(environment, case.says, 0), NUM_DEMONSTRATIONS))
    model = create_tiny_model(case.shape, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(case.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, max(0.03, (1 - step / case.num_steps) / 0.4))
        loss = imitation_loss(model, rng.sample(shown, 16), case.shape.max_model_len)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"imitation step {step + 1} of {case.num_steps}: loss {loss.item():.3f}", flush=True)
    save_tiny_model(model.eval(), path)


def imitation_loss(model: Any, rollouts: list[Rollout], context: int) -> torch.Tensor:
    """Return the mean cross-entropy of what was said; observations are not imitated."""
    rows = []
    for rollout in rollouts:
        num_prompt = len(rollout.prompt_token_ids)
        token_ids = [*rollout.prompt_token_ids, *rollout.completion_token_ids][:context]
        said = {num_prompt + i for turn in rollout.turns for i in range(turn.start, turn.end)}
        rows.append((token_ids, [i in said for i in range(len(token_ids))]))
    longest = max(len(token_ids) for token_ids, _ in rows)
    inputs = torch.full((len(rows), longest), EOS)
    chosen = torch.zeros((len(rows), longest), dtype=torch.bool)
    for i, (token_ids, is_said) in enumerate(rows):
        inputs[i, : len(token_ids)] = torch.tensor(token_ids)
        chosen[i, : len(token_ids)] = torch.tensor(is_said)
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state[:, :-1]
    return F.cross_entropy(model.get_output_embeddings()(hidden[chosen[:, 1:]]).float(), inputs[:, 1:][chosen[:, 1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--only-model", action="store_true")
    arguments, overrides = parser.parse_known_args()
    case = CASES[arguments.name]
    sys.path.append(str(ROOT / "examples"))
    example = ROOT / "examples" / f"{case.example}.toml"
    overrides = [*case.overrides, *overrides]
    config = load_config(example, overrides)
    if arguments.only_model or not config.model.path.exists():
        make_model(case, config.model.path)
    if arguments.only_model:
        return
    paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "inflight", "train", str(example), *overrides],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        check=True,
    )
    rows = [json.loads(line) for line in (config.run.directory / "metrics.jsonl").read_text().splitlines()]
    record = {
        "run_s": round(time.monotonic() - started, 1),
        "rewards": [row["reward"] for row in rows],
    }
    write_results(f"environments-{arguments.name}", record)
    known = [reward for reward in record["rewards"] if reward is not None]
    first, last = known[:10], known[-10:]
    print(
        f"{arguments.name}: mean reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f} "
        f"in {len(rows)} steps, {record['run_s']} s"
    )


if __name__ == "__main__":
    main()
