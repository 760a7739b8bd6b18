"""Checks what torch's compiler requires of a machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from inflight.errors import ConfigError


def check_compiler(device: torch.device, option: str) -> None:
    """Raise a `ConfigError` that names what is missing if torch cannot compile for ``device``.

    ``option`` names the setting that requires the compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu":
        if not has_triton():
            raise ConfigError(
                f"{option} needs triton for {device}: pip install triton, or omit the option; triton supports GPUs "
                "of compute capability 7.0 and later"
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"{option} needs a C++ compiler on a CPU ({error}): install g++, or name one in the environment "
            "variable CXX"
        ) from error
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ConfigError(f"{option} needs Python's headers on a CPU: {header} is missing; install python3-dev")
