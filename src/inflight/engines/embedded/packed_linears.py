"""Linear layers that also keep their weights in the layout in which oneDNN multiplies bfloat16 matrices on CPUs.

Without this, each product would first reorder a weight from the ordinary layout. With few rows, as in decoding, that
takes as long as the product itself. The results are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class PackedLinear(torch.nn.Linear):
    """A linear layer that multiplies by ``packed_weight``.

    The layer's owner keeps ``packed_weight`` equal to ``weight``.
    """

    packed_weight: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed_weight, self.bias, "none", [], "")
        return product


class PackedLinears:
    """A model's linear layers, by the names of their weights in ``parameters``. The constructor packs the weights.

    Several layers may share a weight. No layer is packed unless the weights are bfloat16 on a CPU that can multiply
    bfloat16.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layers: dict[str, list[Any]] = {}
        for module in model.modules():
            if type(module) is torch.nn.Linear and _is_packable(module.weight):
                module.__class__ = PackedLinear
                self._layers.setdefault(names[id(module.weight)], []).append(module)
        self.load(self.pack((name, parameters[name].detach()) for name in self._layers))

    def pack(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return, in packed form, the tensors that are weights of these layers. May run in any thread."""
        return {
            name: torch.ops.mkldnn._reorder_linear_weight(tensor) for name, tensor in tensors if name in self._layers
        }

    def load(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Use these packed weights from now on."""
        for name, tensor in packed.items():
            for layer in self._layers[name]:
                layer.packed_weight = tensor


def _is_packable(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
