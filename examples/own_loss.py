"""A loss composed of pieces, applied to two micro-batches of one step, with the head in one pass and in two passes."""

from __future__ import annotations

import torch

from inflight.losses import (
    Band,
    Kl,
    PolicyLoss,
    PpoClip,
    SegmentMean,
    Truncate,
    chunked_logprobs,
    collate,
    metric_values,
    one_pass,
    prepare,
    preset,
)
from inflight.types import Rollout, Sample
from inflight.wire import VersionSpan

loss = PolicyLoss(
    gate=PpoClip(high=0.28),
    between="trainer/proximal",
    corrections=(Truncate(high=2.0), Band(level="segment_mean", low=0.5, high=2.0)),
    penalties=(Kl(coefficient=0.01),),
    aggregation=SegmentMean(),
)


def sample(num_tokens: int, advantage: float, generator: torch.Generator) -> Sample:
    """Return a completion of random tokens."""
    tokens = torch.randint(64, (3 + num_tokens,), generator=generator).tolist()
    logprobs = (-3 * torch.rand(num_tokens, generator=generator)).tolist()
    rollout = Rollout(tokens[:3], tokens[3:], logprobs, [VersionSpan(version=0, start=0, end=num_tokens)], "stop", 1, 1)
    return Sample(rollout, [advantage] * num_tokens, [True] * num_tokens, reference_logprobs=logprobs)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    step = [collate([sample(5, 1.0, generator), sample(9, -1.0, generator)]), collate([sample(7, 0.5, generator)])]
    plan = prepare(loss, step, current_version=1)
    for batch in step:
        trainer_logprobs = torch.full((batch.num_tokens,), -1.5, requires_grad=True)
        output = loss(batch, trainer_logprobs, plan)
        output.loss.backward()
        print(f"loss {output.loss.item():+.4f}, kept {metric_values(output.metrics)['kept_fraction']:.2f}")

    batch = step[0]
    rows = batch.loss_mask_T.nonzero().squeeze(1)
    hidden = torch.randn(len(rows), 32, generator=generator).requires_grad_()
    weight = torch.randn(64, 32, generator=generator).requires_grad_()
    targets, temperature = batch.token_ids_T[rows], batch.temperature_T[rows]

    dapo = preset("dapo").loss
    plan = prepare(dapo, [batch])
    logprobs = chunked_logprobs(hidden, weight, targets, temperature)
    trainer_logprobs = torch.zeros(batch.num_tokens).index_put((rows,), logprobs)
    two_passes = dapo(batch, trainer_logprobs, plan).loss
    in_one_pass = one_pass(hidden, weight, targets, temperature, dapo.on_targets(batch, plan))
    in_one_pass.backward()
    print(f"dapo in two passes {two_passes.item():+.4f}, in one {in_one_pass.item():+.4f}")


if __name__ == "__main__":
    main()
