"""How the ranks of a check tell each other small things, beside the worker's own communication.

A rank that has failed says so, and the others stop waiting for it. Knows nothing of workers, devices and collectives.
"""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from inflight.conformance.checks import skip

_POLL_S = 0.01


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value under a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""


class Ranks:
    """One rank's end of a conversation of ``num_ranks``, which has a chapter of its own for every check."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._chapter = 0
        self._num_exchanges = 0

    def turn_the_page(self) -> None:
        """Begin the next check; every rank does."""
        self._chapter += 1
        self._num_exchanges = 0

    def exchange(self, value: Any, timeout_s: float = 300.0) -> list[Any]:
        """Return every rank's value, by rank; values are JSON. Waits for all of them.

        Skips the check if another rank has given it up, and raises ``TimeoutError`` after ``timeout_s``.
        """
        self._num_exchanges += 1
        self._store.set(self._key(f"{self._num_exchanges}", self.rank), json.dumps(value))
        return [self._value(rank, f"{self._num_exchanges}", time.monotonic() + timeout_s) for rank in self._all]

    def meet(self) -> None:
        """Return once every rank has come here."""
        self.exchange(None)

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank's part of the check has ended early."""
        self._store.set(self._key("end", self.rank), json.dumps(reason))

    def given_up(self) -> str | None:
        """Return which other rank has given the check up, and why; None if none has."""
        for rank in self._all:
            if rank != self.rank and self._store.check([self._key("end", rank)]):
                return f"rank {rank}: {self._read('end', rank)}"
        return None

    def post(self, subject: str, value: Any) -> None:
        """Leave a value that the others may read with `read_post`, after a failure too."""
        self._store.set(self._key(subject, self.rank), json.dumps(value))

    def read_post(self, subject: str, rank: int, timeout_s: float) -> Any:
        """Return what a rank has posted in this chapter, None if nothing came in time."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([self._key(subject, rank)]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return self._read(subject, rank)

    @property
    def _all(self) -> range:
        return range(self.num_ranks)

    def _value(self, rank: int, subject: str, deadline: float) -> Any:
        while not self._store.check([self._key(subject, rank)]):
            if (reason := self.given_up()) is not None:
                skip(f"another rank ended first: {reason}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not come")
            time.sleep(_POLL_S)
        return self._read(subject, rank)

    def _read(self, subject: str, rank: int) -> Any:
        return json.loads(self._store.get(self._key(subject, rank)))

    def _key(self, subject: str, rank: int) -> str:
        return f"{self._chapter}/{subject}/{rank}"
