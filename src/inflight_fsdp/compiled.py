"""Compiling the parts of layers with torch's compiler, and checking what it needs. Knows nothing of models.

Attention over packed segments stays out of the graphs: its shapes differ from batch to batch, and each would need a new
graph. The parts of a layer are therefore compiled one by one, not the layer: torch silently runs a recomputed layer
without any graph if its graph has a break.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from inflight.errors import ConfigError


def check_compiler(device: torch.device) -> None:
    """Raise `ConfigError` that names what is missing if layers cannot be compiled for ``device``."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu":
        if not has_triton():
            raise ConfigError(
                f"compile = true needs triton for {device}: pip install triton, or leave compile out; triton supports "
                "GPUs of compute capability 7.0 and later"
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
    """Compile the parts of each layer when they are first called; names of parameters stay as they are.

    A graph is for any number of tokens, with another for a single token. Call `check_compiler` before.
    """
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True)
