"""Plain LoRAs for tests: layers as PEFT has them, a LoRA for some layers of a model, and its merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from inflight.weights.encode.lora_tensors import lora_names
from inflight.wire import LoraSpec


class LoraLinear(nn.Module):
    """A linear layer and its LoRA, with the attributes that a layer of PEFT has."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.lora_B["default"](self.lora_A["default"](x))
        result: torch.Tensor = self.base_layer(x) + self.scaling["default"] * low
        return result


def adapted(model: nn.Module, words: Sequence[str], spec: LoraSpec, seed: int) -> nn.Module:
    """Replace the linear layers whose names end with one of the words, and fill their LoRAs; returns the model."""
    random = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(tuple(words)):
            wrapped = LoraLinear(layer, spec.rank, spec.scale)
            for part in (wrapped.lora_A, wrapped.lora_B):
                weight = part["default"].weight
                weight.data = 0.5 * torch.randn(weight.shape, generator=random)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, wrapped)
    return model


def lora_of(
    tensors: Mapping[str, torch.Tensor], words: Sequence[str], rank: int, seed: int, size: float = 0.5
) -> dict[str, torch.Tensor]:
    """A random LoRA, by PEFT's names, for the modules of a model whose names end with one of the words."""
    random = torch.Generator().manual_seed(seed)
    lora = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and module.endswith(tuple(words)):
            a, b = lora_names(module)
            lora[a] = size * torch.randn(rank, tensor.shape[1], generator=random)
            lora[b] = size * torch.randn(tensor.shape[0], rank, generator=random)
    assert lora
    return lora


def merged_with(
    tensors: Mapping[str, torch.Tensor], lora: Mapping[str, torch.Tensor], spec: LoraSpec
) -> dict[str, torch.Tensor]:
    """The weights with the LoRA added, in float64 by definition of the product: the reference."""
    scale = spec.alpha / (math.sqrt(spec.rank) if spec.rslora else spec.rank)
    whole = dict(tensors)
    for name, tensor in tensors.items():
        a, b = lora_names(name.removesuffix(".weight"))
        if a in lora:
            low = torch.einsum("or,ri->oi", lora[b].double(), lora[a].double())
            whole[name] = (tensor.double() + scale * low).to(tensor.dtype)
    return whole
