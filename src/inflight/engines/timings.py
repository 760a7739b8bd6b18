"""What the last update cost an engine, with its first token once that was sampled. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from inflight.wire import UpdateTimings


class LastUpdate:
    """The ``timings`` of the last update that was applied; None if there is none."""

    def __init__(self) -> None:
        self.timings: UpdateTimings | None = None

    async def note_first_token(self, timings: UpdateTimings, probe: Awaitable[object], since: float) -> None:
        """Add to these timings when ``probe``, a request for one token, is answered; ``since`` is of `time.monotonic`.

        Nothing is added if they are no longer those of the last update by then.
        """
        await probe
        if self.timings is timings:
            self.timings = timings.model_copy(update={"first_token_s": max(0.0, time.monotonic() - since)})
