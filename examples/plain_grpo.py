"""GRPO in plain PyTorch, for the owner of a loop: a transformers model, AdamW, and three calls of inflight.

inflight tiny-model models/tiny
INFLIGHT_TOKEN=secret inflight serve models/tiny
INFLIGHT_TOKEN=secret python examples/plain_grpo.py models/tiny http://127.0.0.1:8000

A vLLM or SGLang server's own address works as well: vllm+http://127.0.0.1:8000, sglang+http://127.0.0.1:30000.
"""

import os
import sys
from concurrent.futures import Future

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import (
    GenerateRequest,
    InferenceEndpoint,
    ModuleWeights,
    SamplingParams,
    WeightPublisher,
    grpo_loss,
    publish_weights,
)
from inflight.wire import Completion, GenerateResponse

PROMPTS = ["first", "second", "third", "fourth"]
SAMPLING = SamplingParams(n=8, max_tokens=128, temperature=1.0)


def reward(text: str) -> float:
    return text.count("e") / max(1, len(text))


def collate(sequences: list[tuple[list[int], Completion]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, behaviour logprobs and mask [B, T], padded on the right."""
    tokens = [torch.tensor([*prompt, *completion.token_ids]) for prompt, completion in sequences]
    logprobs = [torch.tensor([0.0] * len(prompt) + list(completion.logprobs)) for prompt, completion in sequences]
    mask = [torch.tensor([0] * len(prompt) + [1] * len(completion.token_ids)) for prompt, completion in sequences]
    return pad_sequence(tokens, True), pad_sequence(logprobs, True), pad_sequence(mask, True)


def train_on(model: torch.nn.Module, sequences: list[tuple[list[int], Completion]], rewards: torch.Tensor) -> None:
    """Accumulate the gradient of one step; rewards are [prompts, completions]."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    tokens, behaviour_logprobs, mask = (tensor.to(model.device) for tensor in collate(sequences))
    logits = model(input_ids=tokens).logits[:, :-1].float() / SAMPLING.temperature
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    advantages = advantages.flatten().to(model.device)
    grpo_loss(logprobs, behaviour_logprobs[:, 1:], advantages, mask[:, 1:]).loss.backward()


def main(path: str, url: str, num_steps: int = 5) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    token = os.environ.get("INFLIGHT_TOKEN")

    def submit(publisher: WeightPublisher, endpoint: InferenceEndpoint, step: int) -> list[Future[GenerateResponse]]:
        """Start the requests of a step; they continue whatever this thread does."""
        requests = [
            GenerateRequest(request_id=f"{step}-{i}", prompt_token_ids=tuple(prompt), sampling=SAMPLING)
            for i, prompt in enumerate(prompts)
        ]
        return [publisher.start(endpoint.generate, request) for request in requests]

    with WeightPublisher.connect([url], run_id="plain-grpo", token=token) as publisher:
        ((endpoint, capabilities),) = publisher.endpoints.items()
        weights = ModuleWeights(model, wire_dtype=capabilities.dtype)
        publish_weights(weights, publisher)  # the server may still serve the weights of an earlier run
        running = submit(publisher, endpoint, 0)
        for step in range(num_steps):
            responses = [future.result() for future in running]
            # The requests of the next step are sampled while we train, and continue while weights change.
            running = submit(publisher, endpoint, step + 1) if step + 1 < num_steps else []
            completions = [completion for response in responses for completion in response.completions]
            texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            rewards = torch.tensor([reward(text) for text in texts]).view(len(prompts), SAMPLING.n)
            owners = [prompt for prompt in prompts for _ in range(SAMPLING.n)]
            train_on(model, list(zip(owners, completions, strict=True)), rewards)
            optimizer.step()
            optimizer.zero_grad()
            weights.version += 1
            report = publish_weights(weights, publisher, in_flight="keep")
            num_mixed = sum(len(completion.version_spans) > 1 for completion in completions)
            print(
                f"version {weights.version}: reward {rewards.mean():.3f}, paused {1000 * report.spans.pause_s:.1f} ms, "
                f"{num_mixed} of {len(completions)} completions by more than one version"
            )


if __name__ == "__main__":
    main(*sys.argv[1:3])
