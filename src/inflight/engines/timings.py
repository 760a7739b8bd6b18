"""The timings of an engine's last update, and the time to the first token after it, once that token is sampled."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from inflight.wire import UpdateTimings


class LastUpdate:
    """The ``timings`` of the last applied update; None before the first update."""

    def __init__(self) -> None:
        self.timings: UpdateTimings | None = None

    async def note_first_token(self, timings: UpdateTimings, probe: Awaitable[object], since: float) -> None:
        """When ``probe``, a request for one token, is answered, add the time to the first token to ``timings``.

        ``since`` is a value of `time.monotonic`. Adds nothing if another update has been applied in the meantime.
        """
        await probe
        if self.timings is timings:
            self.timings = timings.model_copy(update={"first_token_s": max(0.0, time.monotonic() - since)})
