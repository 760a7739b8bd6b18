"""Endpoints that die in the middle of a run of the kit: the embedded one, and a library that it calls.

As a target: ``tests.conformance.dying:start`` with the options ``after``, the number of requests until it dies, and
``grave``, a file. While that file exists, no other endpoint can be made.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint


class DyingEndpoint:
    """Forwards everything to an embedded endpoint, until it dies."""

    def __init__(self, endpoint: EmbeddedEndpoint, after: int, grave: Path) -> None:
        self._endpoint, self._left, self._grave = endpoint, after, grave

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def generate(self, request: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            self._grave.touch()
            thread = threading.Thread(target=lambda: json.loads("of the thread"), name="engine")
            thread.start()
            thread.join()
            json.loads("the engine's thread has ended")
        return await self._endpoint.generate(request)


def start(model: Path, *, after: int, grave: str, comes_back: bool = False) -> DyingEndpoint:
    if Path(grave).exists():
        if not comes_back:
            json.loads("there is no engine to connect to")
        after = 1_000_000
    return DyingEndpoint(load_endpoint(model), after, Path(grave))
