"""TRL's GRPOTrainer with three calls of inflight: it samples from any inference server and uses inflight's loss.

inflight tiny-model models/tiny
INFLIGHT_TOKEN=secret inflight serve models/tiny
INFLIGHT_TOKEN=secret python examples/trl_trainer.py models/tiny http://127.0.0.1:8000

A vLLM or SGLang server's own address works as well: vllm+http://127.0.0.1:8000, sglang+http://127.0.0.1:30000.
TRL waits for the completions of a step before it trains, so its own are never in flight while weights change; those of
other clients of the server are.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from inflight import ModuleWeights, WeightPublisher, grpo_loss, publish_weights
from inflight.wire import GenerateRequest, SamplingParams

PROMPTS = ["first", "second", "third", "fourth"]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


def rollouts_from(publisher: WeightPublisher) -> Callable[..., dict[str, list[Any]]]:
    """Return a ``rollout_func`` for TRL: its completions come from the publisher's endpoint."""
    (endpoint,) = publisher.endpoints

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        args, step = trainer.args, trainer.state.global_step
        sampling = SamplingParams(max_tokens=args.max_completion_length, temperature=args.temperature)
        prompt_ids = trainer.processing_class(prompts).input_ids
        requests = [
            GenerateRequest(request_id=f"{step}-{i}", prompt_token_ids=tuple(ids), sampling=sampling)
            for i, ids in enumerate(prompt_ids)
        ]
        futures = [publisher.start(endpoint.generate, request) for request in requests]
        completions = [future.result().completions[0] for future in futures]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [list(completion.logprobs) for completion in completions],
        }

    return rollouts


class PublishEveryStep(TrainerCallback):
    """Updates the server to the trainer's weights after each optimizer step."""

    def __init__(self, weights: ModuleWeights, publisher: WeightPublisher) -> None:
        self.weights, self.publisher = weights, publisher

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """TRL calls this when the parameters have changed."""
        self.weights.version = state.global_step
        report = publish_weights(self.weights, self.publisher, in_flight="keep")
        print(f"version {report.version}: paused {1000 * report.spans.pause_s:.1f} ms")


class BehaviourGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer with inflight's loss, whose ratios are relative to the server's logprobs."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return this micro-batch's part of the loss, a sum over tokens / tokens of the step on all ranks."""
        token_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        num_completion_tokens = inputs["completion_ids"].shape[1]
        logprobs, *_ = self._get_per_token_logps_and_entropies(model, token_ids, attention_mask, num_completion_tokens)
        # TRL counts the tokens of all ranks and of everything sampled at once, which may be for several steps.
        share = self.args.gradient_accumulation_steps / self.args.steps_per_generation
        num_tokens = inputs["num_items_in_batch"] * share
        return grpo_loss(
            logprobs,
            inputs["sampling_per_token_logps"],
            inputs["advantages"],
            inputs["completion_mask"],
            denominator=num_tokens / self.accelerator.num_processes,  # gradients are averaged over ranks
        ).loss


def main(path: str, url: str, num_steps: int = 5) -> None:
    token = os.environ.get("INFLIGHT_TOKEN")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with (
        WeightPublisher.connect([url], run_id="trl", token=token) as publisher,
        tempfile.TemporaryDirectory() as output,
    ):
        (capabilities,) = publisher.endpoints.values()
        weights = ModuleWeights(model, wire_dtype=capabilities.dtype)
        trainer = BehaviourGRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            rollout_func=rollouts_from(publisher),
            callbacks=[PublishEveryStep(weights, publisher)],
            args=GRPOConfig(
                output_dir=output,
                max_steps=num_steps,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=2,
                num_generations=8,
                max_completion_length=32,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                bf16=False,
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:3])
