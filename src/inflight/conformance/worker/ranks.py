"""How the ranks of a check exchange small values, beside the worker's own communication.

A rank that fails reports it, and the others stop waiting for it.
"""

from __future__ import annotations

import json
import time
from typing import Any

from inflight.conformance.checks import skip

_POLL_S = 0.01


class Ranks:
    """One rank's part of a conversation between ``num_ranks``, with a new chapter for every check.

    ``store`` is a ``torch.distributed.Store``.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._chapter = 0
        self._num_exchanges = 0

    def turn_the_page(self) -> None:
        self._chapter += 1
        self._num_exchanges = 0

    def exchange(self, value: Any, timeout_s: float = 300.0) -> list[Any]:
        """Return every rank's value, by rank, once all have come. Values are JSON.

        Skips the check if another rank has abandoned, and raises ``TimeoutError`` after ``timeout_s``.
        """
        self._num_exchanges += 1
        subject = f"{self._num_exchanges}"
        self.post(subject, value)
        deadline = time.monotonic() + timeout_s
        for rank in self._all:
            while not self._has_posted(subject, rank):
                if (reason := self.given_up()) is not None:
                    skip(f"another rank ended first: {reason}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not arrive")
                time.sleep(_POLL_S)
        return [self._read(subject, rank) for rank in self._all]

    def meet(self) -> None:
        """Return once every rank has come here."""
        self.exchange(None)

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank's part of the check has ended early."""
        self.post("end", reason)

    def given_up(self) -> str | None:
        """Return which other rank has given the check up, and why; None if none has."""
        for rank in self._all:
            if rank != self.rank and self._has_posted("end", rank):
                return f"rank {rank}: {self._read('end', rank)}"
        return None

    def post(self, subject: str, value: Any) -> None:
        """Leave a value that the others can read with `read_post`, even after a failure."""
        self._store.set(self._key(subject, self.rank), json.dumps(value))

    def read_post(self, subject: str, rank: int, timeout_s: float) -> Any:
        """Return what a rank has posted in this chapter; None if nothing came in time."""
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
        return f"{self._chapter}/{subject}/{rank}"
