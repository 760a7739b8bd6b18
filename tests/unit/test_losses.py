"""Losses against plain loops in float64, against exact expectations, and under any split into micro-batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import ConfigError, InvalidRequestError, NonFiniteError
from inflight.losses import (
    GRPO,
    PIPELINERL,
    PIPELINERL_PAPER,
    PRESETS,
    LossPreset,
    clipped_loss,
    empty_micro_batch,
    grpo_loss,
    reference_kl,
    reinforce_loss,
    token_weights,
)
from inflight.types import GlobalCounts, MicroBatch

LENGTHS = (5, 2, 9, 4, 1, 7)
"""Of the segments in most tests; the fifth has no target."""


def random_batch(lengths=LENGTHS, seed=0, dtype=torch.float64):
    """Segments with holes in their masks, advantages of both signs and zero, and ratios from e^-2 to e^2."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts_T = torch.cat([torch.arange(length) for length in lengths]) == 0

    def uniform(low, high):
        return low + (high - low) * torch.rand(total, generator=generator, dtype=torch.float64)

    trainer_T = uniform(-3.0, -0.1)
    advantages_T = uniform(-1.5, 1.5)
    advantages_T[uniform(0, 1) < 0.1] = 0.0
    batch = MicroBatch(
        token_ids_T=torch.zeros(total, dtype=torch.int64),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        segment_ids_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        segment_lengths=tuple(lengths),
        loss_mask_T=(uniform(0, 1) < 0.8) & ~starts_T,
        behaviour_logprobs_T=(trainer_T + uniform(-2, 2)).to(dtype),
        advantages_T=advantages_T.to(dtype),
        temperature_T=torch.ones(total),
        versions_T=torch.zeros(total, dtype=torch.int64),
        reference_logprobs_T=(trainer_T + uniform(-1, 1)).to(dtype),
    )
    return batch, trainer_T.to(dtype)


def counts_of(batch):
    masked = [batch.loss_mask_T[batch.segment_ids_T == s] for s in range(len(batch.segment_lengths))]
    return GlobalCounts(sum(int(m.sum()) for m in masked), sum(bool(m.any()) for m in masked))


def select_segments(batch, segments):
    """The micro-batch of some of the segments, and their token indices in the whole one."""
    lengths = [batch.segment_lengths[s] for s in segments]
    tokens = torch.cat([(batch.segment_ids_T == s).nonzero().squeeze(1) for s in segments])
    fields = {
        name: getattr(batch, name)[tokens]
        for name in MicroBatch.__dataclass_fields__
        if name.endswith("_T") and name != "segment_ids_T"
    }
    ids_T = torch.arange(len(segments)).repeat_interleave(torch.tensor(lengths))
    return MicroBatch(segment_ids_T=ids_T, segment_lengths=tuple(lengths), **fields), tokens


def loss_and_gradient(preset, batch, trainer_T, counts, **kwargs):
    leaf_T = trainer_T.clone().requires_grad_()
    loss = preset.loss(batch, leaf_T, counts, **kwargs).loss
    loss.backward()
    return loss.item(), leaf_T.grad


def reference_weights(batch, aggregation):
    counts = counts_of(batch)
    weights = []
    for t in range(batch.num_tokens):
        same_segment = batch.segment_ids_T == batch.segment_ids_T[t]
        targets = int(batch.loss_mask_T[same_segment].sum())
        match aggregation:
            case "token_mean":
                weight = 1 / counts.num_tokens
            case "sequence_mean":
                weight = 1 / (counts.num_sequences * max(targets, 1))
            case "sequence_sum":
                weight = 1 / counts.num_sequences
        weights.append(weight if batch.loss_mask_T[t] else 0.0)
    return weights


def reference_grpo(logprob, behaviour, advantage, low, high):
    ratio = math.exp(logprob - behaviour)
    clipped = min(max(ratio, 1 - low), 1 + high)
    unclipped_is_the_minimum = ratio * advantage <= clipped * advantage
    gradient = -advantage * ratio if unclipped_is_the_minimum else 0.0
    return -min(ratio * advantage, clipped * advantage), gradient


def reference_reinforce(logprob, behaviour, advantage, cap):
    weight = min(math.exp(logprob - behaviour), cap)
    return -weight * advantage * logprob, -weight * advantage


def reference_penalty(logprob, behaviour, reference):
    ratio, d = math.exp(logprob - behaviour), logprob - reference
    return ratio * (math.exp(-d) + d - 1), ratio * d


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("preset", [GRPO, replace(GRPO, kwargs={"clip_low": 0.1, "clip_high": 0.5}), PIPELINERL_PAPER])
def test_loss_and_gradient_equal_a_plain_loop(preset, aggregation):
    batch, trainer_T = random_batch()
    weights = reference_weights(batch, aggregation)
    expected_loss, expected_gradient = 0.0, []
    for t in range(batch.num_tokens):
        logprob, behaviour = trainer_T[t].item(), batch.behaviour_logprobs_T[t].item()
        advantage = batch.advantages_T[t].item()
        if preset.function is clipped_loss:
            value, gradient = reference_grpo(
                logprob, behaviour, advantage, preset.kwargs["clip_low"], preset.kwargs["clip_high"]
            )
        else:
            value, gradient = reference_reinforce(logprob, behaviour, advantage, preset.kwargs["cap"])
        penalty, penalty_gradient = reference_penalty(logprob, behaviour, batch.reference_logprobs_T[t].item())
        expected_loss += weights[t] * (value + 0.3 * penalty) if weights[t] else 0.0
        expected_gradient.append(weights[t] * (gradient + 0.3 * penalty_gradient))
    loss, gradient_T = loss_and_gradient(
        replace(preset, aggregation=aggregation), batch, trainer_T, counts_of(batch), reference_kl_coef=0.3
    )
    # float64 throughout: a few roundings of values of order 1.
    assert loss == pytest.approx(expected_loss, abs=1e-13)
    torch.testing.assert_close(gradient_T, torch.tensor(expected_gradient, dtype=torch.float64), rtol=0, atol=1e-13)


def test_every_branch_of_the_losses_is_reached_by_the_random_batch():
    batch, trainer_T = random_batch()
    mask_T = batch.loss_mask_T
    ratio = (trainer_T - batch.behaviour_logprobs_T)[mask_T].exp()
    positive = batch.advantages_T[mask_T] > 0
    negative = batch.advantages_T[mask_T] < 0
    for branch in (
        positive & (ratio > 1.5),
        positive & (ratio < 0.8),
        negative & (ratio > 1.5),
        negative & (ratio < 0.8),
    ):
        assert branch.any()
    assert (batch.advantages_T[mask_T] == 0).any()
    assert (ratio > 5).any()


def test_float32_loss_agrees_with_float64():
    batch, trainer_T = random_batch()
    narrow, narrow_trainer_T = random_batch(dtype=torch.float32)
    for preset in PRESETS.values():
        loss, gradient_T = loss_and_gradient(preset, narrow, narrow_trainer_T, counts_of(batch), reference_kl_coef=0.1)
        expected, expected_T = loss_and_gradient(preset, batch, trainer_T, counts_of(batch), reference_kl_coef=0.1)
        # float32 inputs are rounded at 2^-24, and ratios up to e^2 amplify that a little.
        assert loss == pytest.approx(expected, abs=1e-5)
        torch.testing.assert_close(gradient_T.double(), expected_T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@given(labels=st.lists(st.integers(0, 3), min_size=len(LENGTHS), max_size=len(LENGTHS)), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(preset, labels, seed):
    batch, trainer_T = random_batch(seed=seed)
    counts = counts_of(batch)
    loss, gradient_T = loss_and_gradient(preset, batch, trainer_T, counts, reference_kl_coef=0.2)
    split_loss, split_gradient_T = 0.0, torch.zeros_like(trainer_T)
    for label in range(4):
        segments = [s for s, chosen in enumerate(labels) if chosen == label]
        if not segments:
            part, tokens = empty_micro_batch(), torch.tensor([], dtype=torch.int64)
            part_loss, part_gradient_T = loss_and_gradient(
                preset, part, torch.zeros(2, dtype=torch.float64), counts, reference_kl_coef=0.2
            )
            assert part_loss == 0
            assert part_gradient_T.tolist() == [0, 0]
            continue
        part, tokens = select_segments(batch, segments)
        part_loss, part_gradient_T = loss_and_gradient(preset, part, trainer_T[tokens], counts, reference_kl_coef=0.2)
        split_loss += part_loss
        split_gradient_T[tokens] = part_gradient_T
    # float64: sums of 30 terms of order 1 in another order.
    assert split_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(split_gradient_T, gradient_T, rtol=0, atol=1e-12)


def test_token_weights_sum_to_what_the_aggregation_says():
    batch, _ = random_batch()
    counts = counts_of(batch)
    sums = {
        name: token_weights(batch.loss_mask_T, batch.segment_ids_T, counts, name).sum().item()
        for name in ("token_mean", "sequence_mean", "sequence_sum")
    }
    # float64: a sum of 20 terms.
    assert sums == pytest.approx(
        {"token_mean": 1.0, "sequence_mean": 1.0, "sequence_sum": counts.num_tokens / counts.num_sequences}, abs=1e-14
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_step_without_targets_has_weights_of_zero(aggregation):
    weights_T = token_weights(
        torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1]), GlobalCounts(0, 0), aggregation
    )
    assert weights_T.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_at_masked_positions_changes_nothing(preset, poison):
    batch, trainer_T = random_batch()
    expected = loss_and_gradient(preset, batch, trainer_T, counts_of(batch), reference_kl_coef=0.2)
    hole_T = ~batch.loss_mask_T
    poisoned = replace(
        batch,
        behaviour_logprobs_T=batch.behaviour_logprobs_T.masked_fill(hole_T, poison),
        advantages_T=batch.advantages_T.masked_fill(hole_T, poison),
        reference_logprobs_T=batch.reference_logprobs_T.masked_fill(hole_T, poison),
    )
    loss, gradient_T = loss_and_gradient(
        preset, poisoned, trainer_T.masked_fill(hole_T, poison), counts_of(batch), reference_kl_coef=0.2
    )
    assert loss == expected[0]
    assert torch.equal(gradient_T, expected[1])
    assert torch.equal(gradient_T[hole_T], torch.zeros(int(hole_T.sum()), dtype=torch.float64))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_behaviour_logprob_that_is_not_finite_at_a_target_is_refused_by_name(preset):
    batch, trainer_T = random_batch()
    targets = batch.loss_mask_T.nonzero().squeeze(1)
    behaviour_T = batch.behaviour_logprobs_T.clone()
    behaviour_T[targets[3]] = -math.inf
    behaviour_T[targets[5]] = math.nan
    behaviour_T[~batch.loss_mask_T] = math.nan
    with pytest.raises(NonFiniteError, match=rf"^2 of {len(targets)} behaviour_logprobs .* -inf .* {targets[3]}:"):
        preset.loss(replace(batch, behaviour_logprobs_T=behaviour_T), trainer_T, counts_of(batch))


def test_reference_logprob_that_is_not_finite_at_a_target_is_refused_by_name():
    batch, trainer_T = random_batch()
    reference_T = batch.reference_logprobs_T.masked_fill(batch.loss_mask_T, math.nan)
    with pytest.raises(NonFiniteError, match="reference_logprobs"):
        GRPO.loss(replace(batch, reference_logprobs_T=reference_T), trainer_T, counts_of(batch))


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_clipped_token_of_overflowing_ratio_has_no_gradient(advantage):
    logprobs_T = torch.tensor([-1.0], requires_grad=True)
    loss = clipped_loss(
        logprobs_T,
        torch.tensor([-9999.0]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.ones(1),
    ).loss
    loss.backward()
    # float32 rounds 1.2.
    assert loss.item() == pytest.approx(-1.2 * advantage, rel=1e-7)
    assert logprobs_T.grad.tolist() == [0.0]


def test_coefficient_without_reference_is_refused():
    batch, trainer_T = random_batch()
    with pytest.raises(ConfigError, match=r"reference_kl_coef is 0\.1"):
        GRPO.loss(replace(batch, reference_logprobs_T=None), trainer_T, counts_of(batch), reference_kl_coef=0.1)


def test_without_coefficient_the_reference_is_measured_but_not_charged():
    batch, trainer_T = random_batch()
    with_reference = GRPO.loss(batch, trainer_T, counts_of(batch))
    without = GRPO.loss(replace(batch, reference_logprobs_T=None), trainer_T, counts_of(batch))
    assert with_reference.loss.item() == without.loss.item()
    d = (trainer_T - batch.reference_logprobs_T)[batch.loss_mask_T]
    # float64: means of 20 values of order 1.
    assert with_reference.metrics["reference_kl_k1"].value == pytest.approx(d.mean().item(), abs=1e-14)
    k3 = ((-d).exp() + d - 1).mean().item()
    assert with_reference.metrics["reference_kl_k3"].value == pytest.approx(k3, abs=1e-14)
    assert "reference_kl_k1" not in without.metrics


def test_presets_say_what_their_sources_say():
    assert PRESETS == {"pipelinerl_paper": PIPELINERL_PAPER, "pipelinerl": PIPELINERL, "grpo": GRPO}
    recipes = (
        ("pipelinerl_paper", reinforce_loss, {"cap": 5.0}, "leave_one_out", "sequence_sum"),
        ("pipelinerl", reinforce_loss, {"cap": 1.02}, "leave_one_out", "sequence_sum"),
        ("grpo", clipped_loss, {"clip_low": 0.2, "clip_high": 0.2}, "std", "sequence_mean"),
    )
    for recipe in recipes:
        assert PRESETS[recipe[0]] == LossPreset(*recipe)


# ---------------------------------------------------------------------------------------------------------------
# grpo_loss: plain tensors of any shape


def plain_tensors(*shape, seed=0):
    """Trainer and behaviour logprobs, advantages and a mask with holes, of one shape."""
    batch, trainer_T = random_batch((math.prod(shape),), seed)
    tensors = (trainer_T, batch.behaviour_logprobs_T, batch.advantages_T, batch.loss_mask_T)
    return [tensor.reshape(shape) for tensor in tensors]


def plain_loss_and_gradient(trainer, *tensors, **kwargs):
    leaf = trainer.clone().requires_grad_()
    loss = grpo_loss(leaf, *tensors, **kwargs).loss
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("denominator", [None, 7, 7.5, torch.tensor(11)])
@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4)])
def test_grpo_loss_of_any_shape_equals_a_plain_loop(shape, denominator):
    trainer, behaviour, advantages, mask = plain_tensors(*shape)
    expected_loss, expected_gradient = 0.0, torch.zeros_like(trainer)
    for index in itertools.product(*map(range, shape)):
        if mask[index]:
            logprobs = trainer[index].item(), behaviour[index].item()
            value, gradient = reference_grpo(*logprobs, advantages[index].item(), 0.1, 0.3)
            expected_loss += value
            expected_gradient[index] = gradient
    total = int(mask.sum()) if denominator is None else float(denominator)
    loss, gradient = plain_loss_and_gradient(
        trainer, behaviour, advantages, mask, clip_low=0.1, clip_high=0.3, denominator=denominator
    )
    # float64 throughout: sums of 24 terms of order 1.
    assert loss == pytest.approx(expected_loss / total, abs=1e-13)
    torch.testing.assert_close(gradient, expected_gradient / total, rtol=0, atol=1e-13)


def test_grpo_loss_is_the_preset_of_the_same_name_weighed_by_tokens():
    batch, trainer_T = random_batch()
    batch = replace(batch, reference_logprobs_T=None)
    preset = replace(GRPO, aggregation="token_mean").loss(batch, trainer_T, counts_of(batch))
    plain = grpo_loss(trainer_T, batch.behaviour_logprobs_T, batch.advantages_T, batch.loss_mask_T)
    assert plain.loss.item() == preset.loss.item()
    assert plain.metrics == preset.metrics


def test_one_advantage_per_sequence_goes_to_its_tokens_even_where_the_batch_is_square():
    trainer, behaviour, _, mask = plain_tensors(5, 5)
    advantages = torch.linspace(-1, 1, 5, dtype=torch.float64)
    expected = plain_loss_and_gradient(trainer, behaviour, advantages[:, None].expand(5, 5), mask)
    for per_sequence in (advantages, advantages[:, None]):
        loss, gradient = plain_loss_and_gradient(trainer, behaviour, per_sequence, mask)
        assert loss == expected[0]
        assert torch.equal(gradient, expected[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_grpo_loss_does_not_see_what_stands_at_masked_positions(poison):
    trainer, behaviour, advantages, mask = plain_tensors(4, 6)
    expected = plain_loss_and_gradient(trainer, behaviour, advantages, mask)
    poisoned = [tensor.masked_fill(~mask, poison) for tensor in (trainer, behaviour, advantages)]
    for form in (mask, mask.long(), mask.float()):
        loss, gradient = plain_loss_and_gradient(*poisoned, form)
        assert loss == expected[0]
        assert torch.equal(gradient, expected[1])
        assert (gradient[~mask] == 0).all()


def test_parts_of_a_step_add_up_under_one_denominator_and_not_under_their_own():
    tensors = plain_tensors(6, 4)
    tensors[3][:2] = False
    tensors[3][0, 0] = True
    num_targets = int(tensors[3].sum())
    whole, _ = plain_loss_and_gradient(*tensors)
    parts = [[tensor[:2] for tensor in tensors], [tensor[2:] for tensor in tensors]]
    # float64: sums of 24 terms of order 1 in another order.
    assert sum(grpo_loss(*part, denominator=num_targets).loss.item() for part in parts) == pytest.approx(
        whole, abs=1e-13
    )
    assert abs(sum(grpo_loss(*part).loss.item() for part in parts) / 2 - whole) > 0.01


def test_a_call_without_targets_has_a_loss_and_a_gradient_of_zero():
    trainer, behaviour, advantages, mask = plain_tensors(2, 3)
    loss, gradient = plain_loss_and_gradient(trainer, behaviour, advantages, torch.zeros_like(mask))
    assert loss == 0
    assert gradient.tolist() == [[0.0] * 3] * 2


def test_tensors_that_do_not_fit_are_refused_by_name():
    trainer, behaviour, advantages, mask = plain_tensors(4, 6)
    with pytest.raises(InvalidRequestError, match=r"behaviour_logprobs are \[4, 5\], but trainer_logprobs \[4, 6\]"):
        grpo_loss(trainer, behaviour[:, 1:], advantages, mask)
    with pytest.raises(InvalidRequestError, match=r"loss_mask are \[24\]"):
        grpo_loss(trainer, behaviour, advantages, mask.flatten())
    for wrong in (advantages[0], advantages[:, :5], advantages[None], torch.zeros(1, 1, 1)):
        with pytest.raises(InvalidRequestError, match="advantages"):
            grpo_loss(trainer, behaviour, wrong, mask)


# ---------------------------------------------------------------------------------------------------------------
# Exact expectations: all 27 sequences of length 3 over 3 tokens, from a table of logits per prefix

PREFIXES = [prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)]
SEQUENCES = list(itertools.product(range(3), repeat=3))


def table(seed, scale=1.0):
    return scale * torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequence_logprobs(logits, sequence):
    logprobs = logits.log_softmax(1)
    return torch.stack([logprobs[PREFIXES.index(sequence[:t]), sequence[t]] for t in range(3)])


def expected_gradient(logits, behaviour, loss_of):
    """Gradient at ``logits`` of the loss, in expectation over sequences drawn from ``behaviour``."""
    leaf = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        behaviour_T = sequence_logprobs(behaviour, sequence)
        total = total + behaviour_T.sum().exp() * loss_of(sequence, sequence_logprobs(leaf, sequence), behaviour_T)
    total.backward()
    return leaf.grad


def true_gradient(logits, objective_of):
    leaf = logits.clone().requires_grad_()
    objective_of(leaf).backward()
    return leaf.grad


MASK, ONES = torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.float64)


def reward(sequence):
    return math.sin(1 + sequence[0] + 3 * sequence[1] + 9 * sequence[2])


@pytest.mark.parametrize("loss_of", [lambda *tensors: reinforce_loss(*tensors, cap=1.02), clipped_loss])
def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward(loss_of):
    logits = table(0)
    estimate = expected_gradient(
        logits,
        logits,
        lambda sequence, trainer_T, behaviour_T: (
            loss_of(trainer_T, behaviour_T, reward(sequence) * ONES, MASK, ONES).loss
        ),
    )
    truth = true_gradient(logits, lambda x: sum(sequence_logprobs(x, s).sum().exp() * reward(s) for s in SEQUENCES))
    # float64: sums of 81 terms below 1. The loss is minimised, the reward maximised.
    torch.testing.assert_close(-estimate, truth, rtol=0, atol=1e-14)
    assert truth.abs().max() > 0.01


def test_off_policy_the_gradient_of_one_token_is_exact_without_truncation_and_biased_with_it():
    logits, behaviour = table(0), table(1)
    first = torch.tensor([True, False, False])

    def estimate(cap):
        return expected_gradient(
            logits,
            behaviour,
            lambda s, trainer_T, behaviour_T: (
                reinforce_loss(trainer_T, behaviour_T, (s[0] - 0.5) * ONES, first, ONES, cap=cap).loss
            ),
        )

    truth = true_gradient(logits, lambda x: (x.softmax(1)[0] * torch.tensor([-0.5, 0.5, 1.5])).sum())
    # float64: sums of 27 terms of order 1.
    torch.testing.assert_close(-estimate(math.inf), truth, rtol=0, atol=1e-14)
    assert (-estimate(1.02) - truth).abs().max() > 0.01


def test_expected_gradient_of_the_penalty_is_that_of_the_reverse_kl_off_policy_too():
    logits, reference = table(0), table(2)

    def kl_at_prefixes_of(behaviour):
        def objective(x):
            logprobs, reference_logprobs = x.log_softmax(1), reference.log_softmax(1)
            kl = (logprobs.exp() * (logprobs - reference_logprobs)).sum(1)
            behaviour_logprobs = behaviour.log_softmax(1)
            reach = [
                math.exp(sum(behaviour_logprobs[PREFIXES.index(p[:t]), p[t]].item() for t in range(len(p))))
                for p in PREFIXES
            ]
            return (torch.tensor(reach, dtype=torch.float64) * kl).sum()

        return objective

    def penalty(sequence, trainer_T, behaviour_T):
        return reference_kl(
            trainer_T, sequence_logprobs(reference, sequence), behaviour_T, MASK, ONES, coefficient=0.7
        ).loss

    def plain_k3(sequence, trainer_T, behaviour_T):
        d_T = trainer_T - sequence_logprobs(reference, sequence)
        return 0.7 * ((-d_T).exp() + d_T - 1).sum()

    for behaviour in (logits, table(1)):
        truth = 0.7 * true_gradient(logits, kl_at_prefixes_of(behaviour))
        # float64: sums of 81 terms of order 1.
        torch.testing.assert_close(expected_gradient(logits, behaviour, penalty), truth, rtol=0, atol=1e-13)
        assert (expected_gradient(logits, behaviour, plain_k3) - truth).abs().max() > 0.05
