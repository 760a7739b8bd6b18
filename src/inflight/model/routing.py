"""The routers of mixture-of-experts models in transformers: recording their choices of experts, and replaying them.

A router is recognized by its behaviour: it is a module that computes exactly one top-k and returns its indices last.
Replaying replaces the result of that top-k, so the model itself still computes the experts' weights, their
normalization and their gradients.

Shape suffixes: T tokens, L decoder layers, K experts of a token in a layer, E experts of a layer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from inflight.types import FREE_EXPERT

Experts = npt.NDArray[Any]
"""uint8 or uint16 [T, L, K]; the maximum of the dtype means no expert."""
REPLAYED = "routed_experts_TLK"
"""Keyword that a base model's forward pass accepts after `replay_routing`: int64 [T, L, K], `FREE_EXPERT` where the
router chooses the experts of a token."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, all of the same shape."""

    of_layer: tuple[nn.Module | None, ...]
    """The router of each decoder layer; None for a layer without experts."""
    num_experts: int
    """E."""
    num_chosen: int
    """K."""

    @property
    def shape(self) -> tuple[int, int]:
        """[L, K]."""
        return len(self.of_layer), self.num_chosen


def decoder_layers(causal_lm: Any) -> list[nn.Module]:
    """Return the decoder layers of a transformers model, in order."""
    names = causal_lm._no_split_modules or ()
    return [module for module in causal_lm.get_decoder().modules() if type(module).__name__ in names]


def routers_of(causal_lm: Any) -> Routers | None:
    """Return the routers of a model; None if it has no experts, or if its routing is not supported."""
    found = [_router_in(layer) for layer in decoder_layers(causal_lm)]
    routers = [router for router in found if isinstance(router, nn.Module)]
    if not routers or "unknown" in found:
        return None
    shapes = {(int(router.num_experts), int(router.top_k)) for router in routers}  # type: ignore[arg-type]
    if len(shapes) != 1 or not all(map(_is_known, routers)):
        return None
    ((num_experts, num_chosen),) = shapes
    return Routers(tuple(it if isinstance(it, nn.Module) else None for it in found), num_experts, num_chosen)


def _router_in(layer: nn.Module) -> nn.Module | str | None:
    """Return the router of a layer, None if it has no experts, or ``"unknown"`` if the router cannot be determined."""
    routers = [it for it in layer.modules() if hasattr(it, "top_k") and hasattr(it, "num_experts") and _has_weight(it)]
    if len(routers) == 1:
        return routers[0]
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in layer.named_modules())
    return "unknown" if has_experts or routers else None


def _has_weight(module: nn.Module) -> bool:
    return isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() == 2


def _is_known(router: nn.Module) -> bool:
    """Return whether a router computes one top-k and returns its indices last, as tested on the meta device."""
    tried: Any = copy.deepcopy(router).to("meta")
    mode = _ReplacedTopK(None)
    hidden = torch.empty(1, tried.weight.shape[1], device="meta", dtype=tried.weight.dtype)
    try:
        with torch.no_grad(), mode:
            output = tried(hidden)
    except Exception:  # a model's code may raise anything on such a token
        return False
    indices = output[-1] if isinstance(output, tuple) else None
    return mode.num_replaced == 1 and indices is not None and indices.shape == (1, tried.top_k)


class _ReplacedTopK(TorchFunctionMode):
    """Counts the calls of top-k in its context, and replaces their results if there are experts to replay."""

    def __init__(self, replayed_TK: torch.Tensor | None) -> None:
        super().__init__()
        self._replayed_TK = replayed_TK
        self.num_replaced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        self.num_replaced += 1
        if self._replayed_TK is None:
            return result
        scores_TE, replayed_TK = args[0], self._replayed_TK
        is_known_T1 = (replayed_TK != FREE_EXPERT).all(dim=-1, keepdim=True)
        indices_TK = torch.where(is_known_T1, replayed_TK, result.indices)
        return torch.return_types.topk((scores_TE.gather(-1, indices_TK), indices_TK))


# ---------------------------------------------------------------------------------------------------------------
# Recording


class RoutingRecorder:
    """Records which experts a model's routers choose, but only within `recording`; it has no cost otherwise."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._chosen: dict[int, torch.Tensor] = {}
        self.dtype: type[np.uint8] | type[np.uint16] = np.uint8 if routers.num_experts <= 255 else np.uint16
        """The dtype of the expert numbers; its maximum means no expert."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the model's next forward pass. Afterwards, `take` returns the chosen experts once."""
        self._chosen = {}
        handles = [
            router.register_forward_hook(functools.partial(self._note, layer))
            for layer, router in enumerate(self._routers.of_layer)
            if router is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, layer: int, _: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._chosen[layer] = output[-1]

    def take(self) -> Experts:
        """Return the experts [T, L, K] of the recorded pass; layers without experts have the dtype's maximum."""
        stacked_LTK = torch.stack(list(self._chosen.values())).cpu().numpy()
        num_tokens = stacked_LTK.shape[1]
        experts_TLK = np.full((num_tokens, *self._routers.shape), np.iinfo(self.dtype).max, self.dtype)
        experts_TLK[:, list(self._chosen)] = stacked_LTK.swapaxes(0, 1)
        self._chosen = {}
        return experts_TLK


# ---------------------------------------------------------------------------------------------------------------
# Replaying


def replay_routing(causal_lm: Any, routers: Routers) -> None:
    """Make a model's forward pass accept `REPLAYED`: experts that are used instead of the routers' own choices.

    The argument is passed to each layer, so that a layer that is recomputed in the backward pass receives the same
    experts.
    """
    for index, (layer, router) in enumerate(zip(decoder_layers(causal_lm), routers.of_layer, strict=True)):
        if router is not None:
            replaying = _Replaying(router)
            router.forward = replaying.forward
            layer.register_forward_pre_hook(functools.partial(_give, replaying, index), with_kwargs=True)


class _Replaying:
    """The forward pass of one router, which replays the experts that its layer received."""

    def __init__(self, router: Any) -> None:
        self._forward: Callable[..., Any] = router.forward
        self.replayed_TK: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.replayed_TK is None:
            return self._forward(*args, **kwargs)
        with _ReplacedTopK(self.replayed_TK):
            return self._forward(*args, **kwargs)


def _give(
    replaying: _Replaying, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    experts_TLK = kwargs.get(REPLAYED)
    replaying.replayed_TK = None if experts_TLK is None else experts_TLK[:, index]
    return args, {name: value for name, value in kwargs.items() if name != REPLAYED}
