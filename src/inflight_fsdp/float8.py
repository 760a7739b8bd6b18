"""Linear layers that multiply in float8, using torchao."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from inflight.errors import ConfigError

_MULTIPLE = 16
"""The GPU kernels require matrices whose sides are multiples of this."""
_CAPABILITY = (8, 9)


def multiply_in_float8(module: nn.Module, device: torch.device) -> None:
    """Make every linear layer within a module multiply in float8; the parameters stay unchanged.

    The forward pass and the gradient of the inputs are computed in float8, with a scale for each token; the gradient of
    the weight is not. The result for a token therefore does not depend on the tokens packed with it, and products over
    T tokens, where T need not be a multiple of 16, are not in float8. Raises `ConfigError` if torchao is missing, the
    device has no float8 kernels, or a side of a weight is not a multiple of 16.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(f"float8 needs torchao ({error}): pip install torchao") from error
    on_cpu = device.type == "cpu"
    if not on_cpu and torch.cuda.get_device_capability(device) < _CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(
            f"float8 needs a GPU of compute capability 8.9 or later, but {device} has {found}; omit float8"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE):
            shape = tuple(layer.weight.shape)
            raise ConfigError(f"float8 needs weights whose sides are multiples of {_MULTIPLE}, but {name} is {shape}")
    recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    convert_to_float8_training(module, config=replace(recipe, emulate=on_cpu))
