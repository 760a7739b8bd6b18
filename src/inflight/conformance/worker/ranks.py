"""Exchanges small values between the ranks of a check, independently of the worker's own communication.

A rank that fails reports its failure, and the others stop waiting for it.
"""

from __future__ import annotations

import json
import time
from typing import Any

from inflight.conformance.checks import skip

_POLL_S = 0.01


class Ranks:
    """One rank's end of the exchange between ``num_ranks`` ranks, with separate keys for every check.

    ``store`` is a ``torch.distributed.Store``.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._num_checks = 0
        self._num_exchanges = 0

    def begin_check(self) -> None:
        self._num_checks += 1
        self._num_exchanges = 0

    def exchange(self, value: Any, timeout_s: float = 300.0) -> list[Any]:
        """Return every rank's value, by rank, once all have arrived. Values must be serializable as JSON.

        Skips the check if another rank has abandoned it, and raises ``TimeoutError`` after ``timeout_s``.
        """
        self._num_exchanges += 1
        subject = f"{self._num_exchanges}"
        self.post(subject, value)
        deadline = time.monotonic() + timeout_s
        for rank in self._all:
            while not self._has_posted(subject, rank):
                if (reason := self.abandoned_by_other()) is not None:
                    skip(f"another rank ended first: {reason}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not arrive")
                time.sleep(_POLL_S)
        return [self._read(subject, rank) for rank in self._all]

    def wait_for_all(self) -> None:
        """Return once every rank has called this method."""
        self.exchange(None)

    def abandon(self, reason: str) -> None:
        """Notify the other ranks that this rank's part of the check has ended early."""
        self.post("end", reason)

    def abandoned_by_other(self) -> str | None:
        """Return which other rank has abandoned the check, and why; None if no rank has."""
        for rank in self._all:
            if rank != self.rank and self._has_posted("end", rank):
                return f"rank {rank}: {self._read('end', rank)}"
        return None

    def post(self, subject: str, value: Any) -> None:
        """Post a value that the other ranks can read with `read_post`, even after a failure."""
        self._store.set(self._key(subject, self.rank), json.dumps(value))

    def read_post(self, subject: str, rank: int, timeout_s: float) -> Any:
        """Return what a rank has posted during this check, or None if nothing arrives in time."""
        deadline = time.monotonic() + timeout_s
        while not self._has_posted(subject, rank):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return self._read(subject, rank)

    @property
    def _all(self) -> range:
        return range(self.num_ranks)

    def _has_posted(self, subject: str, rank: int) -> bool:
        return bool(self._store.check([self._key(subject, rank)]))

    def _read(self, subject: str, rank: int) -> Any:
        return json.loads(self._store.get(self._key(subject, rank)))

    def _key(self, subject: str, rank: int) -> str:
        return f"{self._num_checks}/{subject}/{rank}"
