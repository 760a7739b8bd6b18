"""The losses of Tinker's API, computed for each row and summed over all rows of all data, not averaged.

``l`` are the trainer's logprobs of the targets, ``q`` are the sampler's, and ``r = exp(l - q)``. Sources: the loss
functions of Tinker's documentation, PPO (Schulman et al. 2017), CISPO (MiniMax 2025), DRO (Richemond et al. 2024) and
GSPO (Zheng et al. 2025). The clipping thresholds are the bounds of the ratio itself.

Shape suffixes: T rows, K candidates of a row, S data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from inflight.base.unknown_names import unknown_name
from inflight.dialects.tinker.data import TARGETS, THRESHOLDS
from inflight.errors import InvalidRequestError, UnsupportedError

Inputs = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]
WEIGHTS = "weights"
"""The input by which each row's loss is multiplied. Every loss accepts it; if a datum lacks it, the factor is 1."""


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss, with the inputs that it requires, its settings with their defaults, and its formula."""

    inputs: tuple[str, ...]
    """The required inputs in addition to the targets. Every loss accepts `WEIGHTS` too."""
    settings: Mapping[str, float]
    rows: Callable[[torch.Tensor, Inputs, Settings, torch.Tensor], torch.Tensor]
    """Computes the loss of each row before it is weighted, from logprobs [T] (cross entropy: [T, K]), inputs, settings,
    and each row's datum, int64 [T].
    """
    takes_candidates: bool = False
    """Whether targets may have the shape [N, K]."""


def _cross_entropy(l_TK: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    return -l_TK


def _importance_sampling(l_T: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    return -(_ratio(l_T, inputs) * inputs["advantages"])


def _ppo(l_T: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    return _clipped(_ratio(l_T, inputs), inputs, settings)


def _clipped(r_T: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    low, high = _bounds(inputs, settings)
    advantages_T = inputs["advantages"]
    return -torch.minimum(r_T * advantages_T, torch.clamp(r_T, low, high) * advantages_T)


def _cispo(l_T: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    low, high = _bounds(inputs, settings)
    weight_T = torch.clamp(_ratio(l_T, inputs), low, high).detach()
    return -(weight_T * l_T * inputs["advantages"])


def _dro(l_T: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    deviation_T = l_T - inputs["logprobs"]
    return -(l_T * inputs["advantages"] - 0.5 * settings["beta"] * deviation_T**2)


def _gspo(l_T: torch.Tensor, inputs: Inputs, settings: Settings, datum_T: torch.Tensor) -> torch.Tensor:
    """GSPO-token: the ratio of a row is the geometric mean over its sequence, with the row's own gradient."""
    mask_T = inputs["sequence_ratio_mask"]
    num_data = int(datum_T.max()) + 1 if len(datum_T) else 0
    sums_S = l_T.new_zeros(num_data).index_add(0, datum_T, mask_T * (l_T.detach() - inputs["logprobs"]))
    counts_S = l_T.new_zeros(num_data).index_add(0, datum_T, mask_T)
    mean_T = (sums_S / counts_S.clamp(min=1.0))[datum_T]
    return _clipped(torch.exp(mean_T + l_T - l_T.detach()), inputs, settings)


def _ratio(l_T: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(l_T - inputs["logprobs"])


def _bounds(inputs: Inputs, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of the ratio: those of each row's datum or, if it has none, those of the settings."""
    like_T = inputs["advantages"]
    low, high = (
        torch.where(given_T.isnan(), settings[name], given_T)
        for name, given_T in ((it, inputs.get(it, torch.full_like(like_T, math.nan))) for it in THRESHOLDS)
    )
    return low, high


_ADVANTAGES = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss((), {}, _cross_entropy, takes_candidates=True),
    "importance_sampling": TinkerLoss(_ADVANTAGES, {}, _importance_sampling),
    "ppo": TinkerLoss(_ADVANTAGES, _CLIP, _ppo),
    "cispo": TinkerLoss(_ADVANTAGES, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "dro": TinkerLoss(_ADVANTAGES, {"beta": 0.05}, _dro),
    "gspo": TinkerLoss((*_ADVANTAGES, "sequence_ratio_mask"), _CLIP, _gspo),
}
OPTIONAL_INPUTS = (TARGETS, WEIGHTS, *THRESHOLDS)


def loss_named(name: str, settings: Mapping[str, float]) -> tuple[TinkerLoss, dict[str, float]]:
    """Return a loss and its settings, with defaults.

    Raises `UnsupportedError` for an unsupported loss, and `InvalidRequestError` for an unknown loss or setting.
    """
    if name == "stable_reinforce":
        raise UnsupportedError(
            "loss_fn 'stable_reinforce' has no published formula, and uses data that only the service itself records: "
            "use importance_sampling, ppo, cispo, dro or gspo"
        )
    if name == "custom":
        raise UnsupportedError("loss_fn 'custom' uploads a graph; use forward_backward_custom, which does not need one")
    if name not in LOSSES:
        raise InvalidRequestError(unknown_name("loss_fn", name, LOSSES))
    loss = LOSSES[name]
    if unknown := sorted(set(settings) - set(loss.settings)):
        known = ", ".join(loss.settings) or "none"
        raise InvalidRequestError(f"loss_fn {name!r} has no setting {unknown[0]!r}; its settings: {known}")
    if wrong := [key for key, value in settings.items() if not math.isfinite(value)]:
        raise InvalidRequestError(f"the setting {wrong[0]!r} of loss_fn {name!r} is not finite")
    return loss, {**loss.settings, **settings}
