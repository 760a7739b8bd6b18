"""Metrics reduce exactly, and say what the raw ratios say."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.losses import (
    Maximum,
    Metric,
    PpoClip,
    add_metrics,
    decode_metrics,
    effective_sample_size,
    encode_metrics,
    grpo_loss,
    metric_values,
    ratio_metrics,
    reinforce_loss,
    staleness_metrics,
)
from inflight.losses.targets import Targets

LOG_RATIOS = st.lists(st.floats(-5, 5), min_size=1, max_size=30)


def metrics_of(log_ratios):
    trainer_N = torch.tensor(log_ratios, dtype=torch.float64)
    return ratio_metrics(trainer_N, torch.zeros_like(trainer_N))


def loss_inputs(log_ratios, advantages):
    size = len(log_ratios)
    trainer_T = torch.full((size,), -1.0, dtype=torch.float64)
    behaviour_T = trainer_T - torch.tensor(log_ratios, dtype=torch.float64)
    mask_T = torch.ones(size, dtype=torch.bool)
    return trainer_T, behaviour_T, torch.tensor(advantages, dtype=torch.float64), mask_T


@given(log_ratios=LOG_RATIOS, cut=st.integers(0, 30))
@settings(max_examples=60)
def test_metrics_of_parts_add_up_to_those_of_the_whole(log_ratios, cut):
    whole = metric_values(metrics_of(log_ratios))
    parts = metric_values(add_metrics(metrics_of(log_ratios[:cut]), metrics_of(log_ratios[cut:])))
    # float64 sums in another order.
    assert parts == pytest.approx(whole, rel=1e-12, abs=1e-13)


@given(log_ratios=LOG_RATIOS)
@settings(max_examples=60)
def test_ratio_metrics_equal_a_plain_loop(log_ratios):
    weights = [math.exp(x) for x in log_ratios]
    n = len(weights)
    # float64: sums of 30 terms up to 150, of both signs.
    assert metric_values(metrics_of(log_ratios)) == pytest.approx(
        {
            "ratio": sum(weights) / n,
            "ratio_squared": sum(w * w for w in weights) / n,
            "behaviour_kl_k1": -sum(log_ratios) / n,
            "behaviour_kl_k3": sum(w - 1 - x for w, x in zip(weights, log_ratios, strict=True)) / n,
            "max_abs_log_ratio": max(abs(x) for x in log_ratios),
            "effective_sample_size": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        },
        rel=1e-12,
        abs=1e-13,
    )


def test_effective_sample_size_of_equal_weights_is_one_and_of_a_single_giant_is_one_nth():
    assert effective_sample_size(metrics_of([0.7] * 10)) == pytest.approx(1.0, rel=1e-15)  # float64
    assert effective_sample_size(metrics_of([50.0] + [-50.0] * 9)) == pytest.approx(0.1, rel=1e-15)


def test_loss_reports_the_raw_effective_sample_size_and_not_the_truncated_one():
    log_ratios = [1.5, -1.0, 0.0, 2.5, -0.3]
    output = reinforce_loss(*loss_inputs(log_ratios, [1.0] * 5), cap=1.02)
    raw = [math.exp(x) for x in log_ratios]
    truncated = [min(w, 1.02) for w in raw]
    expected, flattering = (sum(ws) ** 2 / (5 * sum(w * w for w in ws)) for ws in (raw, truncated))
    assert effective_sample_size(output.metrics) == pytest.approx(expected, rel=1e-12)  # float64
    assert abs(expected - flattering) > 0.3
    assert output.metrics["truncated_fraction"] == Metric(2.0, 5)
    assert effective_sample_size(output.metrics, "pull") == pytest.approx(flattering, rel=1e-12)


def test_sequences_have_an_effective_sample_size_of_their_own():
    log_ratios = torch.tensor([[0.5, -0.2, 9.0], [1.0, 1.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    trainer = torch.full((2, 3), -1.0, dtype=torch.float64)
    values = metric_values(grpo_loss(trainer, trainer - log_ratios, torch.ones(2), mask).metrics)
    weights = [math.exp(0.3), math.exp(-1.0)]
    expected = sum(weights) ** 2 / (2 * sum(w * w for w in weights))
    assert values["effective_sample_size_sequences"] == pytest.approx(expected, rel=1e-12)  # float64
    # Clipped above 1.2: of the tokens e^.5, e^-.2 and e, e, e^-3 the pulls are 0, e^-.2 and 0, 0, e^-3.
    pulls = [math.exp(-0.2) / 2, math.exp(-3.0) / 3]
    used = sum(pulls) ** 2 / (2 * sum(p * p for p in pulls))
    assert values["effective_sample_size_sequences_used"] == pytest.approx(used, rel=1e-12)


def test_dual_clip_is_counted_apart():
    up = math.log(4.0)
    batch = loss_inputs([up, up, 0.0], [1, -1, -1])
    targets = Targets(*batch[:2], batch[0], batch[2], torch.zeros(3, dtype=torch.int64), 1)
    fractions = PpoClip(dual=3.0)(targets, targets.log_ratio("trainer/behaviour"), batch[3]).fractions
    assert fractions["clip_fraction_high"].tolist() == [True, False, False]
    assert fractions["clip_fraction_dual"].tolist() == [False, True, False]
    assert not fractions["clip_fraction_low"].any()


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_huge_log_ratios_leave_metrics_finite_and_are_seen_in_the_maximum(log_ratio):
    values = metric_values(metrics_of([log_ratio, 0.0, 0.0]))
    assert all(math.isfinite(value) for value in values.values())
    assert values["max_abs_log_ratio"] == 1e4
    # float64: exact but for rounding.
    assert values["effective_sample_size"] == pytest.approx(1 / 3 if log_ratio > 0 else 2 / 3, rel=1e-12)


def test_clip_fractions_count_only_the_binding_side():
    up, down = math.log(1.5), math.log(0.5)
    log_ratios, advantages = [up, up, up, down, down, 0.0, up], [1, 1, -1, -1, 1, 1, 0]
    metrics = grpo_loss(*loss_inputs(log_ratios, advantages)).metrics
    assert metrics["clip_fraction_high"] == Metric(2.0, 7)
    assert metrics["clip_fraction_low"] == Metric(1.0, 7)


def test_lag_is_per_token_and_mismatch_is_of_fresh_tokens_only():
    mask_T = torch.tensor([False, True, True, True, True])
    versions_T = torch.tensor([-1, 3, 5, 7, 7])
    trainer_T = torch.tensor([0.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    behaviour_T = trainer_T - torch.tensor([9.0, 9.0, 9.0, 0.1, -0.3], dtype=torch.float64)
    metrics = staleness_metrics(trainer_T[mask_T], behaviour_T[mask_T], 7 - versions_T[mask_T])
    assert metrics["lag"] == Metric(6.0, 4)
    assert metrics["max_lag"] == Maximum(4.0)
    # float64.
    assert metrics["mismatch_k1"].value == pytest.approx(0.1, rel=1e-12)
    assert metrics["stale_k1"].value == pytest.approx(-9.0, rel=1e-12)
    assert metrics["stale_k3"] == Metric(pytest.approx(2 * (math.exp(9.0) - 10.0)), 2)
    assert metrics["mismatch_k3"].value == pytest.approx((math.exp(0.1) + math.exp(-0.3) - 2 + 0.2) / 2, rel=1e-12)


def test_metrics_that_counted_nothing_are_left_out_of_the_values():
    assert metric_values(metrics_of([])) == {"max_abs_log_ratio": 0.0}
    assert metric_values(add_metrics(metrics_of([]), metrics_of([0.0])))["ratio"] == 1.0


def test_numerators_and_denominators_add():
    assert add_metrics({"a": Metric(1, 2)}, {"a": Metric(3, 4)}) == {"a": Metric(4, 6)}


def test_metric_of_one_part_only_is_kept():
    assert add_metrics({"a": Metric(1, 2)}, {"b": Maximum(3)}) == {"a": Metric(1, 2), "b": Maximum(3)}


def test_maximum_keeps_the_larger_and_never_hides_a_nan():
    assert add_metrics({"a": Maximum(1)}, {"a": Maximum(3)}) == {"a": Maximum(3)}
    assert math.isnan(add_metrics({"a": Maximum(math.nan)}, {"a": Maximum(3)})["a"].value)
    assert math.isnan(add_metrics({"a": Maximum(3)}, {"a": Maximum(math.nan)})["a"].value)


def test_metrics_that_reduce_in_different_ways_are_not_added():
    with pytest.raises(TypeError, match="are reduced in different ways"):
        add_metrics({"a": Metric(1, 2)}, {"a": Maximum(3)})


def test_metrics_survive_json():
    metrics = metrics_of([0.1, -2.0])
    assert decode_metrics(json.loads(json.dumps(encode_metrics(metrics)))) == metrics
