"""torch process groups over which buckets are broadcast: how they are created, awaited and abandoned.

Gloo cannot interrupt a pending operation. A caller that drops a group therefore abandons the operation (see
`inflight.base.threads`), which ends at its own timeout. `inflight.weights.transports.nccl_group` describes how NCCL
differs.
"""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed

from inflight.base.threads import start_in_thread
from inflight.weights.encode.transit import on_weight_stream
from inflight.weights.transports.nccl_group import new_nccl_group
from inflight.weights.transports.store import ABANDONED

dist: Any = torch.distributed  # its stubs leave out Gloo's options and the stores
GRACE_S = 0.5
"""How much longer than its timeout, in seconds, a call may take, so that its own, more specific error arrives first.
The call is then abandoned, because torch's store may retry for twice its timeout.
"""
_SHORTEST_POLL_S = 0.0001
_LONGEST_POLL_S = 0.001
_LATER_S = 5.0
"""How much later than its caller's deadline, in seconds, a polled operation times out by itself."""


class CollectiveGroup(Protocol):
    """One rank's end of a group. ``raw`` is torch's own object, and ``meeting`` is kept as long as the group exists."""

    raw: Any
    meeting: Any = None

    @abstractmethod
    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Return a function that broadcasts ``flat`` from rank 0, and returns when the broadcast is done on this rank.

        The function blocks and may have to be abandoned, so it must run in its own thread. It raises `RuntimeError`. It
        keeps a reference to the group, because freeing a group would wait for the operation.
        """

    @abstractmethod
    def gather(self, flat: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """Return, on rank 0, the tensors of all ranks; on other ranks, an empty list. Blocks. Raises `RuntimeError`."""

    @abstractmethod
    def abort(self) -> None:
        """Abandon the group. Returns immediately."""


class GlooGroup(CollectiveGroup):
    """A gloo group."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: self.raw.broadcast(flat, 0, timeout_of(timeout_s)).wait()

    def gather(self, flat: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """Gather from one rank at a time, so that an error names the rank."""
        if self.raw.rank():
            self.raw.send([flat], 0, 0).wait(timeout_of(timeout_s))
            return []
        deadline, gathered = time.monotonic() + timeout_s, [flat]
        for rank in range(1, self.raw.size()):
            gathered.append(torch.empty_like(flat))
            try:
                self.raw.recv(gathered[-1:], rank, 0).wait(timeout_of(deadline - time.monotonic()))
            except RuntimeError as error:
                raise RuntimeError(f"nothing arrived from rank {rank}: {error}") from error
        return gathered

    def abort(self) -> None:
        self.raw.abort()


class PolledGroup(CollectiveGroup):
    """A group, such as NCCL's, whose operations have no deadline of their own and whose abort may block for seconds.

    The memory of an unfinished operation is kept until the group is aborted, because the device may still write to it.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._is_given_up = False
        self._unfinished: list[tuple[Any, torch.Tensor]] = []

    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: self._finish(lambda timeout: self.raw.broadcast(flat, 0, timeout), flat, timeout_s)

    def gather(self, flat: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        gathered = [] if self.raw.rank() else [torch.empty_like(flat) for _ in range(self.raw.size())]
        options = dist.GatherOptions()

        def start(timeout: timedelta) -> Any:
            options.timeout = timeout
            return self.raw.gather([gathered] if gathered else [], [flat], options)

        self._finish(start, flat, timeout_s)
        return gathered

    def _finish(self, start: Callable[[timedelta], Any], flat: torch.Tensor, timeout_s: float) -> None:
        """Start an operation on ``flat``, and return when it is done."""
        deadline = time.monotonic() + timeout_s
        with on_weight_stream(flat.device):
            work = start(timeout_of(timeout_s + _LATER_S))
            operation = (work, flat)
            self._unfinished.append(operation)
            poll_s = _SHORTEST_POLL_S
            while not work.is_completed():
                if self._is_given_up:
                    raise RuntimeError(ABANDONED)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done after {timeout_s:g} s")
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            work.wait()  # it is complete: this raises its error
        self._unfinished.remove(operation)

    def abort(self) -> None:
        self._is_given_up = True
        start_in_thread(self._abort, "inflight-abort-group")

    def _abort(self) -> None:
        self.raw.abort()
        self._unfinished.clear()


@dataclass(frozen=True, slots=True)
class GroupKind:
    """How the groups of one backend are created. ``device_type`` is the type of the device that holds the buckets.

    ``make`` receives a key store, the rank, the number of ranks, the local address and the timeout in seconds.
    """

    device_type: Literal["cpu", "cuda"]
    sends_from_device: bool
    make: Callable[[Any, int, int, str, float], CollectiveGroup]


def new_gloo_group(keys: Any, rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    """Return a torch gloo group that binds to ``address``. Raises `RuntimeError`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout_of(timeout_s)
    return dist.ProcessGroupGloo(keys, rank, world_size, options)


GLOO = GroupKind("cpu", sends_from_device=False, make=lambda *arguments: GlooGroup(new_gloo_group(*arguments)))
NCCL = GroupKind(
    "cuda", sends_from_device=True, make=lambda keys, rank, size, *_: PolledGroup(new_nccl_group(keys, rank, size))
)


def timeout_of(timeout_s: float) -> timedelta:
    """Return a timeout of at least a millisecond, because Gloo counts whole milliseconds and treats 0 as no timeout."""
    return timedelta(seconds=max(timeout_s, 0.001))


def local_address_for(address: str, port: int) -> str:
    """Return the local address from which packets to ``address`` are sent, so that only this address need be bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
