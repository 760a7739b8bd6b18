"""A LoRA in a transformers model: which layers it changes, its two matrices for each layer, and how PEFT stores it.

``<layer>.lora_A.weight`` [r, in] and ``<layer>.lora_B.weight`` [out, r] are parameters next to ``<layer>.weight`` [out,
in], which keeps its name and is frozen; PEFT's files hold them under ``base_model.model.``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from inflight.errors import UnsupportedError
from inflight.model.images import takes_images
from inflight.model.lora_settings import LoraSettings
from inflight.weights.encode.lora_tensors import PARTS, PREFIX
from inflight_fsdp.layout import Layout, Sharding


def is_lora(parameter: str) -> bool:
    """Return whether a parameter of this name belongs to a LoRA."""
    return parameter.endswith(PARTS)


def parts_of(layer: str) -> tuple[str, str]:
    """Return the names of a layer's LoRA parameters, A and B."""
    return f"{layer}{PARTS[0]}", f"{layer}{PARTS[1]}"


def lora_layout(name: str, parameter: torch.Tensor) -> Layout:
    """Return how a LoRA parameter is stored and published: under PEFT's name for it."""
    return Layout({f"{PREFIX}{name}": tuple(parameter.shape)})


def add_lora(causal_lm: Any, layers: Iterable[nn.Module], settings: LoraSettings, dtype: torch.dtype) -> None:
    """Add an uninitialized LoRA to the target layers, and freeze all other parameters.

    ``layers`` are the decoder layers; only the linear layers in them can be targets. Raises `ConfigError` for targets
    that match no layer, and `UnsupportedError` for models that accept images.
    """
    if takes_images(causal_lm.config):
        raise UnsupportedError(
            "lora is not yet supported for models that take images, because their checkpoints name weights "
            "differently than PEFT does; omit lora"
        )
    inside = {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    linear = {name: module for name, module in causal_lm.named_modules() if id(module) in inside}
    causal_lm.requires_grad_(False)
    for name in settings.chosen(list(linear)):
        layer: Any = linear[name]
        layer.lora_A = nn.Linear(layer.in_features, settings.rank, bias=False, device="meta", dtype=dtype)
        layer.lora_B = nn.Linear(settings.rank, layer.out_features, bias=False, device="meta", dtype=dtype)
        layer.register_forward_hook(partial(_add, scale=settings.spec.scale, dropout=settings.dropout))


def _add(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, *, scale: float, dropout: float) -> Any:
    x = nn.functional.dropout(inputs[0], dropout, training=torch.is_grad_enabled()) if dropout else inputs[0]
    return output + scale * layer.lora_B(layer.lora_A(x))


@torch.no_grad()
def initialise(local: Mapping[str, torch.Tensor], shardings: Mapping[str, Sharding], settings: LoraSettings) -> None:
    """Fill this rank's parts of a LoRA as PEFT does: A by `kaiming_uniform_`, and B with zeros.

    ``local`` holds the parts by parameter name. The values depend on the seed, but not on the number of ranks.
    """
    random = torch.Generator().manual_seed(settings.seed)
    for name, part in local.items():
        if not name.endswith(PARTS[0]):
            part.zero_()
            continue
        whole = torch.empty(shardings[name].shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=random)
        if (box := shardings[name].boxes[dist.get_rank()]) is not None:
            part.copy_(whole[box])


def peft_config(settings: LoraSettings, layers: Sequence[str], base: Path) -> str:
    """Return the text of PEFT's adapter_config.json for a LoRA on these layers of the model in ``base``."""
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    alpha = int(settings.alpha) if settings.alpha.is_integer() else settings.alpha
    return (
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(base),
                "r": settings.rank,
                "lora_alpha": alpha,
                "lora_dropout": settings.dropout,
                "target_modules": ends if settings.targets == "all-linear" else sorted(settings.targets),
                "bias": "none",
                "fan_in_fan_out": False,
                "use_rslora": False,
                "inference_mode": True,
            },
            indent=2,
        )
        + "\n"
    )
