"""Pauses of the embedded engine: how in-flight policies affect running requests, and how long pauses last."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight.engines.embedded.scheduler import SequenceScheduler
from inflight.wire import InFlightPolicy


class SamplingPauses:
    """Pauses and resumes an engine's sampling. Its methods may only be called in the engine's thread."""

    def __init__(self, scheduler: SequenceScheduler) -> None:
        self._scheduler = scheduler
        self._on_drained: Callable[[], None] | None = None
        self._paused_s = 0.0
        self.paused_since: float | None = None
        self.resumed_at: float | None = None
        """When sampling last resumed; None once a token has been sampled since then."""
        self.first_token_s: float | None = None
        """Seconds from the last resume to the next sampled token."""

    @property
    def paused_s(self) -> float:
        """Total duration of all pauses in seconds. Any thread may read it."""
        paused_since = self.paused_since
        return self._paused_s + (time.monotonic() - paused_since if paused_since is not None else 0.0)

    def pause(self, policy: InFlightPolicy, on_paused: Callable[[], None]) -> None:
        """Stop sampling according to a policy, and call ``on_paused`` once no more tokens will be sampled.

        With ``drain``, this is after the last running sequence has finished.
        """
        self._scheduler.starts_new = False
        if policy is InFlightPolicy.ABORT:
            self._scheduler.cancel_started()

        def stop_sampling() -> None:
            if self.paused_since is None:
                self.paused_since = time.monotonic()
            on_paused()

        if policy is InFlightPolicy.DRAIN and self._scheduler.has_started():
            self._on_drained = stop_sampling
        else:
            stop_sampling()

    def complete_drain(self) -> None:
        """If a pause is waiting for running sequences and all of them have finished, begin it."""
        if self._on_drained is not None and not self._scheduler.has_started():
            on_drained, self._on_drained = self._on_drained, None
            on_drained()

    def resume(self) -> float:
        """Resume sampling, and return how many seconds it was paused. Idempotent."""
        self._on_drained = None
        self._scheduler.starts_new = True
        if self.paused_since is None:
            return 0.0
        self.resumed_at = time.monotonic()
        paused_s = self.resumed_at - self.paused_since
        self._paused_s += paused_s
        self.paused_since = None
        self.first_token_s = None
        return paused_s

    def record_first_token(self) -> None:
        """Set ``first_token_s`` if this is the first token since sampling resumed."""
        if self.resumed_at is not None:
            self.first_token_s = time.monotonic() - self.resumed_at
            self.resumed_at = None
