"""The losses of Tinker's API and their gradients against plain loops in float64, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from inflight.dialects.tinker.data import Datum
from inflight.dialects.tinker.losses import LOSSES, loss_named
from inflight.dialects.tinker.packing import check_inputs, loss_of, loss_of_rows, micro_batch_of, rows_of_data
from inflight.errors import InvalidRequestError, UnsupportedError

LENGTHS = (5, 1, 3)
Row = Mapping[str, float]


def data(loss_fn: str, num_targets: int | None = None) -> list[Datum]:
    random = np.random.default_rng(3)
    found = []
    for length in LENGTHS:
        shape = (length,) if num_targets is None else (length, num_targets)
        inputs: dict[str, Any] = {"target_tokens": random.integers(0, 50, shape)}
        for name in (*LOSSES[loss_fn].inputs, "weights"):
            inputs[name] = random.normal(size=shape).astype(np.float32)
        inputs["weights"][0] = 0.0
        if "sequence_ratio_mask" in inputs:
            inputs["sequence_ratio_mask"] = (random.random(shape) < 0.7).astype(np.float32)
        found.append(Datum(tuple(random.integers(0, 50, length)), inputs))
    return found


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# Each returns the loss of a row and its derivative by the row's logprob l.


def importance_sampling(logp: float, row: Row, s: Mapping[str, float], ratio: float) -> tuple[float, float]:
    r = math.exp(logp - row["logprobs"])
    return -r * row["advantages"], -r * row["advantages"]


def clipped(r: float, advantage: float, s: Mapping[str, float]) -> tuple[float, float]:
    bound = clamp(r, s["clip_low_threshold"], s["clip_high_threshold"])
    if r * advantage <= bound * advantage:
        return -r * advantage, -r * advantage
    return -bound * advantage, 0.0


def ppo(logp: float, row: Row, s: Mapping[str, float], ratio: float) -> tuple[float, float]:
    return clipped(math.exp(logp - row["logprobs"]), row["advantages"], s)


def gspo(logp: float, row: Row, s: Mapping[str, float], ratio: float) -> tuple[float, float]:
    return clipped(ratio, row["advantages"], s)


def cispo(logp: float, row: Row, s: Mapping[str, float], ratio: float) -> tuple[float, float]:
    weight = clamp(math.exp(logp - row["logprobs"]), s["clip_low_threshold"], s["clip_high_threshold"])
    return -weight * logp * row["advantages"], -weight * row["advantages"]


def dro(logp: float, row: Row, s: Mapping[str, float], ratio: float) -> tuple[float, float]:
    gap = logp - row["logprobs"]
    return -(logp * row["advantages"] - s["beta"] / 2 * gap**2), -(row["advantages"] - s["beta"] * gap)


LOOPS: dict[str, Callable[..., tuple[float, float]]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def rows_of(datum: Datum) -> list[dict[str, float]]:
    names = [name for name in datum.inputs if name != "target_tokens"]
    return [{name: float(datum.inputs[name][i]) for name in names} for i in range(len(datum.token_ids))]


@pytest.mark.parametrize("settings", [{}, {"narrow": True}], ids=["defaults", "narrow"])
@pytest.mark.parametrize("loss_fn", LOOPS)
def test_losses_and_gradients_equal_plain_loops(loss_fn: str, settings: Mapping[str, Any]) -> None:
    narrow = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if settings else {}
    loss, s = loss_named(loss_fn, {key: value for key, value in narrow.items() if key in LOSSES[loss_fn].settings})
    of_data = data(loss_fn)
    batch = micro_batch_of(of_data, loss)
    logprobs_TK = torch.randn(sum(LENGTHS) + len(LENGTHS), 1, dtype=torch.float64).requires_grad_()
    value = loss_of(batch, logprobs_TK, loss, s)
    value.backward()
    assert logprobs_TK.grad is not None
    by_datum = rows_of_data(of_data, logprobs_TK.detach().numpy())
    gradients = rows_of_data(of_data, logprobs_TK.grad.numpy())
    expected: list[float] = []
    for datum, found, gradient in zip(of_data, by_datum, gradients, strict=True):
        rows = rows_of(datum)
        gaps = [
            logp - row["logprobs"]
            for logp, row in zip(found, rows, strict=True)
            if row.get("sequence_ratio_mask", 0.0) > 0
        ]
        ratio = math.exp(sum(gaps) / max(1, len(gaps)))
        for logp, row, slope in zip(found, rows, gradient, strict=True):
            part, derivative = LOOPS[loss_fn](float(logp), row, s, ratio)
            expected.append(row["weights"] * part)
            assert slope == pytest.approx(row["weights"] * derivative, rel=1e-6, abs=1e-9)
    assert float(value.detach()) == pytest.approx(sum(expected), rel=1e-6)
    losses_TK = loss_of_rows(batch, logprobs_TK.detach().float().numpy(), loss, s)
    np.testing.assert_allclose(np.concatenate(rows_of_data(of_data, losses_TK)), expected, rtol=1e-5)
    assert float(logprobs_TK.grad[0]) == 0.0  # the first index of a segment is no target


@pytest.mark.parametrize("num_targets", [None, 1, 3])
def test_cross_entropy_is_the_weighted_sum_over_all_candidates(num_targets: int | None) -> None:
    loss, s = loss_named("cross_entropy", {})
    of_data = data("cross_entropy", num_targets)
    batch = micro_batch_of(of_data, loss)
    logprobs_TK = torch.randn(sum(LENGTHS) + len(LENGTHS), num_targets or 1, dtype=torch.float64).requires_grad_()
    value = loss_of(batch, logprobs_TK, loss, s)
    value.backward()
    assert logprobs_TK.grad is not None
    found = rows_of_data(of_data, logprobs_TK.detach().numpy())
    expected = -sum((it * datum.inputs["weights"]).sum() for it, datum in zip(found, of_data, strict=True))
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    for datum, gradient in zip(of_data, rows_of_data(of_data, logprobs_TK.grad.numpy()), strict=True):
        np.testing.assert_allclose(gradient, -datum.inputs["weights"], rtol=1e-6)
    assert [it.shape for it in found] == [datum.inputs["target_tokens"].shape for datum in of_data]


def test_data_without_weights_count_once_and_thresholds_of_a_datum_replace_the_settings() -> None:
    loss, s = loss_named("cross_entropy", {})
    plain = [Datum((1, 2), {"target_tokens": np.array([2, 3])})]
    logprobs_TK = torch.tensor([[0.0], [-1.0], [-2.0]])
    assert float(loss_of(micro_batch_of(plain, loss), logprobs_TK, loss, s)) == 3.0
    loss, s = loss_named("ppo", {})
    given: dict[str, Any] = {
        "target_tokens": np.array([2]),
        "logprobs": np.zeros(1, np.float32),
        "advantages": np.ones(1, np.float32),
        "clip_high_threshold": np.array([3.0], np.float32),
        "clip_low_threshold": np.array([0.5], np.float32),
    }
    without = {key: value for key, value in given.items() if not key.startswith("clip")}
    logprobs_TK = torch.tensor([[0.0], [math.log(2.0)]])
    for data_of_batch, expected in (([given], -2.0), ([without], -1.2), ([given, without], -3.2)):
        batch = micro_batch_of([Datum((1,), it) for it in data_of_batch], loss)
        several_TK = logprobs_TK.repeat(len(data_of_batch), 1)
        assert float(loss_of(batch, several_TK, loss, s)) == pytest.approx(expected)


def test_an_infinite_loss_of_a_row_without_weight_does_not_count() -> None:
    loss, s = loss_named("importance_sampling", {})
    inputs: dict[str, Any] = {
        "target_tokens": np.array([2, 3]),
        "logprobs": np.array([-1000.0, 0.0], np.float32),
        "advantages": np.ones(2, np.float32),
        "weights": np.array([0.0, 2.0], np.float32),
    }
    logprobs_TK = torch.zeros(3, 1, requires_grad=True)
    value = loss_of(micro_batch_of([Datum((1, 2), inputs)], loss), logprobs_TK, loss, s)
    value.backward()
    assert logprobs_TK.grad is not None
    assert (float(value.detach()), logprobs_TK.grad[:, 0].tolist()) == (-2.0, [0.0, 0.0, -2.0])


def test_a_batch_without_data_has_a_loss_of_zero_that_can_be_differentiated() -> None:
    for name in LOSSES:
        loss, s = loss_named(name, {})
        logprobs_TK = torch.zeros(0, 1, requires_grad=True)
        value = loss_of(micro_batch_of([], loss), logprobs_TK, loss, s)
        assert float(value.detach()) == 0.0
        value.backward()


@pytest.mark.parametrize(
    ("name", "settings", "kind", "message"),
    [
        ("stable_reinforce", {}, UnsupportedError, "has no published formula"),
        ("custom", {}, UnsupportedError, "use forward_backward_custom"),
        ("ppo2", {}, InvalidRequestError, "unknown loss_fn 'ppo2' .did you mean 'ppo'.*known: cross_entropy"),
        ("ppo", {"beta": 1.0}, InvalidRequestError, "has no setting 'beta'; its settings: clip_low_threshold"),
        ("dro", {"beta": math.inf}, InvalidRequestError, "'beta' of loss_fn 'dro' is not finite"),
    ],
)
def test_losses_that_cannot_be_computed_are_refused_by_name(
    name: str, settings: dict[str, float], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        loss_named(name, settings)


@pytest.mark.parametrize(
    ("loss_fn", "changed", "message"),
    [
        ("ppo", {"advantages": None}, "datum 0: loss_fn 'ppo' needs advantages"),
        ("ppo", {"mask": np.ones(2)}, "datum 0: loss_fn 'ppo' does not use mask"),
        ("ppo", {"target_tokens": np.ones((2, 3), int)}, "takes one target for each token"),
        ("ppo", {"clip_low_threshold": np.ones((2, 3))}, r"clip_low_threshold has shape \[2, 3\], but target_tokens"),
        ("cross_entropy", {"weights": np.ones((2, 3))}, r"weights has shape \[2, 3\], but target_tokens \[2\]"),
    ],
)
def test_inputs_that_do_not_fit_the_loss_are_refused(loss_fn: str, changed: dict[str, Any], message: str) -> None:
    loss, _ = loss_named(loss_fn, {})
    inputs: dict[str, Any] = {"target_tokens": np.array([1, 2])} | {name: np.ones(2) for name in loss.inputs}
    inputs = {key: value for key, value in (inputs | changed).items() if value is not None}
    with pytest.raises(InvalidRequestError, match=message):
        check_inputs([Datum((1, 2), inputs)], loss_fn, loss)
