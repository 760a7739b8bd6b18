"""The ledger of items, which settles each item exactly once, even across restarts.

waiting <-> issued -> finished -> trained
               |          |
               +----------+-----> dropped, for a reason
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from inflight.errors import CheckpointError, InvalidRequestError


class _State(StrEnum):
    WAITING = "waiting"
    ISSUED = "issued"
    FINISHED = "finished"


class Ledger:
    """Tracks every item index of a task from issue to settlement. It is not thread-safe.

    It keeps a watermark and the unsettled items below it, so its size is proportional to the outstanding work. A
    transition that is not in the diagram raises `InvalidRequestError` and changes nothing.
    """

    def __init__(self) -> None:
        self._next_new = 0
        self._unsettled: dict[int, _State] = {}
        self._waiting: list[int] = []
        self.num_trained = 0
        """Number of items trained on, including those of earlier processes of the run; ``num_dropped`` counts dropped
        items, by reason.
        """
        self.num_dropped: Counter[str] = Counter()
        self.num_requeued = 0
        """Number of calls to `requeue`, earlier processes included; items that a restart puts back do not count."""

    @property
    def outstanding(self) -> int:
        """Number of items that are issued, or finished but not yet trained on."""
        return len(self._unsettled) - len(self._waiting)

    @property
    def num_unsettled(self) -> int:
        """Number of items that are outstanding, or wait to be issued again."""
        return len(self._unsettled)

    def next_item(self) -> int:
        """Issue an item: the lowest waiting one, or else a new one."""
        if self._waiting:
            item = heapq.heappop(self._waiting)
        else:
            item, self._next_new = self._next_new, self._next_new + 1
        self._unsettled[item] = _State.ISSUED
        return item

    def requeue(self, item: int) -> None:
        """Take back an issued item whose completions are lost; `next_item` will issue it again."""
        self._expect(item, _State.ISSUED, to="re-queued")
        self._unsettled[item] = _State.WAITING
        heapq.heappush(self._waiting, item)
        self.num_requeued += 1

    def finish(self, item: int) -> None:
        """Record that an issued item has all its completions."""
        self._expect(item, _State.ISSUED, to="finished")
        self._unsettled[item] = _State.FINISHED

    def train(self, item: int) -> None:
        """Settle a finished item: an optimizer step has used it."""
        self._expect(item, _State.FINISHED, to="trained")
        del self._unsettled[item]
        self.num_trained += 1

    def drop(self, item: int, reason: str) -> None:
        """Settle an issued or finished item that will not be trained on."""
        self._expect(item, _State.ISSUED, _State.FINISHED, to="dropped")
        del self._unsettled[item]
        self.num_dropped[reason] += 1

    def is_settled(self, item: int) -> bool:
        """Return whether an item that was issued has been trained on or dropped."""
        return item not in self._unsettled

    def to_json(self) -> dict[str, Any]:
        """Return the state that `from_json` needs, as JSON values."""
        return {
            "next_new": self._next_new,
            "unsettled": sorted(self._unsettled),
            "num_trained": self.num_trained,
            "num_requeued": self.num_requeued,
            "num_dropped": dict(self.num_dropped),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Return a saved ledger in which every unsettled item waits to be issued again, in item order.

        If the weights are restored from the same moment, no item is lost or trained on twice. Raises `CheckpointError`
        if the counts do not add up.
        """
        ledger = cls()
        try:
            ledger._next_new = int(data["next_new"])
            ledger._waiting = sorted(int(item) for item in data["unsettled"])
            ledger.num_trained = int(data["num_trained"])
            ledger.num_requeued = int(data["num_requeued"])
            ledger.num_dropped = Counter({str(reason): int(count) for reason, count in data["num_dropped"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the ledger cannot be read: {type(error).__name__}: {error}") from error
        ledger._unsettled = dict.fromkeys(ledger._waiting, _State.WAITING)
        num_settled = ledger.num_trained + ledger.num_dropped.total()
        in_range = all(0 <= item < ledger._next_new for item in ledger._waiting)
        if not in_range or num_settled + len(ledger._unsettled) != ledger._next_new:
            raise CheckpointError(
                f"the ledger does not add up: {ledger._next_new} items were issued, but {num_settled} are settled and "
                f"{len(ledger._waiting)} are listed as not settled"
            )
        return ledger

    def _expect(self, item: int, *states: _State, to: str) -> None:
        present = self._unsettled.get(item)
        if present not in states:
            known = present or ("settled" if 0 <= item < self._next_new else "never issued")
            raise InvalidRequestError(f"item {item} cannot be {to}: it is {known}, not {' or '.join(states)}")
