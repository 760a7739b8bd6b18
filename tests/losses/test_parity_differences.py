"""Where TRL, Liger and verl differ from this library, by intent or not, and how: one test each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inflight.losses import Constant, Kl, PolicyLoss, PpoClip, SegmentMean, SegmentSum, Truncate, prepare
from tests.losses.padded import Padded, padded_batch
from tests.losses.parity import (
    EPSILON,
    FLOAT32,
    FLOAT64,
    GSPO,
    PARTS,
    assert_close,
    charging,
    corrected,
    differ,
    head_batch,
    of_framework,
    of_framework_parts,
    of_library,
    of_library_head,
    of_liger,
    of_parts,
    preset_loss,
    trl_engine_loss,
    trl_loss,
    verl_kl_loss,
    verl_loss,
    whole_in_order_of_parts,
)


@pytest.mark.parametrize(
    ("loss_type", "loss"),
    [
        ("grpo", preset_loss("grpo")),
        ("bnpo", preset_loss("bnpo")),
        ("dr_grpo", preset_loss("dr_grpo", aggregation=Constant(length=512))),
        ("luspo", PolicyLoss(gate=PpoClip(), aggregation=SegmentSum())),
    ],
)
def test_unequal_micro_batches_add_up_here_but_not_in_trl(loss_type, loss, trl):
    padded = padded_batch()
    whole = whole_in_order_of_parts(loss, padded)
    assert_close(of_parts(loss, padded), whole, FLOAT64)
    theirs = trl_loss(loss_type=loss_type, gradient_accumulation_steps=len(PARTS))
    assert differ(of_framework_parts(theirs, trl, padded), whole, by=1e-4)


def test_unequal_micro_batches_of_trl_async_do_not_add_up_even_with_the_count_of_the_step(trl):
    padded = padded_batch()
    whole = whole_in_order_of_parts(preset_loss("trl_async_default"), padded)
    assert_close(of_parts(preset_loss("trl_async_default"), padded), whole, FLOAT64)
    theirs = of_framework_parts(
        lambda trl, part, x_BT: trl.trl_async_loss(
            x_BT,
            part.behaviour_BT,
            part.advantages_BT,
            part.mask_BT,
            num_items_in_batch=int(padded.mask_BT.sum()),
            gradient_accumulation_steps=len(PARTS),
        ),
        trl,
        padded,
    )
    assert differ(theirs, whole)


def with_an_empty_row(padded):
    """The batch with no target in its third row, and the same without the row."""
    mask_BT = padded.mask_BT.clone()
    mask_BT[2] = False
    others = [row for row in range(len(mask_BT)) if row != 2]
    return replace(padded, mask_BT=mask_BT), padded.rows(*others), others


BY_SEQUENCES = {
    "grpo": (preset_loss("grpo"), {"loss_type": "grpo"}),
    "dr_grpo": (preset_loss("dr_grpo"), {"loss_type": "dr_grpo", "max_completion_length": 1024}),
    "gspo": (preset_loss("gspo"), {"loss_type": "grpo", **GSPO}),
    "luspo": (preset_loss("luspo"), {"loss_type": "luspo", **GSPO}),
}
"""Denominators that count sequences: a preset, and the settings of TRL and Liger."""


@pytest.mark.parametrize("name", BY_SEQUENCES)
def test_rows_without_targets_count_in_means_over_sequences_here_and_in_trl(name, trl):
    ours, settings = BY_SEQUENCES[name]
    padded, without, others = with_an_empty_row(padded_batch())
    found = of_library(ours, padded)
    assert_close(found, of_framework(trl_loss(**settings), trl, padded), FLOAT64)
    value, gradient_BT = of_library(ours, without)
    fewer = len(others) / len(padded.mask_BT)
    assert_close((found[0], found[1][others]), (fewer * value, fewer * gradient_BT), FLOAT64)


@pytest.mark.parametrize("name", BY_SEQUENCES)
def test_rows_without_targets_count_in_means_over_sequences_here_and_in_liger(name, liger):
    ours, settings = BY_SEQUENCES[name]
    padded, inputs = head_batch()
    padded, _, _ = with_an_empty_row(padded)
    theirs = of_liger(liger, padded, *inputs, **settings)
    assert_close(theirs, of_library_head(ours, padded, *inputs), FLOAT32)


def test_rows_without_targets_do_not_count_in_verl_and_here_only_in_counts_before_rejection(verl):
    padded, without, others = with_an_empty_row(padded_batch())
    after = preset_loss("grpo", aggregation=SegmentMean(counted="after"))
    value, gradient_BT = of_library(after, padded)
    same = (value, gradient_BT[others])
    assert_close(same, of_library(after, without), FLOAT64)
    theirs = verl_loss("vanilla", "seq-mean-token-mean", old="behaviour", clip_ratio_c=1e3)
    value, gradient_BT = of_framework(theirs, verl, padded)
    assert_close((value, gradient_BT[others]), same, EPSILON)
    assert differ(of_library(preset_loss("grpo"), padded)[:1], same[:1])


def test_a_sequence_level_of_trl_multiplies_its_kl_by_the_ratio_of_the_sequence_and_here_by_that_of_the_token(trl):
    padded = padded_batch()
    ours = of_library(preset_loss("gspo", penalties=(Kl(coefficient=0.3),)), padded)
    assert differ(ours, of_framework(trl_loss(loss_type="grpo", beta=0.3, **GSPO), trl, padded))
    biased = of_library(preset_loss("gspo", penalties=(Kl(coefficient=0.3, estimator="k3"),)), padded)
    theirs = trl_loss(loss_type="grpo", beta=0.3, use_bias_correction_kl=False, **GSPO)
    assert_close(of_framework(theirs, trl, padded), biased, FLOAT64)


def test_with_an_engine_the_kl_of_trl_has_the_ratio_to_the_old_policy_and_here_that_to_the_behaviour_policy(trl):
    padded = padded_batch()
    loss = corrected(Truncate(high=2.0), penalties=(Kl(coefficient=0.3),))
    theirs = of_framework(trl_engine_loss("token_truncate", 2.0, beta=0.3), trl, padded)
    assert differ(of_library(loss, padded), theirs)
    without = of_library(loss.model_copy(update={"penalties": ()}), padded)
    kl_only = PolicyLoss(gate=PpoClip(), penalties=(Kl(coefficient=0.3),))
    behaves_as_old = replace(padded, behaviour_BT=padded.proximal_BT, advantages_BT=torch.zeros_like(padded.trainer_BT))
    with_old = of_library(kl_only, behaves_as_old)
    assert_close(tuple(a + b for a, b in zip(without, with_old, strict=True)), theirs, FLOAT64)


def test_micro_batches_of_geo_mean_add_up_here_but_neither_they_nor_those_of_kl_cov_do_in_verl(verl):
    padded = padded_batch()
    counts = {"dp_size": 1, "batch_num_tokens": int(padded.mask_BT.sum()), "global_batch_size": len(padded.mask_BT)}
    whole = whole_in_order_of_parts(preset_loss("gmpo"), padded)
    assert_close(of_parts(preset_loss("gmpo"), padded), whole, FLOAT64)
    geo_mean = verl_loss("geo_mean", old="behaviour", clip_ratio_low=0.4, clip_ratio_high=0.4, global_counts=counts)
    assert differ(of_framework_parts(geo_mean, verl, padded), whole)
    kl_cov = verl_loss("kl_cov", policy_loss={"kl_cov_ratio": 0.2}, global_counts=counts)
    value, gradient_BT = of_framework(kl_cov, verl, padded)
    in_order = (value, gradient_BT[[row for rows in PARTS for row in rows]])
    assert differ(of_framework_parts(kl_cov, verl, padded), in_order, by=1e-4)


def one_token(trainer, behaviour, *, advantage=1.0, reference=-1.0):
    """A batch of one row and one target."""
    values = [torch.tensor([[value]], dtype=torch.float64) for value in (trainer, behaviour, behaviour, reference)]
    true = torch.tensor([[True]])
    return Padded(*values, advantages_BT=torch.tensor([[advantage]], dtype=torch.float64), mask_BT=true, inside_BT=true)


def test_verl_has_no_gradient_where_the_log_ratio_exceeds_20_and_here_it_is_the_ratio(verl):
    padded = one_token(-0.5, -25.5, advantage=-1.0)
    loss = PolicyLoss(gate=PpoClip())
    value, gradient = of_library(loss, padded)
    assert value.item() == gradient.item() == pytest.approx(math.exp(25), rel=1e-12)
    value, gradient = of_framework(verl_loss("vanilla", clip_ratio_c=1e30), verl, padded)
    assert value.item() == pytest.approx(math.exp(20), rel=1e-12)
    assert gradient.item() == 0


def test_k3_of_verl_has_no_gradient_where_its_value_would_exceed_10_and_here_it_has(verl):
    for d, clamped in ((-2.6, False), (-2.7, True)):
        padded = one_token(-3.0, -3.0, advantage=1.0, reference=-3.0 - d)
        ours = of_library(charging("k3"), padded)
        k3 = math.exp(-d) + d - 1
        assert ours[0].item() == pytest.approx(3.0 + 0.3 * k3, rel=1e-12)
        assert ours[1].item() == pytest.approx(-1.0 + 0.3 * (1 - math.exp(-d)), rel=1e-12)
        theirs = of_framework(verl_kl_loss("k3"), verl, padded)
        if clamped:
            assert theirs[0].item() == pytest.approx(3.0 + 0.3 * 10, rel=1e-12)
            assert theirs[1].item() == -1.0
        else:
            assert_close(theirs, ours, FLOAT64)


def test_a_batch_without_targets_has_a_loss_of_zero_here_and_nan_in_verl(verl):
    padded = padded_batch()
    padded = replace(padded, mask_BT=torch.zeros_like(padded.mask_BT))
    batch = padded.packed()
    loss = preset_loss("verl_default")
    assert loss(batch, padded.pack(padded.trainer_BT), prepare(loss, [batch])).loss == 0
    assert verl_loss("vanilla")(verl, padded, padded.trainer_BT).isnan()


@pytest.mark.parametrize(
    ("framework", "theirs", "ours"),
    [
        ("trl", trl_loss(loss_type="grpo"), "grpo"),
        ("verl", verl_loss("vanilla", "seq-mean-token-mean", old="behaviour", clip_ratio_c=1e3), "grpo"),
        ("verl", verl_loss("sapo", old="behaviour"), "sapo"),
        ("verl", verl_loss("geo_mean", old="behaviour", clip_ratio_low=0.4, clip_ratio_high=0.4), "gmpo"),
    ],
    ids=["trl grpo", "verl vanilla", "verl sapo", "verl geo_mean"],
)
def test_nan_at_a_masked_position_spoils_the_loss_there_and_not_here(framework, theirs, ours, request):
    clean = padded_batch()
    anchor = request.getfixturevalue(framework)
    poisoned = replace(clean, behaviour_BT=clean.behaviour_BT.masked_fill(~clean.mask_BT, math.nan))
    assert theirs(anchor, poisoned, poisoned.trainer_BT).isnan()
    expected = of_framework(theirs, anchor, clean)
    assert_close(of_library(preset_loss(ours), poisoned), expected, EPSILON)


def test_luspo_of_liger_at_level_token_ignores_the_mask_unlike_trl_and_here(liger, trl):
    padded, inputs = head_batch()
    loss = PolicyLoss(gate=PpoClip(), aggregation=SegmentSum())
    ours = of_library_head(loss, padded, *inputs)
    assert_close(of_library(loss, padded), of_framework(trl_loss(loss_type="luspo"), trl, padded), FLOAT64)
    theirs = of_liger(liger, padded, *inputs, loss_type="luspo")
    assert differ(theirs, ours, by=0.1)
    # Hidden states of masked positions change it, too.
    hidden_BTH, weight_VH, tokens_BT = inputs
    changed_BTH = torch.where(padded.mask_BT[..., None], hidden_BTH, 0.0)
    assert_close(of_library_head(loss, padded, changed_BTH, weight_VH, tokens_BT)[:1], ours[:1], FLOAT64)
    assert differ(of_liger(liger, padded, changed_BTH, weight_VH, tokens_BT, loss_type="luspo")[:1], theirs[:1], by=0.1)
