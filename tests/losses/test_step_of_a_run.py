"""From the groups of a run to the plan of its trainer: what denominators count when completions are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from inflight.losses import PRESETS, prepare
from inflight.rollouts import MaxLag
from inflight.rollouts.packing import Packing
from inflight.run.ranks.messages import Train, micro_batches_of
from inflight.run.ranks.rank import prepare_step
from inflight.run.sampling.batches import frames_of, make_batch
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan
from tests.channels import asked
from tests.losses.reference import LOSSES, Token
from tests.losses.steps import sequences_of


def rollout(reward: float, *versions: int) -> Rollout:
    """A completion with a token of each version."""
    spans = [VersionSpan(version=version, start=i, end=i + 1) for i, version in enumerate(versions)]
    return Rollout([1, 2], [3] * len(versions), [-1.0] * len(versions), spans, "stop", reward, 1.0)


GROUPS = [
    Group(0, 0, [rollout(1.0, 5, 5, 5), rollout(0.0, 1, 1), rollout(0.5, 1, 5), rollout(0.2, 1)]),
    Group(1, 1, [rollout(1.0, 5), rollout(0.0, 5, 5)]),
    Group(2, 2, [rollout(1.0, 0), rollout(0.0, 0, 0)]),
]
"""At version 5 and a largest lag of 2, four of eight completions have no token that is young enough."""
NUM_COMPLETIONS = 8


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "rloo", "pipelinerl", "roll_default", "dapo"])
def test_completions_that_are_too_old_count_in_a_run_as_the_paper_s_denominator_says(name: str) -> None:
    preset = PRESETS[name]
    batch = make_batch(GROUPS, 5, preset.advantages, MaxLag(max_lag=2))
    assert len(batch.samples) == NUM_COMPLETIONS - 4
    (frame,) = frames_of(batch, Packing(64, 1), publish=None)
    step, tensors = asked(frame)
    assert isinstance(step, Train)
    worker = cast(Any, SimpleNamespace(version=5, world_size=1))
    (packed,), plan = prepare_step(worker, preset.loss, micro_batches_of(step.segment_lengths, tensors), step)
    assert plan.before.num_sequences == NUM_COMPLETIONS

    logprobs_T = torch.full((packed.num_tokens,), -1.1, dtype=torch.float64)
    found_T, _ = preset.loss.gradient(packed, logprobs_T, plan)
    leaf_T = logprobs_T.clone().requires_grad_()
    packed = replace(packed, proximal_logprobs_T=logprobs_T, reference_logprobs_T=logprobs_T)
    left_out: list[list[Token]] = [[] for _ in range(NUM_COMPLETIONS - len(packed.segment_lengths))]
    LOSSES[name]([*sequences_of(packed, leaf_T), *left_out]).backward()
    assert leaf_T.grad is not None
    torch.testing.assert_close(found_T, leaf_T.grad, rtol=1e-6, atol=1e-9)  # float32 on the way
    assert found_T.abs().max() > 1e-5


def test_a_rank_without_data_is_sent_an_empty_micro_batch_and_counts_nothing() -> None:
    batch = make_batch(GROUPS[:1], 5, "mean", MaxLag(max_lag=2))
    assert len(batch.samples) == 2
    frames = frames_of(batch, Packing(5, 3), publish=None)
    rows = []
    for frame in frames:
        step, tensors = asked(frame)
        assert isinstance(step, Train)
        rows += micro_batches_of(step.segment_lengths, tensors)
    assert [packed.loss_mask_T.any().item() for packed in rows] == [True, True, False]
    plan = prepare(PRESETS["grpo"].loss, rows)
    assert plan.before.num_sequences == 2
