"""Layers that torch's compiler makes one graph of where it can, and what it needs for that. Knows nothing of models.

Attention over packed segments stays outside: its shapes are a list that differs from batch to batch, and a graph would
be made anew for each. What is compiled lies on both sides of it, so it is the parts of a layer that are compiled, not
the layer: torch computes a recomputed layer that has a break in its graph without any graph at all, and says nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from inflight.errors import ConfigError


def check_compiler(device: torch.device) -> None:
    """Raise `ConfigError` that names what is missing, if layers cannot be compiled for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu":
        if not has_triton():
            raise ConfigError(
                f"compile = true needs triton for {device}: pip install triton, or leave compile out; it takes GPUs of "
                "compute capability 7.0 and later"
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"compile = true needs a C++ compiler on a CPU ({error}): install g++, or name one in the environment "
            "variable CXX"
        ) from error
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ConfigError(f"compile = true needs Python's headers on a CPU: {header} is missing; install python3-dev")


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have the parts of each layer compiled when they are first called; names of parameters stay as they are.

    Graphs are made for any number of tokens, and once more for a single one. Raises nothing: see `check_compiler`.
    """
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True)
