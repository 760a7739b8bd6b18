"""The ledger of items: which prompts are out, and that each is settled exactly once, across restarts too.

The module knows nothing of prompts, servers or files.

    waiting <-> issued -> finished -> trained
                   |          |
                   +----------+-----> dropped, for a reason
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from inflight.errors import CheckpointError, InvalidRequestError


class _State(StrEnum):
    WAITING = "waiting"
    ISSUED = "issued"
    FINISHED = "finished"


class Ledger:
    """Follows every item index of a task from issue to its end. Not safe for several threads.

    A watermark and the items below it that are not settled are all that is kept, so it stays as small as what is
    outstanding. A transition that is not in the drawing raises `InvalidRequestError` and changes nothing.
    """

    def __init__(self) -> None:
        self._next_new = 0
        self._unsettled: dict[int, _State] = {}
        self._waiting: list[int] = []
        self._num_trained = 0
        self._num_requeued = 0
        self._num_dropped: Counter[str] = Counter()

    @property
    def outstanding(self) -> int:
        """Number of items that are issued, or finished but not trained."""
        return len(self._unsettled) - len(self._waiting)

    @property
    def num_trained(self) -> int:
        """Number of items trained, over all restarts."""
        return self._num_trained

    @property
    def num_requeued(self) -> int:
        """Number of calls of `requeue`, over all restarts; what a restart puts back is not counted."""
        return self._num_requeued

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Number of items dropped, by reason, over all restarts."""
        return MappingProxyType(self._num_dropped)

    def next_item(self) -> int:
        """Issue an item: the lowest of those that wait to be issued again, else one never issued before."""
        if self._waiting:
            item = heapq.heappop(self._waiting)
        else:
            item, self._next_new = self._next_new, self._next_new + 1
        self._unsettled[item] = _State.ISSUED
        return item

    def requeue(self, item: int) -> None:
        """Take an issued item back, its completions being lost; `next_item` will issue it again."""
        self._expect(item, _State.ISSUED, to="re-queued")
        self._unsettled[item] = _State.WAITING
        heapq.heappush(self._waiting, item)
        self._num_requeued += 1

    def finish(self, item: int) -> None:
        """Note that an issued item has all its completions."""
        self._expect(item, _State.ISSUED, to="finished")
        self._unsettled[item] = _State.FINISHED

    def train(self, item: int) -> None:
        """Settle a finished item: an optimizer step has used it."""
        self._expect(item, _State.FINISHED, to="trained")
        del self._unsettled[item]
        self._num_trained += 1

    def drop(self, item: int, reason: str) -> None:
        """Settle an issued or finished item that no step will use."""
        self._expect(item, _State.ISSUED, _State.FINISHED, to="dropped")
        del self._unsettled[item]
        self._num_dropped[reason] += 1

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` needs, as JSON values."""
        return {
            "next_new": self._next_new,
            "unsettled": sorted(self._unsettled),
            "num_trained": self._num_trained,
            "num_requeued": self._num_requeued,
            "num_dropped": dict(self._num_dropped),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Return the ledger that was saved, every item that was not settled waiting, to be issued in item order.

        Nothing is lost and nothing is trained twice, if the weights of the same moment are restored with it. Raises
        `CheckpointError` if the counts do not add up.
        """
        ledger = cls()
        try:
            ledger._next_new = int(data["next_new"])
            ledger._waiting = sorted(int(item) for item in data["unsettled"])
            ledger._num_trained = int(data["num_trained"])
            ledger._num_requeued = int(data["num_requeued"])
            ledger._num_dropped = Counter({str(reason): int(count) for reason, count in data["num_dropped"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the ledger cannot be read: {type(error).__name__}: {error}") from error
        ledger._unsettled = dict.fromkeys(ledger._waiting, _State.WAITING)
        num_settled = ledger._num_trained + ledger._num_dropped.total()
        in_range = all(0 <= item < ledger._next_new for item in ledger._waiting)
        if not in_range or num_settled + len(ledger._unsettled) != ledger._next_new:
            raise CheckpointError(
                f"the ledger does not add up: {ledger._next_new} items were issued, {num_settled} are settled and "
                f"{len(ledger._waiting)} are listed as not settled"
            )
        return ledger

    def _expect(self, item: int, *states: _State, to: str) -> None:
        present = self._unsettled.get(item)
        if present not in states:
            known = present or ("settled" if 0 <= item < self._next_new else "never issued")
            raise InvalidRequestError(f"item {item} cannot be {to}: it is {known}, not {' or '.join(states)}")
