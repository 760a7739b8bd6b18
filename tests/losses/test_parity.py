"""The library's losses, advantages and head against the installed releases of TRL, Liger and verl.

Each case states a loss of the library beside the framework's own settings; value and gradient with respect to trainer
logprobs (for Liger: to hidden states and weight) are compared on the same targets, padded there and packed here. Where
a framework differs, by intent or not, a test says how.

Shape suffixes: B rows, T padded columns or packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from inflight.losses import (
    PRESETS,
    Band,
    Constant,
    Kl,
    Opsm,
    PolicyLoss,
    PpoClip,
    Score,
    SegmentMean,
    SegmentSum,
    Sum,
    TokenMean,
    Truncate,
    TrustKl,
    TrustTv,
    chunked_logprobs,
    prepare,
)
from inflight.rollouts import batch_advantages
from tests.losses.anchors.packages import anchors_folder, importable_anchors
from tests.losses.padded import NUM_GENERATIONS, Padded, head_inputs, padded_batch

FLOAT64 = 1e-12
"""float64 on both sides: sums of 75 terms in another order, relative to the largest."""
FLOAT32_TAU = 1e-7
"""TRL's SAPO: torch.where of two Python floats makes tau float32 (trl/trainer/grpo_trainer.py:3122)."""
EPSILON = 4e-8
"""verl adds 1e-8 to the number of tokens that it divides by (verl/trainer/ppo/core_algos.py:1196): 1e-8 of the only
token of a row, and for geo_mean (lines 1984, 1987) of its log ratio of up to 2 before exp and of its advantage."""
FLOAT32 = 1e-5
"""Liger and most heads compute logprobs in float32, whatever the inputs: 2^-24 of logits of order 10, over 211."""

SEEDS = (0, 1, 2)
Anchor = Callable[[ModuleType, Padded, Tensor], Tensor]
"""The framework's loss of a batch, given its module of `tests.losses.anchors` and the trainer logprobs."""


@dataclass(frozen=True)
class Case:
    """One loss of the library and what the framework calls the same."""

    name: str
    ours: PolicyLoss
    theirs: Anchor
    per_token: bool = False
    drift: float = 2.0
    tolerance: float = FLOAT64


def by_name(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def preset_loss(name, **changes):
    """The loss of a preset, with some pieces changed."""
    return PRESETS[name].loss.model_copy(update=changes)


@pytest.fixture(scope="module")
def trl():
    return importlib.import_module("tests.losses.anchors.trl_anchor")


@pytest.fixture(scope="module")
def liger():
    return importlib.import_module("tests.losses.anchors.liger_anchor")


@pytest.fixture(scope="module")
def verl():
    return importlib.import_module("tests.losses.anchors.verl_anchor")


def value_and_gradient(loss, leaf):
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def of_library(loss, padded, *, plan=None, batch=None):
    """Value and gradient with respect to the padded trainer logprobs."""
    leaf_BT = padded.trainer_BT.clone().requires_grad_()
    batch = batch or padded.packed()
    trainer_T = padded.pack(leaf_BT)
    plan = plan or prepare(loss, [batch], trainer_logprobs=[trainer_T.detach()])
    return value_and_gradient(loss(batch, trainer_T, plan).loss, leaf_BT)


def of_framework(theirs, anchor, padded):
    leaf_BT = padded.trainer_BT.clone().requires_grad_()
    return value_and_gradient(theirs(anchor, padded, leaf_BT), leaf_BT)


def assert_close(found, expected, tolerance):
    """Value and gradients are equal up to ``tolerance`` of the largest entry; the gradients are not all zero."""
    (value, *gradients), (expected_value, *expected_gradients) = found, expected
    assert value.item() == pytest.approx(expected_value.item(), rel=tolerance, abs=tolerance)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        largest = expected_gradient.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(gradient.double(), expected_gradient.double(), rtol=0, atol=tolerance * largest)


def differ(found, expected, by=1e-3):
    """Whether the values, or some entry of the gradients, are further apart than rounding goes."""
    pairs = list(zip(found, expected, strict=True))
    return all(f.isfinite().all() for f, _ in pairs) and max((f - e).abs().max().item() for f, e in pairs) > by


def assert_parity(case, anchor):
    for seed in SEEDS:
        padded = padded_batch(seed, per_token=case.per_token, drift=case.drift)
        assert_close(of_library(case.ours, padded), of_framework(case.theirs, anchor, padded), case.tolerance)


# ---- TRL


def trl_loss(**settings) -> Anchor:
    """TRL's loss with the behaviour policy as its old one."""
    return lambda trl, padded, x_BT: trl.trl_loss(
        x_BT, padded.behaviour_BT, padded.row_advantages, padded.mask_BT, **settings
    )


def trl_kl_loss(**settings) -> Anchor:
    return lambda trl, padded, x_BT: trl.trl_loss(
        x_BT, padded.behaviour_BT, padded.row_advantages, padded.mask_BT, ref_logps_BT=padded.reference_BT, **settings
    )


def trl_engine_loss(mode, clip_max, clip_min=None, **settings) -> Anchor:
    """TRL's loss with vLLM: old logprobs are the trainer's at the start, behaviour logprobs the engine's."""

    def theirs(trl, padded, x_BT):
        scored = trl.trl_scored_batch(
            torch.arange(float(len(x_BT))),
            padded.proximal_BT,
            padded.mask_BT,
            num_generations=NUM_GENERATIONS,
            sampling_logps_BT=padded.behaviour_BT,
            mode=mode,
            clip_max=clip_max,
            clip_min=clip_min,
        )
        return trl.trl_loss(
            x_BT,
            padded.proximal_BT,
            padded.row_advantages,
            padded.mask_BT,
            sampling_ratio=scored["importance_sampling_ratio"],
            ref_logps_BT=padded.reference_BT,
            **settings,
        )

    return theirs


def trl_opsm(trl, padded, x_BT):
    return trl.trl_loss(
        x_BT,
        padded.proximal_BT,
        padded.row_advantages,
        padded.mask_BT,
        sampling_logps_BT=padded.behaviour_BT,
        off_policy_mask_threshold=1e-4,
    )


def corrected(*corrections, **changes):
    """PPO on the policy at the start of the step, corrected for the engine's."""
    return PolicyLoss(gate=PpoClip(), between="trainer/proximal", corrections=corrections, **changes)


WIDE_GSPO = PolicyLoss(gate=PpoClip(), level="segment_mean", aggregation=SegmentMean())
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = {**SEQUENCE, "epsilon_low": 3e-4, "epsilon_high": 4e-4}

TRL_CASES = (
    Case("grpo", preset_loss("grpo"), trl_loss(loss_type="grpo")),
    Case("dr_grpo", preset_loss("dr_grpo"), trl_loss(loss_type="dr_grpo", max_completion_length=1024)),
    Case("dapo", preset_loss("dapo"), trl_loss(epsilon_high=0.28)),
    Case("bnpo", preset_loss("bnpo"), trl_loss(loss_type="bnpo")),
    Case("cispo, whose epsilon_high is the bound itself", preset_loss("cispo"),
         trl_loss(loss_type="cispo", epsilon_high=5.0)),
    Case("sapo", preset_loss("sapo"), trl_loss(loss_type="sapo"), tolerance=FLOAT32_TAU),
    Case("luspo", preset_loss("luspo"), trl_loss(loss_type="luspo", **GSPO)),
    Case("luspo with a wide clip", preset_loss("luspo", gate=PpoClip()), trl_loss(loss_type="luspo", **SEQUENCE)),
    Case("luspo at level token is a sum over each sequence", PolicyLoss(gate=PpoClip(), aggregation=SegmentSum()),
         trl_loss(loss_type="luspo")),
    Case("vespo", preset_loss("vespo"), trl_loss(loss_type="vespo")),
    Case("vespo of an engine is vespo of the behaviour policy", preset_loss("vespo"),
         trl_engine_loss("token_truncate", 1e6, loss_type="vespo")),
    Case("gspo", preset_loss("gspo"), trl_loss(loss_type="grpo", **GSPO)),
    Case("gspo_token", preset_loss("gspo_token"), trl_loss(loss_type="grpo", **GSPO)),
    Case("gspo with a wide clip", WIDE_GSPO, trl_loss(loss_type="grpo", **SEQUENCE)),
    Case("dapo at level sequence", PolicyLoss(gate=PpoClip(), level="segment_mean"), trl_loss(**SEQUENCE)),
    Case("dr_grpo at level sequence",
         PolicyLoss(gate=PpoClip(), level="segment_mean", aggregation=Constant(length=20)),
         trl_loss(loss_type="dr_grpo", max_completion_length=20, **SEQUENCE)),
    Case("delta", preset_loss("delta_ppo"), trl_loss(delta=4.0)),
    Case("two epsilons", PolicyLoss(gate=PpoClip(low=0.1, high=0.4)), trl_loss(epsilon_low=0.1, epsilon_high=0.4)),
    Case("advantages of tokens", PolicyLoss(gate=PpoClip()), lambda trl, padded, x_BT: trl.trl_loss(
        x_BT, padded.behaviour_BT, padded.advantages_BT, padded.mask_BT), per_token=True),
    Case("beta, use_bias_correction_kl", PolicyLoss(gate=PpoClip(), penalties=(Kl(coefficient=0.3),)),
         trl_kl_loss(beta=0.3)),
    Case("beta without use_bias_correction_kl",
         PolicyLoss(gate=PpoClip(), penalties=(Kl(coefficient=0.3, estimator="k3"),)),
         trl_kl_loss(beta=0.3, use_bias_correction_kl=False)),
    Case("beta in a mean over sequences", preset_loss("grpo", penalties=(Kl(coefficient=0.3),)),
         trl_kl_loss(loss_type="grpo", beta=0.3)),
    Case("off_policy_mask_threshold", preset_loss("opsm"), trl_opsm),
    Case("sequence_mask, TRL's default", preset_loss("trl_default"), trl_engine_loss("sequence_mask", 3.0)),
    Case("sequence_truncate", corrected(Truncate(level="segment_product", high=3.0)),
         trl_engine_loss("sequence_truncate", 3.0)),
    Case("token_mask", corrected(Truncate(), Band(high=1.5)), trl_engine_loss("token_mask", 1.5)),
    Case("token_mask with two bounds is icepop", preset_loss("icepop"), trl_engine_loss("token_mask", 5.0, 0.5)),
    Case("token_truncate is tis", preset_loss("tis"), trl_engine_loss("token_truncate", 2.0)),
    Case("token_truncate with two bounds", corrected(Truncate(low=0.5, high=2.0)),
         trl_engine_loss("token_truncate", 2.0, 0.5)),
    Case("the correction for the engine leaves the KL alone",
         corrected(Truncate(high=2.0), penalties=(Kl(coefficient=0.3, estimator="k3"),)),
         trl_engine_loss("token_truncate", 2.0, beta=0.3, use_bias_correction_kl=False)),
    Case("gmpo", preset_loss("gmpo"), lambda trl, padded, x_BT: trl.trl_gmpo_loss(
        x_BT, padded.behaviour_BT, padded.row_advantages, padded.mask_BT)),
    Case("rloo clips the ratio of the whole sequence",
         PolicyLoss(gate=PpoClip(), level="segment_product", aggregation=SegmentMean()),
         lambda trl, padded, x_BT: trl.trl_rloo_loss(
             x_BT, padded.behaviour_BT, padded.row_advantages, padded.mask_BT)),
    Case("async", preset_loss("trl_async_default"), lambda trl, padded, x_BT: trl.trl_async_loss(
        x_BT, padded.behaviour_BT, padded.advantages_BT, padded.mask_BT), per_token=True),
)  # fmt: skip


@by_name(TRL_CASES)
def test_loss_and_gradient_are_those_of_trl(case, trl):
    assert_parity(case, trl)


def test_a_step_without_old_logprobs_is_on_policy_here_and_in_trl(trl):
    padded = padded_batch()
    expected = of_framework(
        lambda trl, padded, x_BT: trl.trl_loss(x_BT, None, padded.row_advantages, padded.mask_BT), trl, padded
    )
    batch = replace(padded.packed(), proximal_logprobs_T=None)
    assert_close(of_library(corrected(), padded, batch=batch), expected, FLOAT64)


PARTS = ((0, 7), (1, 2, 3), (4, 5, 6, 8, 9, 10, 11))
"""Micro-batches of 24, 15 and 52 tokens or fewer, of 2, 3 and 7 rows."""


def of_parts(loss, padded):
    """The library's value and gradient, micro-batch by micro-batch under one plan, in the order of `PARTS`."""
    parts = [padded.rows(*rows) for rows in PARTS]
    batches = [part.packed() for part in parts]
    plan = prepare(loss, batches, trainer_logprobs=[part.pack(part.trainer_BT) for part in parts])
    pairs = [of_library(loss, part, plan=plan, batch=batch) for part, batch in zip(parts, batches, strict=True)]
    return sum(value for value, _ in pairs), torch.cat([gradient for _, gradient in pairs])


def of_framework_parts(theirs, anchor, padded):
    pairs = [of_framework(theirs, anchor, padded.rows(*rows)) for rows in PARTS]
    return sum(value for value, _ in pairs), torch.cat([gradient for _, gradient in pairs])


def whole_in_order_of_parts(loss, padded):
    value, gradient_BT = of_library(loss, padded)
    return value, gradient_BT[[row for rows in PARTS for row in rows]]


def test_micro_batches_of_trl_dapo_add_up_as_here(trl):
    padded = padded_batch()
    accumulation = {"num_items_in_batch": int(padded.mask_BT.sum()), "gradient_accumulation_steps": len(PARTS)}
    loss = PolicyLoss(gate=PpoClip())
    whole = whole_in_order_of_parts(loss, padded)
    assert_close(of_framework_parts(trl_loss(**accumulation), trl, padded), whole, FLOAT64)
    assert_close(of_parts(loss, padded), whole, FLOAT64)


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


def test_rows_without_targets_count_in_the_sequence_means_of_trl_but_not_here_nor_in_verl(trl, verl):
    padded, without, others = with_an_empty_row(padded_batch())
    value, gradient_BT = of_library(preset_loss("grpo"), padded)
    same = (value, gradient_BT[others])
    assert_close(same, of_library(preset_loss("grpo"), without), FLOAT64)
    value, gradient_BT = of_framework(trl_loss(loss_type="grpo"), trl, padded)
    more = len(padded.mask_BT) / len(others)
    assert_close((more * value, more * gradient_BT[others]), same, FLOAT64)
    theirs = verl_loss("vanilla", "seq-mean-token-mean", old="behaviour", clip_ratio_c=1e3)
    value, gradient_BT = of_framework(theirs, verl, padded)
    assert_close((value, gradient_BT[others]), same, EPSILON)


def test_a_sequence_level_of_trl_multiplies_its_kl_by_the_ratio_of_the_sequence_and_here_by_that_of_the_token(trl):
    padded = padded_batch()
    ours = of_library(preset_loss("gspo", penalties=(Kl(coefficient=0.3),)), padded)
    assert differ(ours, of_framework(trl_kl_loss(loss_type="grpo", beta=0.3, **GSPO), trl, padded))
    biased = of_library(preset_loss("gspo", penalties=(Kl(coefficient=0.3, estimator="k3"),)), padded)
    theirs = trl_kl_loss(loss_type="grpo", beta=0.3, use_bias_correction_kl=False, **GSPO)
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


# ---- verl


def verl_loss(name, agg_mode="token-mean", old="proximal", **settings) -> Anchor:
    """A policy loss of verl, with the proximal or the behaviour policy as its old one."""
    return lambda verl, padded, x_BT: verl.verl_policy_loss(
        name, getattr(padded, f"{old}_BT"), x_BT, padded.advantages_BT, padded.mask_BT, agg_mode, **settings
    )


def verl_bypass(agg_mode="token-mean", loss_type="reinforce", clip_ratio_c=3.0, **correction) -> Anchor:
    """verl's mode without old logprobs: everything is relative to the behaviour policy."""
    settings = {"rollout_correction": {"loss_type": loss_type, **correction}}
    return verl_loss("bypass_mode", agg_mode, old="behaviour", policy_loss=settings, clip_ratio_c=clip_ratio_c)


def verl_weighted(level, threshold, **settings) -> Anchor:
    """verl's vanilla loss with its rollout weights."""

    def theirs(verl, padded, x_BT):
        drift_BT = padded.proximal_BT - padded.behaviour_BT
        weights_BT = verl.verl_rollout_weights(drift_BT, padded.mask_BT, level, threshold)
        return verl_loss("vanilla", rollout_weights_BT=weights_BT, **settings)(verl, padded, x_BT)

    return theirs


def verl_rejected(options, threshold) -> Anchor:
    """verl's vanilla loss of what its rejection leaves."""

    def theirs(verl, padded, x_BT):
        drift_BT = padded.proximal_BT - padded.behaviour_BT
        kept_BT = verl.verl_rejection_mask(drift_BT, padded.mask_BT, options, threshold)
        assert 0 < kept_BT.sum() < padded.mask_BT.sum()
        return verl_loss("vanilla")(verl, replace(padded, mask_BT=kept_BT), x_BT)

    return theirs


def verl_kl_loss(kind) -> Anchor:
    """A loss of verl's actor with a KL loss: both are aggregated by tokens."""

    def theirs(verl, padded, x_BT):
        penalty_BT = verl.verl_kl_penalty(x_BT, padded.reference_BT, kind)
        return verl_loss("gpg")(verl, padded, x_BT) + 0.3 * verl.verl_agg_loss(penalty_BT, padded.mask_BT, "token-mean")

    return theirs


AGGREGATIONS = {
    "token-mean": TokenMean(),
    "token-sum": Sum(),
    "seq-mean-token-sum": SegmentSum(),
    "seq-mean-token-sum-norm": Constant(length=17),
    "seq-mean-token-mean": SegmentMean(),
}
"""By verl's names; the norm is by default the number of columns."""
SQRT = math.sqrt(1.2)
"""verl's k2 = x^2 / 2 is at most .6 where abs(x) is at most this."""


def verl_tolerance(agg_mode):
    return EPSILON if agg_mode == "seq-mean-token-mean" else FLOAT64


def rejecting(**band):
    """verl's vanilla loss, with the denominator that counts what rejection leaves."""
    return preset_loss("verl_default", corrections=(Band(**band),), aggregation=TokenMean(counted="after"))


def charging(estimator):
    return PolicyLoss(gate=Score(low=1.0, high=1.0), penalties=(Kl(coefficient=0.3, estimator=estimator),))


VERL_CASES = (
    *(Case(f"vanilla, {mode}", preset_loss("verl_default", aggregation=aggregation), verl_loss("vanilla", mode),
           per_token=True, tolerance=verl_tolerance(mode)) for mode, aggregation in AGGREGATIONS.items()),
    *(Case(f"gspo, {mode}", PolicyLoss(gate=PpoClip(), level="segment_mean_token", between="trainer/proximal",
                                       aggregation=aggregation),
           verl_loss("gspo", mode), per_token=True, tolerance=verl_tolerance(mode))
      for mode, aggregation in AGGREGATIONS.items()),
    Case("gspo of its paper", preset_loss("gspo_token"),
         verl_loss("gspo", "seq-mean-token-mean", old="behaviour", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
         per_token=True, tolerance=EPSILON),
    Case("vanilla with three bounds", PolicyLoss(gate=PpoClip(low=0.1, high=0.4, dual=2.0)),
         verl_loss("vanilla", old="behaviour", clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=2.0),
         per_token=True),
    Case("vanilla whose clip_ratio alone changes nothing", preset_loss("verl_default"),
         verl_loss("vanilla", clip_ratio=0.4), per_token=True),
    Case("dual_clip", preset_loss("dual_clip"), verl_loss("vanilla", old="behaviour"), per_token=True),
    Case("sapo, which is a mean over sequences whatever is asked", preset_loss("sapo"),
         verl_loss("sapo", "token-mean", old="behaviour"), per_token=True, tolerance=EPSILON),
    Case("cispo", preset_loss("minimax_m1"), verl_loss("cispo", clip_ratio_high=0.28), per_token=True),
    Case("dppo_tv, whose cap is 3", PolicyLoss(gate=Score(high=3.0), corrections=(TrustTv(),)),
         verl_loss("dppo_tv", old="behaviour"), per_token=True),
    Case("dppo_tv with the cap of its paper", preset_loss("dppo_tv"),
         verl_loss("dppo_tv", old="behaviour", clip_ratio_c=20.0), per_token=True, drift=6.0),
    Case("dppo_kl, whose cap is 3", PolicyLoss(gate=Score(high=3.0), corrections=(TrustKl(),)),
         verl_loss("dppo_kl", old="behaviour", clip_ratio_low=0.05, clip_ratio_high=0.05), per_token=True),
    Case("dppo_kl with the cap of its paper", preset_loss("dppo_kl"),
         verl_loss("dppo_kl", old="behaviour", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0),
         per_token=True, drift=6.0),
    Case("gpg", preset_loss("reinforce"), verl_loss("gpg"), per_token=True),
    Case("dro is kimi_k15", preset_loss("kimi_k15"),
         verl_loss("dro", "seq-mean-token-sum", policy_loss={"dro_beta": 0.1}), per_token=True),
    Case("geo_mean is gmpo", preset_loss("gmpo"),
         verl_loss("geo_mean", old="behaviour", clip_ratio_low=0.4, clip_ratio_high=0.4), tolerance=EPSILON),
    Case("bypass reinforce is pipelinerl", preset_loss("pipelinerl"),
         verl_bypass("seq-mean-token-sum", rollout_is="token", rollout_is_threshold=1.02), per_token=True),
    Case("bypass reinforce is pipelinerl_paper", preset_loss("pipelinerl_paper"),
         verl_bypass("seq-mean-token-sum", rollout_is="token", rollout_is_threshold=5.0), per_token=True),
    Case("bypass reinforce with two bounds is glm5", preset_loss("glm5"),
         verl_bypass(rollout_is="token", rollout_is_threshold="0.8_1.2"), per_token=True),
    Case("bypass reinforce weighs whole sequences", PolicyLoss(gate=Score(high=2.0), level="segment_product"),
         verl_bypass(rollout_is="sequence", rollout_is_threshold=2.0), per_token=True),
    Case("bypass ppo_clip is grpo", preset_loss("grpo"),
         verl_bypass("seq-mean-token-mean", "ppo_clip", clip_ratio_c=1e3), per_token=True, tolerance=EPSILON),
    Case("bypass ppo_clip of what is not rejected",
         preset_loss("dual_clip", corrections=(Band(between="trainer/behaviour", low=1 / 1.5, high=2.0),),
                     aggregation=TokenMean(counted="after")),
         verl_bypass(loss_type="ppo_clip", rollout_rs="token_k1", rollout_rs_threshold="0.5_1.5"), per_token=True),
    Case("rollout weights of tokens", preset_loss("verl_default", corrections=(Truncate(high=2.0),)),
         verl_weighted("token", 2.0), per_token=True),
    Case("rollout weights of tokens without dual clip are tis", preset_loss("tis"),
         verl_weighted("token", 2.0, clip_ratio_c=1e3), per_token=True),
    Case("rollout weights of sequences",
         preset_loss("verl_default", corrections=(Truncate(level="segment_product", high=2.0),)),
         verl_weighted("sequence", 2.0), per_token=True),
    Case("rollout weights of tokens with two bounds are icepop", preset_loss("icepop"),
         verl_weighted("token", "0.5_5.0", clip_ratio_c=1e3), per_token=True),
    Case("rollout weights of sequences with two bounds are mis", preset_loss("mis"),
         verl_weighted("sequence", "1e-9_2.0", clip_ratio_c=1e3), per_token=True),
    Case("reject token_k1, whose bounds are of behaviour over old", rejecting(low=1 / 1.5, high=2.0),
         verl_rejected("token_k1", "0.5_1.5"), per_token=True),
    Case("reject seq_mean_k1", rejecting(level="segment_mean", low=1 / 1.1, high=1 / 0.9),
         verl_rejected("seq_mean_k1", "0.9_1.1"), per_token=True),
    Case("reject seq_sum_k1", rejecting(level="segment_product", low=1 / 1.5, high=2.0),
         verl_rejected("seq_sum_k1", "0.5_1.5"), per_token=True),
    Case("reject token_k2", rejecting(low=math.exp(-SQRT), high=math.exp(SQRT)), verl_rejected("token_k2", 0.6),
         per_token=True),
    Case("reject seq_max_k2", rejecting(low=math.exp(-SQRT), high=math.exp(SQRT), whole_segments=True),
         verl_rejected("seq_max_k2", 0.6), per_token=True),
    *(Case(f"kl loss {theirs}", charging(ours), verl_kl_loss(theirs), per_token=True)
      for theirs, ours in {"k1": "k1", "k2": "k2", "k3": "k3", "k3+": "k3_straight_through"}.items()),
)  # fmt: skip


@by_name(VERL_CASES)
def test_loss_and_gradient_are_those_of_verl(case, verl):
    assert_parity(case, verl)


def test_what_verl_rejects_of_negative_advantages_is_opsm(verl):
    """verl has no such mask for one sign of advantages: its seq_mean_k1, applied to those rows only."""
    padded = padded_batch()
    loss = preset_loss("verl_default", corrections=(Opsm(bound=1e-4),), aggregation=TokenMean(counted="after"))

    def theirs(verl, padded, x_BT):
        drift_BT = x_BT.detach() - padded.behaviour_BT
        kept_BT = verl.verl_rejection_mask(drift_BT, padded.mask_BT, "seq_mean_k1", f"1e-9_{math.exp(1e-4)!r}")
        kept_BT = kept_BT | (padded.mask_BT & (padded.advantages_BT >= 0))
        assert 0 < kept_BT.sum() < padded.mask_BT.sum()
        return verl_loss("vanilla")(verl, replace(padded, mask_BT=kept_BT), x_BT)

    assert_close(of_library(loss, padded), of_framework(theirs, verl, padded), FLOAT64)


@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
def test_micro_batches_of_verl_add_up_under_global_counts_as_here(agg_mode, verl):
    padded = padded_batch(per_token=True)
    counts = {"dp_size": 1, "batch_num_tokens": int(padded.mask_BT.sum()), "global_batch_size": len(padded.mask_BT)}
    loss = preset_loss("verl_default", aggregation=AGGREGATIONS[agg_mode])
    whole = whole_in_order_of_parts(loss, padded)
    theirs = of_framework_parts(verl_loss("vanilla", agg_mode, global_counts=counts), verl, padded)
    assert_close(theirs, whole, verl_tolerance(agg_mode))
    assert_close(of_parts(loss, padded), whole, FLOAT64)


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


# ---- Liger


@dataclass(frozen=True)
class LigerCase:
    name: str
    ours: PolicyLoss
    settings: dict
    with_ratio: bool = False
    """Whether the engine's correction is given: a ratio for each token, truncated at 2."""


LIGER_CASES = (
    LigerCase("grpo", preset_loss("grpo"), {"loss_type": "grpo"}),
    LigerCase("bnpo", preset_loss("bnpo"), {"loss_type": "bnpo"}),
    LigerCase("dr_grpo", preset_loss("dr_grpo"), {"loss_type": "dr_grpo", "max_completion_length": 1024}),
    LigerCase("dapo", preset_loss("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    LigerCase("cispo", preset_loss("cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    LigerCase("sapo", preset_loss("sapo"), {"loss_type": "sapo"}),
    LigerCase("luspo", preset_loss("luspo"), {"loss_type": "luspo", **GSPO}),
    LigerCase("vespo", preset_loss("vespo"), {"loss_type": "vespo"}),
    LigerCase("gspo", preset_loss("gspo"), {"loss_type": "grpo", **GSPO}),
    LigerCase("gspo with a wide clip", WIDE_GSPO, {"loss_type": "grpo", **SEQUENCE}),
    LigerCase("dapo at level sequence", PolicyLoss(gate=PpoClip(), level="segment_mean"), SEQUENCE),
    LigerCase("delta", preset_loss("delta_ppo"), {"delta": 4.0}),
    LigerCase("beta", charging("k3").model_copy(update={"gate": PpoClip()}), {"beta": 0.3}),
    LigerCase("beta, use_bias_correction_kl", charging("ratio_k3").model_copy(update={"gate": PpoClip()}),
              {"beta": 0.3, "use_bias_correction_kl": True}),
    LigerCase("token_truncate is tis", preset_loss("tis"), {}, with_ratio=True),
    LigerCase("vespo with token_truncate", preset_loss("vespo"), {"loss_type": "vespo"}, with_ratio=True),
)  # fmt: skip
TEMPERATURE = 0.7


def library_logprobs(hidden_BTH, weight_VH, tokens_BT):
    """Logprobs [B, T] by the library's head."""
    logprobs_N = chunked_logprobs(
        hidden_BTH.flatten(0, 1),
        weight_VH,
        tokens_BT.flatten(),
        torch.full((tokens_BT.numel(),), TEMPERATURE, dtype=torch.float64),
    )
    return logprobs_N.view(tokens_BT.shape)


def of_library_head(loss, padded, hidden_BTH, weight_VH, tokens_BT):
    """Value and gradients with respect to hidden states and weight, in float64."""
    hidden_BTH, weight_VH = (tensor.double().requires_grad_() for tensor in (hidden_BTH, weight_VH))
    trainer_T = padded.pack(library_logprobs(hidden_BTH, weight_VH, tokens_BT))
    batch = padded.packed()
    value = loss(batch, trainer_T, prepare(loss, [batch], trainer_logprobs=[trainer_T.detach()])).loss
    return value.detach(), *torch.autograd.grad(value, (hidden_BTH, weight_VH))


def of_liger(liger, padded, hidden_BTH, weight_VH, tokens_BT, *, old="behaviour", chunk_size=1, **settings):
    hidden_BTH, weight_VH = (tensor.clone().requires_grad_() for tensor in (hidden_BTH, weight_VH))
    value = liger.liger_loss(
        hidden_BTH,
        weight_VH,
        tokens_BT,
        padded.mask_BT,
        padded.row_advantages.float(),
        getattr(padded, f"{old}_BT").float(),
        padded.reference_BT.float(),
        temperature=TEMPERATURE,
        chunk_size=chunk_size,
        **settings,
    )
    return value.detach(), *torch.autograd.grad(value, (hidden_BTH, weight_VH))


def head_batch(seed=0):
    """Inputs of a head, and a batch around the logprobs that they give."""
    inputs = hidden_BTH, weight_VH, tokens_BT = head_inputs()
    trainer_BT = library_logprobs(hidden_BTH.double(), weight_VH.double(), tokens_BT)
    return padded_batch(seed, trainer_BT=trainer_BT), inputs


@pytest.mark.parametrize("chunk_size", [1, 5])
@by_name(LIGER_CASES)
def test_loss_and_gradients_of_hidden_states_and_weight_are_those_of_liger(case, chunk_size, liger):
    padded, inputs = head_batch()
    settings = dict(case.settings)
    if case.with_ratio:
        ratio_BT = (padded.proximal_BT - padded.behaviour_BT).exp().float()
        high = 2.0 if case.ours.corrections else 1e6
        settings |= {"sampling_ratio": ratio_BT.clamp(max=high).masked_fill(~padded.mask_BT, 1.0), "old": "proximal"}
    theirs = of_liger(liger, padded, *inputs, chunk_size=chunk_size, **settings)
    assert_close(theirs, of_library_head(case.ours, padded, *inputs), FLOAT32)


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


# ---- advantages

GROUPS = ((1.0, 0.0, 0.5), (2.0, 2.5, 4.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))
REWARDS = torch.tensor(GROUPS, dtype=torch.float64).flatten()


def trl_advantages(trl, rewards_B, scale_rewards):
    padded = padded_batch()
    scored = trl.trl_scored_batch(
        rewards_B, padded.proximal_BT, padded.mask_BT, num_generations=NUM_GENERATIONS, scale_rewards=scale_rewards
    )
    return scored["advantages"].tolist()


def flat(groups):
    return [advantage for group in groups for advantage in group]


@pytest.mark.parametrize(("scale_rewards", "estimator"), [("group", "std"), ("none", "mean")])
def test_advantages_of_a_group_are_those_of_trl(scale_rewards, estimator, trl):
    found = flat(batch_advantages(GROUPS, estimator))
    assert found == pytest.approx(trl_advantages(trl, REWARDS, scale_rewards), rel=FLOAT64, abs=FLOAT64)


def test_batch_std_is_that_of_trl_for_groups_of_one_mean_and_otherwise_leaves_out_what_lies_between_groups(trl):
    centred = [[reward - sum(group) / len(group) for reward in group] for group in GROUPS]
    ours = flat(batch_advantages(GROUPS, "batch_std"))
    # TRL computes n / (n - 1) in float32 (trl/trainer/utils.py:1041).
    assert ours == pytest.approx(trl_advantages(trl, torch.tensor(flat(centred)).double(), "batch"), rel=1e-7, abs=1e-7)
    theirs = trl_advantages(trl, REWARDS, "batch")
    factor = (torch.tensor(flat(centred)).double().std().item() + 1e-4) / (REWARDS.std().item() + 1e-4)
    assert factor < 0.8
    assert [factor * advantage for advantage in ours] == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_leave_one_out_advantages_are_those_of_trl(trl):
    padded = padded_batch()
    theirs = trl.trl_rloo_advantages(REWARDS, padded.proximal_BT, padded.mask_BT, num_generations=NUM_GENERATIONS)
    assert flat(batch_advantages(GROUPS, "leave_one_out")) == pytest.approx(theirs.tolist(), rel=FLOAT64, abs=FLOAT64)


VERL_GROUPS = (*GROUPS[:3], (0.25, 1.0), (3.0,))
VERL_REWARDS = torch.tensor([reward for group in VERL_GROUPS for reward in group], dtype=torch.float64)
GROUP_IDS = torch.tensor([index for index, group in enumerate(VERL_GROUPS) for _ in group])


def verl_advantages(verl, name, **settings):
    """verl's advantages of each row, of which there are 12, and the rows' numbers of targets."""
    mask_BT = padded_batch().mask_BT
    advantages_BT = verl.verl_advantages(name, VERL_REWARDS, mask_BT, GROUP_IDS, **settings)
    assert ((advantages_BT == 0) | mask_BT).all()
    assert torch.equal(torch.where(mask_BT, advantages_BT[:, :1], 0.0), advantages_BT)
    return advantages_BT[:, 0].tolist(), mask_BT.sum(1).tolist()


@pytest.mark.parametrize(
    ("name", "settings", "estimator", "tolerance", "of_one"),
    [
        ("grpo", {"epsilon": 1e-4}, "std", FLOAT64, 3.0 / (1 + 1e-4)),
        # float32 inside (verl/utils/groupwise.py)
        ("grpo_vectorized", {"epsilon": 1e-4}, "std", 1e-6, 3.0 / (1 + 1e-4)),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, "mean", FLOAT64, 3.0),
        ("rloo", {}, "leave_one_out", FLOAT64, 3.0),
        ("rloo_vectorized", {}, "leave_one_out", FLOAT64, 0.0),
        ("opo", {}, "opo", FLOAT64, 3.0),
    ],
    ids=["grpo", "grpo_vectorized", "grpo without std", "rloo", "rloo_vectorized", "opo"],
)
def test_advantages_are_those_of_verl_but_for_a_group_of_one_which_has_its_raw_reward_in_verl_and_0_here(
    name, settings, estimator, tolerance, of_one, verl
):
    theirs, lengths = verl_advantages(verl, name, **settings)
    of_groups = [[lengths.pop(0) for _ in group] for group in VERL_GROUPS]
    ours = flat(batch_advantages(VERL_GROUPS, estimator, of_groups))
    assert ours[:-1] == pytest.approx(theirs[:-1], rel=tolerance, abs=tolerance)
    assert ours[-1] == 0
    assert theirs[-1] == pytest.approx(of_one, rel=1e-6)  # its deviation of 1 is a float32


def test_grpo_of_verl_adds_1e_6_to_the_deviation_and_here_it_is_1e_4_as_in_trl(verl):
    theirs, _ = verl_advantages(verl, "grpo")
    ours = flat(batch_advantages(VERL_GROUPS, "std"))
    furthest = max(abs(a - b) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
    assert 1e-5 < furthest < 1e-3


# ---- heads

HEADS = {
    "trl chunked": ("trl", "trl_chunked_logprobs", FLOAT32),
    "trl selective": ("trl", "trl_selective_logprobs", FLOAT64),
    "liger": ("liger", "liger_logprobs", FLOAT32),
    "liger scaled": ("liger", "liger_scaled_logprobs", FLOAT32),
    "verl": ("verl", "verl_logprobs", FLOAT32),
    "torch": ("torch_head", "torch_logprobs", FLOAT64),
}
"""Fixture, function, and the precision that it computes in when it is given float64."""


@pytest.fixture(scope="module")
def torch_head():
    return importlib.import_module("tests.losses.anchors.torch_anchor")


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize("name", HEADS)
def test_logprobs_and_gradients_of_the_head_are_those_of_the_frameworks(name, temperature, request):
    framework, function, tolerance = HEADS[name]
    theirs = getattr(request.getfixturevalue(framework), function)
    hidden_BTH, weight_VH, tokens_BT = head_inputs(torch.float64)
    tokens_N = tokens_BT.flatten()
    upstream_N = torch.randn(len(tokens_N), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    results = []
    for head in (
        lambda h, w, t: chunked_logprobs(h, w, t, torch.full(t.shape, temperature, dtype=torch.float64), chunk_size=16),
        lambda h, w, t: theirs(h, w, t, temperature),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden_BTH.flatten(0, 1), weight_VH)]
        logprobs_N = head(*leaves, tokens_N)
        gradients = torch.autograd.grad(logprobs_N, leaves, upstream_N.to(logprobs_N.dtype))
        results.append((logprobs_N.detach(), *gradients))
    for ours, expected in zip(*results, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(ours, expected.double(), rtol=0, atol=tolerance * largest)


# ---- what the comparisons rest on


def falls_on_both_sides(ratios, bound):
    return bool((ratios < bound).any() and (ratios > bound).any())


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("old", ["behaviour", "proximal"])
def test_ratios_of_the_inputs_fall_on_both_sides_of_every_bound_for_both_signs_of_advantages(old, per_token):
    bounds = {
        "token": (0.8, 0.9, 1.02, 1.2, 1.28, 1.4, 2.0, 3.0, 4.0, 5.0, math.exp(0.4), math.exp(-0.4)),
        "segment_mean": (0.8, 1 - 3e-4, 1 + 4e-4, 1.2),
        "segment_product": (0.8, 1.2, 2.0),
    }
    signs, ratios = [], {level: [] for level in bounds}
    for seed in SEEDS:
        padded = padded_batch(seed, per_token=per_token)
        log_BT = torch.where(padded.mask_BT, padded.trainer_BT - getattr(padded, f"{old}_BT"), 0.0)
        sum_BT = log_BT.sum(1, keepdim=True).expand(log_BT.shape)
        of_levels = {"token": log_BT, "segment_mean": sum_BT / padded.mask_BT.sum(1, keepdim=True)}
        for level, values_BT in (of_levels | {"segment_product": sum_BT}).items():
            ratios[level].append(values_BT[padded.mask_BT].exp())
        signs.append(padded.advantages_BT[padded.mask_BT].sign())
        assert log_BT.abs().max() < 20
        assert (padded.trainer_BT - padded.reference_BT).min() > -2.6
        assert (~padded.mask_BT & padded.inside_BT).any()
    sign_N = torch.cat(signs)
    assert (sign_N == 0).any()
    for level in bounds:
        for bound in bounds[level]:
            for sign in (-1, 1):
                assert falls_on_both_sides(torch.cat(ratios[level])[sign_N == sign], bound), (level, bound, sign)


def test_ratios_of_old_to_behaviour_policy_fall_on_both_sides_of_every_bound():
    for seed in SEEDS:
        padded = padded_batch(seed)
        log_BT = torch.where(padded.mask_BT, padded.proximal_BT - padded.behaviour_BT, 0.0)
        for bound in (0.5, 1 / 1.5, 1.5, 2.0, 5.0):
            assert falls_on_both_sides(log_BT[padded.mask_BT].exp(), bound), bound
        for bound in (2.0, 3.0):
            assert falls_on_both_sides(log_BT.sum(1).exp(), bound), bound


def test_the_bounds_of_dppo_are_reached_on_both_sides():
    for seed in SEEDS:
        for drift, cap in ((2.0, 3.0), (6.0, 20.0)):
            padded = padded_batch(seed, per_token=True, drift=drift)
            change_N = (padded.trainer_BT.exp() - padded.behaviour_BT.exp())[padded.mask_BT]
            ratio_N = (padded.trainer_BT - padded.behaviour_BT)[padded.mask_BT].exp()
            sign_N = padded.advantages_BT[padded.mask_BT].sign()
            onwards_N = sign_N * change_N
            assert (onwards_N > 0.2).any()
            assert (onwards_N < -0.2).any()
            assert ((onwards_N > 0) & (onwards_N < 0.2)).any()
            kept_N = (sign_N != 0) & (onwards_N <= 0.2)
            assert (kept_N & (ratio_N > cap)).any()
            assert (kept_N & (ratio_N < cap)).any()


def test_the_anchors_leave_nothing_behind_but_their_modules(liger, verl):
    assert str(anchors_folder()) not in sys.path
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ
    formats = [handler.formatter._fmt for handler in logging.getLogger().handlers if handler.formatter]
    assert "%(levelname)s:%(asctime)s:%(message)s" not in formats


def test_anchors_that_are_not_installed_are_an_error_that_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("INFLIGHT_ANCHORS", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"nowhere is missing: make installs"), importable_anchors():
        pass
