"""A faulty endpoint in its own process: ``python -m`` with mutant, model directory, port and token file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from inflight.http.listening import bind
from inflight.http.serving import serve
from inflight.http.tokens import read_token
from tests.conformance.mutants import make


def main(mutant: str, model: str, port: str, token_file: str) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(1)
    endpoint: Any = make(Path(model), mutant)
    token = read_token(Path(token_file))
    assert token is not None
    asyncio.run(serve(endpoint, bind("127.0.0.1", int(port)), token=token))


if __name__ == "__main__":
    main(*sys.argv[1:])
