"""Rollouts with images, and their gradient by a plain loop over sequences through transformers' own forward."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from inflight.engines.embedded.tiny_images import IMAGE
from inflight.losses import collate
from inflight.model.checkpoints import stored_names
from inflight.types import MicroBatch, Rollout, Sample, Turn
from inflight.wire import VersionSpan
from tests.pictures import BLUE, RED, Reference, images_of, picture

TEMPERATURE = 0.75


def samples(path: Path) -> list[Sample]:
    """Text, an image, two images (one behind sampled tokens), and the same tokens with other images."""
    images = images_of(path)
    rng = random.Random(0)
    made = []
    for number, urls in enumerate(
        [[picture(RED)], [], [picture(BLUE), picture(RED, size=35)], [picture(BLUE)], [picture((5, 200, 9))]]
    ):
        token_ids, placed = images.placed([97, IMAGE, 98, 10] if urls else [97, 98, 10], urls[:1])
        completion = [rng.randrange(256) for _ in range(4 + number)]
        spans = [VersionSpan(version=0, start=0, end=len(completion))]
        if urls[1:]:
            seen, later = images.placed([99, IMAGE, 10], urls[1:], start=len(token_ids) + len(completion))
            said = [rng.randrange(256) for _ in range(5)]
            start = len(completion) + len(seen)
            spans.append(VersionSpan(version=1, start=start, end=start + len(said)))
            completion += [*seen, *said]
            placed += later
        mask = [any(span.start <= i < span.end for span in spans) for i in range(len(completion))]
        rollout = Rollout(
            prompt_token_ids=token_ids,
            completion_token_ids=completion,
            behaviour_logprobs=[-1.0 if kept else 0.0 for kept in mask],
            version_spans=spans,
            finish_reason="stop",
            reward=0.0,
            temperature=TEMPERATURE,
            turns=[Turn(span.start, span.end) for span in spans],
            images=placed,
        )
        made.append(Sample(rollout, [rng.uniform(-1, 1) for _ in completion], mask, group_index=number))
    return made


def packed(path: Path, chosen: list[Sample]) -> MicroBatch:
    return collate(chosen, image_tensors=images_of(path).tensors)


def loss_of(logprobs_T: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return -(logprobs_T * batch.advantages_T.to(logprobs_T.dtype)).sum()


def plain_gradients(path: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The logprobs of all completion tokens in float64, and the gradient of their weighted sum."""
    reference = Reference(path, torch.float64)
    total, found = torch.zeros((), dtype=torch.float64), []
    for sample in samples(path):
        rollout = sample.rollout
        ids = [*rollout.prompt_token_ids, *rollout.completion_token_ids]
        rows = reference.logprobs(ids, [image.url for image in rollout.images], TEMPERATURE)
        num = len(rollout.prompt_token_ids)
        own = torch.stack([rows[num - 1 + i, token] for i, token in enumerate(rollout.completion_token_ids)])
        mask = torch.tensor(sample.loss_mask)
        # The advantages of a micro-batch are float32.
        total = total - (own * mask * torch.tensor(sample.advantages, dtype=torch.float32)).sum()
        found.append(own.detach()[mask].tolist())
    total.backward()  # type: ignore[no-untyped-call]
    names = {id(p): n for n, p in reference.model.named_parameters()}
    stored = stored_names(reference.model)
    return found, {
        stored[names[id(p)]]: p.grad if p.grad is not None else torch.zeros_like(p)
        for p in reference.model.parameters()
    }
