"""Drafts from history: the quickstart's task over five epochs of the same prompts, trained after each batch.

``python benchmarks/drafts.py models/tiny`` samples every batch with several embedded engines in turn, in an order that
rotates: without drafts, and with each kind. Their weights and seeds are the same, so their tokens must be, and only
time can differ. Time is CPU time of this process, in which one engine works at a time with one thread; the machine's
other work therefore counts little. Writes ``benchmarks/results/drafts.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import ModuleWeights, WeightPublisher, grpo_loss, publish_weights
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.environments.transcripts import ChatTemplate
from inflight.rollouts.drafts import DraftSource
from inflight.rollouts.tasks import load_task
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import Completion, DraftHistory, GenerateRequest, GenerateResponse, PromptHistory, SamplingParams
from results import write_results

EPOCHS, PROMPTS, PROMPTS_PER_BATCH, GROUP_SIZE, MAX_TOKENS = 5, 32, 8, 8, 160
LEARNING_RATE = 1e-4
KINDS = ("off", "history", "history, weighted by reward", "siblings", "both")

Prompt = tuple[int, ...]
Answers = list[tuple[Prompt, Sequence[Completion], list[float]]]


def source_of(kind: str) -> DraftSource | None:
    if kind == "off":
        return None
    if kind == "history, weighted by reward":
        return DraftSource("history", reward_weight=1.0)
    return DraftSource(kind)  # type: ignore[arg-type]


class Measured:
    """One engine, and what it cost by epoch."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind = kind
        self.endpoint: EmbeddedEndpoint = load_endpoint(
            path,
            name=kind,
            device="cpu",
            max_concurrent=PROMPTS_PER_BATCH * GROUP_SIZE,
            drafts=source_of(kind),
        )
        self.rows: list[dict[str, Any]] = []
        self.batch_s: list[float] = []

    def sample(self, publisher: WeightPublisher, requests: Sequence[GenerateRequest]) -> list[GenerateResponse]:
        before = self.endpoint.stats()
        started, started_at = time.process_time(), time.perf_counter()
        futures = [publisher.start(self.endpoint.generate, request) for request in requests]
        responses = [future.result() for future in futures]
        cpu_s, wall_s = time.process_time() - started, time.perf_counter() - started_at
        after = self.endpoint.stats()
        row = self.rows[-1]
        for name in ("num_tokens", "num_steps", "num_drafted", "num_accepted", "num_verifications"):
            row[name] = row.get(name, 0) + getattr(after, name) - getattr(before, name)
        row["cpu_s"] = row.get("cpu_s", 0.0) + cpu_s
        row["wall_s"] = row.get("wall_s", 0.0) + wall_s
        self.batch_s.append(cpu_s)
        return responses


def train(model: Any, optimizer: torch.optim.Optimizer, answers: Answers) -> None:
    tokens, behaviour, mask, advantages = [], [], [], []
    for prompt, completions, rewards in answers:
        scores = torch.tensor(rewards)
        advantages += ((scores - scores.mean()) / (scores.std() + 1e-4)).tolist()
        for completion in completions:
            tokens.append(torch.tensor([*prompt, *completion.token_ids]))
            behaviour.append(torch.tensor([0.0] * len(prompt) + list(completion.logprobs)))
            mask.append(torch.tensor([0] * len(prompt) + [1] * len(completion.token_ids)))
    ids = pad_sequence(tokens, True)
    logits = model(input_ids=ids).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    behaviour_BT, mask_BT = pad_sequence(behaviour, True)[:, 1:], pad_sequence(mask, True)[:, 1:]
    grpo_loss(logprobs, behaviour_BT, torch.tensor(advantages), mask_BT).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def history_of(answers: Answers) -> DraftHistory:
    return DraftHistory(
        entries=tuple(
            PromptHistory(
                prompt_token_ids=prompt, completions=tuple(c.token_ids for c in completions), rewards=tuple(rewards)
            )
            for prompt, completions, rewards in answers
        )
    )


def measure(path: Path, kinds: Sequence[str], seed: int) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = load_task("spell_backward", {}, seed)
    template = ChatTemplate(tokenizer)
    items = [task.item(i) for i in range(PROMPTS)]
    engines = [Measured(path, kind) for kind in kinds]
    weights, rewards_by_epoch, num_batches = ModuleWeights(model), [], 0
    with WeightPublisher([it.endpoint for it in engines], ProcessGroupSender(), run_id="drafts") as publisher:
        for epoch in range(EPOCHS):
            rewards_by_epoch.append([])
            for it in engines:
                it.rows.append({"epoch": epoch + 1})
            for first in range(0, PROMPTS, PROMPTS_PER_BATCH):
                part = items[first : first + PROMPTS_PER_BATCH]
                requests = [
                    GenerateRequest(
                        request_id=f"{epoch}-{item.index}",
                        prompt_token_ids=template.opening([{"role": "user", "content": item.prompt}]).token_ids,
                        sampling=SamplingParams(
                            n=GROUP_SIZE, max_tokens=MAX_TOKENS, seed=seed + 1000 * epoch + item.index
                        ),
                    )
                    for item in part
                ]
                turn = num_batches % len(engines)
                sampled = {it.kind: it.sample(publisher, requests) for it in (*engines[turn:], *engines[:turn])}
                num_batches += 1
                responses = sampled[kinds[0]]
                for kind, others in sampled.items():
                    for one, other in zip(responses, others, strict=True):
                        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions], kind
                answers: Answers = []
                for item, request, response in zip(part, requests, responses, strict=True):
                    texts = tokenizer.batch_decode(
                        [c.token_ids for c in response.completions], skip_special_tokens=True
                    )
                    rewards = [task.score(item, text) for text in texts]
                    answers.append((request.prompt_token_ids, response.completions, rewards))
                    rewards_by_epoch[-1] += rewards
                for it in engines:
                    if it.kind.startswith(("history", "both")):
                        publisher.start(it.endpoint.record_history, history_of(answers)).result()
                train(model, optimizer, answers)
                weights.version += 1
                report = publish_weights(weights, publisher, in_flight="keep")
                assert report is not None
                assert report.applied_everywhere, report.summary()
    batches_per_epoch = PROMPTS // PROMPTS_PER_BATCH
    plain = engines[0]
    for it in engines:
        ratios = [off / own for off, own in zip(plain.batch_s, it.batch_s, strict=True)]
        for row, epoch_rewards in zip(it.rows, rewards_by_epoch, strict=True):
            first = (row["epoch"] - 1) * batches_per_epoch
            row["reward"] = statistics.fmean(epoch_rewards)
            row["speed_up"] = statistics.median(ratios[first : first + batches_per_epoch])
            row["tokens_per_cpu_s"] = row["num_tokens"] / row["cpu_s"]
            if row["num_verifications"]:
                row["tokens_per_verification"] = 1 + row["num_accepted"] / row["num_verifications"]
    return {"seed": seed, "kinds": {it.kind: it.rows for it in engines}}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), help="the first is what the others are compared with"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.model, arguments.kinds, arguments.seed)
    for kind, rows in result["kinds"].items():
        for row in rows:
            print(kind, {name: round(value, 2) for name, value in row.items()}, flush=True)
    write_results("drafts", result)


if __name__ == "__main__":
    main()
