"""The library's losses and head against the installed releases of TRL, Liger, verl and PyTorch.

Each case states a loss of the library beside the framework's own settings; value and gradient with respect to trainer
logprobs (for Liger: to hidden states and weight) are compared. Where a framework differs is in
`tests.losses.test_parity_differences`.

Shape suffixes: B rows, T padded columns or packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from inflight.losses import (
    Band,
    Constant,
    Kl,
    Opsm,
    PolicyLoss,
    PpoClip,
    Score,
    SegmentMean,
    SegmentSum,
    TokenMean,
    Truncate,
    TrustKl,
    TrustTv,
    chunked_logprobs,
)
from tests.losses.anchors.packages import anchors_folder, importable_anchors
from tests.losses.padded import head_inputs, padded_batch
from tests.losses.parity import (
    AGGREGATIONS,
    EPSILON,
    FLOAT32,
    FLOAT32_TAU,
    FLOAT64,
    GSPO,
    PARTS,
    SEEDS,
    SEQUENCE,
    TEMPERATURE,
    Anchor,
    Case,
    assert_close,
    charging,
    corrected,
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
    verl_tolerance,
    whole_in_order_of_parts,
)


def by_name(cases):
    """A parameter ``case`` for each."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def assert_parity(case, anchor):
    for seed in SEEDS:
        padded = padded_batch(seed, per_token=case.per_token, drift=case.drift)
        assert_close(of_library(case.ours, padded), of_framework(case.theirs, anchor, padded), case.tolerance)


# ---- TRL


def trl_opsm(trl, padded, x_BT):
    return trl.trl_loss(
        x_BT,
        padded.proximal_BT,
        padded.row_advantages,
        padded.mask_BT,
        sampling_logps_BT=padded.behaviour_BT,
        off_policy_mask_threshold=1e-4,
    )


WIDE_GSPO = PolicyLoss(gate=PpoClip(), level="segment_mean", aggregation=SegmentMean())

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
         trl_loss(beta=0.3)),
    Case("beta without use_bias_correction_kl",
         PolicyLoss(gate=PpoClip(), penalties=(Kl(coefficient=0.3, estimator="k3"),)),
         trl_loss(beta=0.3, use_bias_correction_kl=False)),
    Case("beta in a mean over sequences", preset_loss("grpo", penalties=(Kl(coefficient=0.3),)),
         trl_loss(loss_type="grpo", beta=0.3)),
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


def test_micro_batches_of_trl_dapo_add_up_as_here(trl):
    padded = padded_batch()
    accumulation = {"num_items_in_batch": int(padded.mask_BT.sum()), "gradient_accumulation_steps": len(PARTS)}
    loss = PolicyLoss(gate=PpoClip())
    whole = whole_in_order_of_parts(loss, padded)
    assert_close(of_framework_parts(trl_loss(**accumulation), trl, padded), whole, FLOAT64)
    assert_close(of_parts(loss, padded), whole, FLOAT64)


# ---- verl


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


SQRT = math.sqrt(1.2)
"""verl's k2 = x^2 / 2 is at most .6 where abs(x) is at most this."""


def rejecting(**band):
    """verl's vanilla loss, with the denominator that counts what rejection leaves."""
    return preset_loss("verl_default", corrections=(Band(**band),), aggregation=TokenMean(counted="after"))


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


# ---- Liger


@dataclass(frozen=True)
class LigerCase:
    name: str
    ours: PolicyLoss
    settings: dict
    truncated_at: float | None = None
    """Bound of the engine's correction, a ratio for each token; without it there is none."""
    tolerance: float = FLOAT32


FLOAT32_VESPO = 5 * FLOAT32
"""Its weight is an exponential of three times the sum of up to 17 such logprobs."""

LIGER_CASES = (
    LigerCase("grpo", preset_loss("grpo"), {"loss_type": "grpo"}),
    LigerCase("bnpo", preset_loss("bnpo"), {"loss_type": "bnpo"}),
    LigerCase("dr_grpo", preset_loss("dr_grpo"), {"loss_type": "dr_grpo", "max_completion_length": 1024}),
    LigerCase("dapo", preset_loss("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    LigerCase("cispo", preset_loss("cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    LigerCase("sapo", preset_loss("sapo"), {"loss_type": "sapo"}),
    LigerCase("luspo", preset_loss("luspo"), {"loss_type": "luspo", **GSPO}),
    LigerCase("vespo", preset_loss("vespo"), {"loss_type": "vespo"}, tolerance=FLOAT32_VESPO),
    LigerCase("gspo", preset_loss("gspo"), {"loss_type": "grpo", **GSPO}),
    LigerCase("gspo with a wide clip", WIDE_GSPO, {"loss_type": "grpo", **SEQUENCE}),
    LigerCase("dapo at level sequence", PolicyLoss(gate=PpoClip(), level="segment_mean"), SEQUENCE),
    LigerCase("delta", preset_loss("delta_ppo"), {"delta": 4.0}),
    LigerCase("beta", charging("k3").model_copy(update={"gate": PpoClip()}), {"beta": 0.3}),
    LigerCase("beta, use_bias_correction_kl", charging("ratio_k3").model_copy(update={"gate": PpoClip()}),
              {"beta": 0.3, "use_bias_correction_kl": True}),
    LigerCase("token_truncate is tis", preset_loss("tis"), {}, truncated_at=2.0),
    LigerCase("vespo of an engine", preset_loss("vespo"), {"loss_type": "vespo"}, truncated_at=1e6,
              tolerance=FLOAT32_VESPO),
)  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 5])
@by_name(LIGER_CASES)
def test_loss_and_gradients_of_hidden_states_and_weight_are_those_of_liger(case, chunk_size, liger):
    for seed in SEEDS:
        padded, inputs = head_batch(seed)
        settings = dict(case.settings)
        if case.truncated_at is not None:
            ratio_BT = (padded.proximal_BT - padded.behaviour_BT).exp().clamp(max=case.truncated_at)
            settings |= {"sampling_ratio": ratio_BT.masked_fill(~padded.mask_BT, 1.0).float(), "old": "proximal"}
        theirs = of_liger(liger, padded, *inputs, chunk_size=chunk_size, **settings)
        assert_close(theirs, of_library_head(case.ours, padded, *inputs), case.tolerance)


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


RATIO_BOUNDS = {
    "token": (0.8, 0.9, 1.02, 1.2, 1.28, 1.4, 2.0, 3.0, 4.0, 5.0, math.exp(0.4), math.exp(-0.4)),
    "segment_mean": (0.8, 1 - 3e-4, 1 + 4e-4, 1.2),
    "segment_product": (0.8, 1.2, 2.0),
}
"""All at which some case changes its branch."""


@pytest.mark.parametrize("old", ["behaviour", "proximal"])
@pytest.mark.parametrize(
    "make_batch",
    [padded_batch, lambda seed: padded_batch(seed, per_token=True), lambda seed: head_batch(seed)[0]],
    ids=["advantages of rows", "advantages of tokens", "around a head"],
)
def test_ratios_of_the_inputs_fall_on_both_sides_of_every_bound_for_both_signs_of_advantages(make_batch, old):
    signs, ratios = [], {level: [] for level in RATIO_BOUNDS}
    for seed in SEEDS:
        padded = make_batch(seed)
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
    for level, bounds in RATIO_BOUNDS.items():
        for bound in bounds:
            for sign in (-1, 1):
                assert falls_on_both_sides(torch.cat(ratios[level])[sign_N == sign], bound), (level, bound, sign)


def test_ratios_of_old_to_behaviour_policy_fall_on_both_sides_of_every_bound():
    for seed in SEEDS:
        padded = padded_batch(seed)
        log_BT = torch.where(padded.mask_BT, padded.proximal_BT - padded.behaviour_BT, 0.0)
        sum_B = log_BT.sum(1)
        for log_ratios, bounds in (
            (log_BT[padded.mask_BT], (0.5, 1 / 1.5, 1.5, 2.0, 5.0)),
            (sum_B / padded.mask_BT.sum(1), (1 / 1.1, 1 / 0.9)),
            (sum_B, (1 / 1.5, 2.0, 3.0)),
        ):
            for bound in bounds:
                assert falls_on_both_sides(log_ratios.exp(), bound), bound


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
        importlib.import_module("framework_that_is_not_installed")
