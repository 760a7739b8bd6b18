"""An engine for ``inflight serve`` that takes its time without a processor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from inflight.engines.embedded.loading import load_endpoint

STEP_S = 0.01


def unhurried(model: Path, **options: Any) -> Any:
    """Return the embedded endpoint, each step of which sleeps first: 100 tokens of a completion take at least 1 s."""
    torch.set_num_threads(options.pop("threads", 1))
    endpoint: Any = load_endpoint(model, **options)
    endpoint._engine.weights.model.base_model.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))
    return endpoint
