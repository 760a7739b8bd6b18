"""How a loss of the library is compared with a framework's: on the same targets, packed here and padded there.

Shape suffixes: B rows, T padded columns or packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from inflight.losses import (
    PRESETS,
    Constant,
    Kl,
    PolicyLoss,
    PpoClip,
    Score,
    SegmentMean,
    SegmentSum,
    Sum,
    TokenMean,
    chunked_logprobs,
    prepare,
)
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


def preset_loss(name, **changes):
    """The loss of a preset, with some pieces changed."""
    return PRESETS[name].loss.model_copy(update=changes)


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


PARTS = ((0, 7), (1, 2, 3), (4, 5, 6, 8, 9, 10, 11))
"""Rows of three micro-batches of unequal size."""


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


def trl_loss(**settings) -> Anchor:
    """TRL's loss with the behaviour policy as its old one."""
    return lambda trl, padded, x_BT: trl.trl_loss(
        x_BT,
        padded.behaviour_BT,
        padded.row_advantages,
        padded.mask_BT,
        ref_logps_BT=padded.reference_BT,
        **settings,
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


def corrected(*corrections, **changes):
    """PPO on the policy at the start of the step, corrected for the engine's."""
    return PolicyLoss(gate=PpoClip(), between="trainer/proximal", corrections=corrections, **changes)


SEQUENCE = {"importance_sampling_level": "sequence"}


GSPO = {**SEQUENCE, "epsilon_low": 3e-4, "epsilon_high": 4e-4}


def verl_loss(name, agg_mode="token-mean", old="proximal", **settings) -> Anchor:
    """A policy loss of verl, with the proximal or the behaviour policy as its old one."""
    return lambda verl, padded, x_BT: verl.verl_policy_loss(
        name, getattr(padded, f"{old}_BT"), x_BT, padded.advantages_BT, padded.mask_BT, agg_mode, **settings
    )


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


def verl_tolerance(agg_mode):
    return EPSILON if agg_mode == "seq-mean-token-mean" else FLOAT64


def charging(estimator):
    return PolicyLoss(gate=Score(low=1.0, high=1.0), penalties=(Kl(coefficient=0.3, estimator=estimator),))


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
