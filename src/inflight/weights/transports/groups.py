"""Groups of torch in which buckets are broadcast: how they are made, waited for and given up, by backend.

Gloo cannot interrupt a pending operation: callers that give up a group abandon the operation (see
`inflight.base.threads`), and it ends by its own timeout. `inflight.weights.transports.nccl_group` says how NCCL
differs. Knows nothing of buckets.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed

from inflight.base.threads import started
from inflight.weights.encode.transit import queued_beside
from inflight.weights.transports.nccl_group import new_nccl_group
from inflight.weights.transports.rendezvous import timeout_of
from inflight.weights.transports.store import GIVEN_UP

dist: Any = torch.distributed  # its stubs leave out Gloo's options
_SHORTEST_POLL_S = 0.0001
_LONGEST_POLL_S = 0.001
_LATER_S = 5.0
"""How much later than its caller's deadline a polled operation may end by itself."""


class Group(Protocol):
    """One rank's end of a group; ``raw`` is torch's own object."""

    raw: Any

    @abstractmethod
    def broadcasting(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Return a call that broadcasts ``flat`` from rank 0, and returns when that is done on this rank.

        It blocks and may have to be abandoned, so it belongs into a thread of its own. It raises `RuntimeError`. It
        holds the group: dropping a group would wait for the operation.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up the group. Returns at once."""


class GlooGroup(Group):
    """A group of gloo."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def broadcasting(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: self.raw.broadcast(flat, 0, timeout_of(timeout_s)).wait()

    def abort(self) -> None:
        self.raw.abort()


class PolledGroup(Group):
    """A group, such as NCCL's, whose operations have no deadline of their own and whose abort may block for seconds.

    Memory of an operation that has not ended is held until the group is aborted: the device may still write to it.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._is_given_up = False
        self._unfinished: list[tuple[Any, torch.Tensor]] = []

    def broadcasting(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        def broadcast() -> None:
            deadline = time.monotonic() + timeout_s
            with queued_beside(flat.device):
                work = self.raw.broadcast(flat, 0, timeout_of(timeout_s + _LATER_S))
                operation = (work, flat)
                self._unfinished.append(operation)
                poll_s = _SHORTEST_POLL_S
                while not work.is_completed():
                    if self._is_given_up:
                        raise RuntimeError(GIVEN_UP)
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"not done after {timeout_s:g} s")
                    time.sleep(poll_s)
                    poll_s = min(2 * poll_s, _LONGEST_POLL_S)
                work.wait()  # it is complete: this raises what went wrong
            self._unfinished.remove(operation)

        return broadcast

    def abort(self) -> None:
        self._is_given_up = True
        started(self._abort, "inflight-abort-group")

    def _abort(self) -> None:
        self.raw.abort()
        self._unfinished.clear()


@dataclass(frozen=True, slots=True)
class GroupKind:
    """How the groups of one backend are made. ``device_type`` is where its buckets lie.

    ``make`` takes a store of keys, the rank, the number of ranks, the local address and the timeout in seconds.
    """

    device_type: Literal["cpu", "cuda"]
    sends_from_device: bool
    make: Callable[[Any, int, int, str, float], Group]


def new_gloo_group(keys: Any, rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    """Return torch's group of gloo, which binds to ``address``. Raises `RuntimeError`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout_of(timeout_s)
    return dist.ProcessGroupGloo(keys, rank, world_size, options)


GLOO = GroupKind("cpu", sends_from_device=False, make=lambda *told: GlooGroup(new_gloo_group(*told)))
NCCL = GroupKind(
    "cuda", sends_from_device=True, make=lambda keys, rank, size, *_: PolledGroup(new_nccl_group(keys, rank, size))
)
