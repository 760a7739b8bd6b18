"""Losses do not depend on how a step is split, ordered or padded, nor on anything that stands at masked positions."""

from __future__ import annotations

import math
import threading
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.losses import (
    PRESETS,
    Band,
    Opsm,
    PolicyLoss,
    PpoClip,
    PromptMean,
    SecondMoment,
    SegmentMean,
    TokenMean,
    Truncate,
    add_metrics,
    chunked_logprobs,
    empty_micro_batch,
    metric_values,
    one_pass,
    prepare,
)
from inflight.types import MicroBatch
from tests.losses.steps import (
    LENGTHS,
    VERSION,
    VOCAB,
    further,
    logprobs_of,
    loss_and_gradient,
    plan_of,
    random_step,
    select_segments,
)
from tests.selection import first_of_each

_AFTER = {
    f"after_{aggregation.kind}": PolicyLoss(
        gate=PpoClip(),
        corrections=(Truncate(high=2.0), Band(between="trainer/behaviour", low=0.3, high=3.0), Opsm(bound=0.1)),
        aggregation=aggregation,
    )
    for aggregation in (TokenMean(counted="after"), SegmentMean(counted="after"), PromptMean(counted="after"))
}
_MOMENT = {"moment": PolicyLoss(gate=PpoClip(), level="prefix", corrections=(SecondMoment(bound=0.1),))}
LOSSES = {**{name: it.loss for name, it in PRESETS.items()}, **_AFTER, **_MOMENT}


class Ranks:
    """Sums over ranks that are threads; every rank must call it equally often."""

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._parts = [torch.zeros(0)] * num_ranks

    def reduce(self, rank):
        def add(numbers):
            self._parts[rank] = numbers
            self._barrier.wait()
            summed = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return summed

        return add


def plans_of_ranks(loss, parts):
    """What `prepare` specifies on each rank, given its micro-batches and their trainer logprobs."""
    ranks, plans = Ranks(len(parts)), [None] * len(parts)

    def run(rank):
        batches = [batch for batch, _ in parts[rank]]
        logprobs = [logprobs_T for _, logprobs_T in parts[rank]]
        plans[rank] = plan_of(loss, batches, logprobs, num_groups=3, reduce=ranks.reduce(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(plan is not None for plan in plans)
    return plans


@pytest.mark.parametrize("name", first_of_each(LOSSES, lambda name: (LOSSES[name].level, LOSSES[name].aggregation)))
@settings(max_examples=12)
@given(
    labels=st.lists(st.integers(0, 5), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    order=st.permutations(range(len(LENGTHS))),
    seed=st.integers(0, 99),
)
def test_any_split_into_ranks_and_micro_batches_in_any_order_gives_the_same_loss_and_gradient(
    name, labels, order, seed
):
    """Labels 0 to 5: three ranks of two micro-batches each; a rank may have nothing."""
    loss = LOSSES[name]
    batch, logits_TV = random_step(seed=seed)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    whole_plan = plan_of(loss, [batch], [trainer_T], num_groups=3)
    expected, expected_T = loss_and_gradient(loss, batch, trainer_T, whole_plan)
    whole_metrics = loss(batch, trainer_T, whole_plan, **further(loss, batch)).metrics

    parts, rows = [[], [], []], {}
    for label in range(6):
        segments = [s for s in order if labels[s] == label]
        if segments:
            part, tokens = select_segments(batch, segments)
            rows[label, len(parts[label // 2])] = tokens
            parts[label // 2].append((part, trainer_T[tokens]))
        else:
            empty = empty_micro_batch()
            parts[label // 2].append((empty, torch.zeros(2, dtype=torch.float64)))
    plans = plans_of_ranks(loss, parts)
    assert all(plan == plans[0] for plan in plans)

    value, gradient_T, metrics = 0.0, torch.zeros_like(trainer_T), {}
    for label in range(6):
        part, logprobs_T = parts[label // 2][label % 2]
        part_value, part_T = loss_and_gradient(loss, part, logprobs_T, plans[label // 2])
        value += part_value
        metrics = add_metrics(metrics, loss(part, logprobs_T, plans[label // 2], **further(loss, part)).metrics)
        if (label, label % 2) in rows:
            gradient_T[rows[label, label % 2]] += part_T
    # float64: the same terms of order 1 to 100, added in another order.
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=1e-12)
    wanted = metric_values(whole_metrics)
    assert metric_values(metrics) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_poison_at_masked_positions_changes_nothing(name, poison):
    loss = LOSSES[name]
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    masked_T = ~batch.loss_mask_T
    poisoned = {
        field.name: getattr(batch, field.name).masked_fill(masked_T, poison)
        for field in fields(MicroBatch)
        if field.name.endswith("_T") and field.name != "prefix_ids_T" and getattr(batch, field.name).is_floating_point()
    }
    plans = [
        plan_of(loss, [it], [values_T])
        for it, values_T in (
            (batch, trainer_T),
            (replace(batch, **poisoned), trainer_T.masked_fill(masked_T, poison)),
        )
    ]
    assert plans[0] == plans[1]
    expected, expected_T = loss_and_gradient(loss, batch, trainer_T, plans[0])
    value, gradient_T = loss_and_gradient(
        loss, replace(batch, **poisoned), trainer_T.masked_fill(masked_T, poison), plans[1]
    )
    assert value == expected
    assert torch.equal(gradient_T, expected_T)
    assert (gradient_T[masked_T] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_targets_has_a_loss_and_a_gradient_of_zero(name):
    loss = LOSSES[name]
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    silent = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    for plan in (plan_of(loss, [silent], [trainer_T]), plan_of(loss, [batch], [trainer_T])):
        value, gradient_T = loss_and_gradient(loss, silent, trainer_T, plan)
        assert value == 0
        assert (gradient_T == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_float32_logprobs_lose_only_their_own_rounding(name):
    loss = LOSSES[name]
    batch, logits_TV = random_step(drift=0.3)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T).float()
    floats = {
        field.name: getattr(batch, field.name).float()
        for field in fields(MicroBatch)
        if field.name.endswith("_T") and field.name != "prefix_ids_T" and getattr(batch, field.name).is_floating_point()
    }
    rounded = replace(batch, **floats)
    exact = replace(batch, **{name: values_T.double() for name, values_T in floats.items()})
    plan = plan_of(loss, [exact], [trainer_T.double()])
    assert plan_of(loss, [rounded], [trainer_T]) == plan
    value, gradient_T = loss_and_gradient(loss, rounded, trainer_T, plan)
    expected, expected_T = loss_and_gradient(loss, exact, trainer_T.double(), plan)
    # The sum is float64 either way; only the result is rounded.
    assert value == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(gradient_T.double(), expected_T, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["bnpo", "pipelinerl_paper", "grpo", "scalerl"])
def test_a_step_twice_as_large_of_the_same_samples_has_the_same_loss(name):
    loss = PRESETS[name].loss
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    again = replace(batch, group_ids_S=batch.group_ids_S + 3)
    once = loss(batch, trainer_T, prepare(loss, [batch])).loss
    plan = prepare(loss, [batch, again])
    twice = loss(batch, trainer_T, plan).loss + loss(again, trainer_T, plan).loss
    assert twice.item() == pytest.approx(once.item(), rel=1e-13)


def test_first_forward_gives_prepare_what_it_needs_and_nothing_moves_with_the_version():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PRESETS["m2po"].loss
    plan = prepare(loss, [batch], trainer_logprobs=[trainer_T])
    with_version = prepare(loss, [batch], trainer_logprobs=[trainer_T], current_version=VERSION)
    assert plan.thresholds == with_version.thresholds
    assert "lag" not in loss(batch, trainer_T, plan).metrics
    assert "lag" in loss(batch, trainer_T, with_version).metrics


@pytest.mark.parametrize("name", LOSSES)
def test_one_pass_over_the_head_equals_two_for_every_loss_that_allows_it(name):
    loss = LOSSES[name]
    for drop in (False, True):
        batch, _ = random_step()
        generator = torch.Generator().manual_seed(5)
        hidden_NH = torch.randn(int(batch.loss_mask_T.sum()), 6, generator=generator, dtype=torch.float64)
        weight_VH = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
        given = [hidden_NH.requires_grad_(), weight_VH.requires_grad_()]
        rows_N = batch.loss_mask_T.nonzero().squeeze(1)
        head = {"targets_N": batch.token_ids_T[rows_N], "temperature_N": batch.temperature_T[rows_N]}
        if drop:
            loss = loss.model_copy(update={"non_finite": "drop"})
            batch = replace(batch, behaviour_logprobs_T=batch.behaviour_logprobs_T.clone())
            batch.behaviour_logprobs_T[rows_N[::5]] = math.nan
        logprobs_N = chunked_logprobs(*given, **head)
        trainer_T = torch.zeros(batch.num_tokens, dtype=torch.float64).index_put((rows_N,), logprobs_N)
        plan = plan_of(loss, [batch], [trainer_T])
        after = any(getattr(it, "counted", "before") == "after" for it in loss._aggregations)
        if loss.locality != "token" or (after and loss.corrections) or "teacher_top" in loss.needs:
            with pytest.raises(InvalidRequestError, match="cannot be computed in one pass"):
                loss.on_targets(batch, plan)
            return
        two = loss(batch, trainer_T, plan).loss
        one = one_pass(*given, **head, loss_of=loss.on_targets(batch, plan), chunk_size=4)
        assert one.item() == pytest.approx(two.item(), rel=1e-12, abs=1e-13)
        for left, right in zip(torch.autograd.grad(one, given), torch.autograd.grad(two, given), strict=True):
            # float64: sums over 20 rows and 11 tokens.
            torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)
