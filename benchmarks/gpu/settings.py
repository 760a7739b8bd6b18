"""The settings of every section, and which sections there are. Loads no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the benchmark. ``module`` has a function ``measure(settings)`` that returns figures for JSON."""

    name: str
    module: str
    what: str
    limit_s: float
    """After this long its process is killed. All of them together stay below ten minutes on a GPU."""


SECTIONS = (
    Section("machine", "machine", "GPUs, driver and versions", 30),
    Section("endpoint", "kits:measure_endpoint", "the endpoint kit on the embedded engine in bfloat16", 130),
    Section("worker", "kits:measure_worker", "the worker kit, one rank for each GPU", 80),
    Section("head", "head", "logprobs from hidden states, against other frameworks", 60),
    Section("attention", "attention", "attention over segments, against flash kernels", 30),
    Section("decode", "decode", "tokens per second, against transformers' generate", 110),
    Section("publish", "publish", "one publish by each transport, against the machine's limit", 90),
    Section("quickstart", "quickstart", "a few steps of the quickstart with 0.5 B parameters", 60),
)

CPU_LIMIT_SCALE = 6
"""On a CPU limits are this many times longer: it may have other work."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a section measures."""

    device: str
    """``cuda`` or ``cpu``."""
    quick: bool
    """Tiny sizes and one round, to see that everything runs."""
    place: Path
    """A directory for models and files."""
    deadline: float
    """By `time.monotonic`; measurements that would not end before it are left out."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()
