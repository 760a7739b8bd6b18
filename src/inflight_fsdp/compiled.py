"""Compiles the parts of layers with torch's compiler.

Attention over packed segments stays out of the graphs: its shapes differ from batch to batch, and each shape would need
a new graph. The parts of a layer are therefore compiled one by one, rather than the whole layer: torch silently runs a
recomputed layer without any graph if its graph has a break.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the parts of each layer when they are first called; the parameters' names stay unchanged.

    One graph serves any number of tokens above one, and a second graph serves a single token. Call `check_compiler`
    first.
    """
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True)
