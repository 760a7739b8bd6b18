"""Gradients of episodes of several turns, packed, against a plain loop over the tokens of each turn in float64."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.losses import PRESETS, collate, prepare
from inflight.rollouts import MaxLag, pack
from inflight.run.sampling.batches import make_batch
from inflight.types import Group, Rollout, Turn
from inflight.wire import VersionSpan
from inflight_fsdp import create_worker
from tests.losses.reference import LOSSES, Token
from tests.models import make_model
from tests.worker.worker_cases import VOCAB, saved_gradients, settings

VERSION, MAX_LAG = 5, 2


def played(rng: random.Random, episode: int, num_turns: int) -> Rollout:
    """A stream of turns of one to four tokens, by versions 1 to 5, with observations of one to three tokens."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    turns, spans = [], []
    for number in range(num_turns):
        if number:
            observed = rng.randint(1, 3)
            token_ids += [rng.randrange(VOCAB) for _ in range(observed)]
            logprobs += [0.0] * observed
        start = len(token_ids)
        for _ in range(rng.randint(1, 4)):
            spans.append(VersionSpan(version=rng.randint(1, 5), start=len(token_ids), end=len(token_ids) + 1))
            token_ids.append(rng.randrange(VOCAB))
            logprobs.append(-rng.uniform(3.0, 6.0))
        turns.append(Turn(start, len(token_ids), rng.choice([None, rng.random()])))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
    return Rollout(prompt, token_ids, logprobs, spans, "stop", rng.random(), 0.7, turns, episode)


def hand_made_advantages(group: Group) -> list[list[float]]:
    """The return of each turn minus the mean of the returns of the same turn, by hand; discount 0.9."""
    returns = []
    for rollout in group.rollouts:
        own = [turn.reward or 0.0 for turn in rollout.turns]
        own[-1] += rollout.reward
        returns.append([sum(0.9 ** (k - j) * own[k] for k in range(j, len(own))) for j in range(len(own))])
    result = []
    for values in returns:
        of_turns = []
        for j, value in enumerate(values):
            others = [other[j] for other in returns if j < len(other)]
            of_turns.append(value - sum(others) / len(others))
        result.append(of_turns)
    return result


@pytest.mark.parametrize("name", ["pipelinerl", "dr_grpo", "gspo"])
def test_turns_are_trained_as_a_loop_over_their_tokens_does(tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    model_path = make_model(tmp_path / "model", dtype=torch.float64, tokenizer=False)
    groups = [Group(i, i, [played(rng, e, rng.randint(1, 4)) for e in range(3)]) for i in range(2)]
    loss = PRESETS[name].loss
    batch = make_batch(groups, VERSION, "mean", MaxLag(MAX_LAG), None, "return", 0.9)
    (micro_batches,) = pack([sample.rollout.num_tokens for sample in batch.samples], 40, 1)
    packed = [collate([batch.samples[i] for i in indices]) for indices in micro_batches]
    assert len(packed) > 1
    worker = create_worker(settings(model_path))
    try:
        logprobs = [worker.forward(one) for one in packed]
        plan = prepare(
            loss,
            packed,
            trainer_logprobs=[value.detach() for value in logprobs],
            num_groups=len(groups),
            num_sequences=sum(len(group.rollouts) for group in groups),
        )
        for one, value in zip(packed, logprobs, strict=True):
            gradient, _ = loss.gradient(one, value.detach(), plan)
            worker.backward((value * gradient).sum())
        worker.step()
        worker.save(tmp_path / "saved")
        found = saved_gradients(tmp_path / "saved")
    finally:
        worker.close()

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="sdpa")
    sequences: list[list[Token]] = []
    for group in groups:
        for rollout, advantages in zip(group.rollouts, hand_made_advantages(group), strict=True):
            stream = [*rollout.prompt_token_ids, *rollout.completion_token_ids]
            logits = model(torch.tensor([stream]), use_cache=False).logits[0] / rollout.temperature
            tokens = []
            for turn, advantage in zip(rollout.turns, advantages, strict=True):
                for i in range(turn.start, turn.end):
                    version = next(span.version for span in rollout.version_spans if span.start <= i < span.end)
                    if VERSION - version > MAX_LAG:
                        continue
                    at = len(rollout.prompt_token_ids) + i
                    logp = torch.log_softmax(logits[at - 1], 0)[stream[at]]
                    mu = rollout.behaviour_logprobs[i]
                    lag = VERSION - version
                    tokens.append(Token(logp, mu, float(logp.detach()), 0.0, advantage, lag, group.item_index))
            sequences.append(tokens)
    LOSSES[name](sequences).backward()
    expected = {parameter: value.grad for parameter, value in model.named_parameters() if value.grad is not None}
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 1e-6
    for parameter, value in expected.items():
        # Behaviour logprobs and advantages are float32 in a micro-batch.
        torch.testing.assert_close(found[parameter], value, rtol=1e-5, atol=1e-6 * largest)
