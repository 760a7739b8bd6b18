"""Runs the embedded engine's server in its own process, and makes a model of a given size for it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.engines.embedded.tiny import EOS, VOCAB_SIZE, save_tiny_model
from inflight.errors import ConfigError
from inflight.http.client import HttpEndpoint

_START_S = 180.0
_STOP_S = 20.0
_HIDDEN, _INTERMEDIATE = 1024, 2816
_LAYER_ELEMENTS = 4 * _HIDDEN**2 + 3 * _HIDDEN * _INTERMEDIATE + 2 * _HIDDEN


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A running server and how to reach it."""

    url: str
    token: str
    pid: int

    def connect(self) -> HttpEndpoint:
        """Return a new client of the server."""
        return HttpEndpoint(self.url, token=self.token)


def make_model(path: Path, size_bytes: int, dtype: str) -> Any:
    """Write a random Llama model of about ``size_bytes`` to ``path`` and return it; small models have narrower layers.

    Raises `ConfigError` for sizes below 4 MB.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    if size_bytes < 4_000_000:
        raise ConfigError(f"a model of {size_bytes} bytes is too small to measure; use at least 4MB")
    num_elements = size_bytes // getattr(torch, dtype).itemsize
    narrower = 1
    while _LAYER_ELEMENTS // narrower**2 > num_elements // 4:
        narrower *= 2
    hidden = _HIDDEN // narrower
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=_INTERMEDIATE // narrower,
        num_hidden_layers=max(1, round(num_elements / (_LAYER_ELEMENTS / narrower**2))),
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    save_tiny_model(model, path)
    return model


@contextlib.contextmanager
def serving(model: Path, directory: Path, dtype: str, num_threads: int, *arguments: str) -> Iterator[BenchServer]:
    """Run ``inflight serve`` with additional arguments while the context is open, and yield the server.

    Raises a `ConfigError` that quotes the end of the server's log if the server does not start.
    """
    token, ready, log = secrets.token_urlsafe(16), directory / "ready.json", directory / "server.log"
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--dtype", dtype]
    command += ["--ready-file", str(ready), "--exit-with-stdin", "--threads", str(num_threads), *arguments]
    environment = {**os.environ, "INFLIGHT_TOKEN": token, "OMP_NUM_THREADS": str(num_threads)}
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            deadline = time.monotonic() + _START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    words = " ".join(log.read_text(errors="replace").split()[-60:])
                    raise ConfigError(f"the server did not start: {words}")
                time.sleep(0.05)
            yield BenchServer(json.loads(ready.read_text())["url"], token, process.pid)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
