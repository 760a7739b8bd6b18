"""Groups of torch in which buckets are broadcast: how ranks meet, and how groups are created, awaited and abandoned.

Ranks meet in a store that the sender hosts, by the keys in it. The store binds to the given address only. Closing it
ends every pending join, on either side.

Gloo cannot interrupt a pending operation: callers that drop a group abandon the operation (see
`inflight.base.threads`), and it ends by its own timeout. `inflight.weights.transports.nccl_group` states how NCCL
differs.
"""

from __future__ import annotations

import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed

from inflight.base.threads import run_unless_abandoned, start_in_thread
from inflight.errors import TransferError, transfer_error
from inflight.weights.encode.transit import on_weight_stream
from inflight.weights.transports.nccl_group import new_nccl_group
from inflight.weights.transports.store import ABANDONED, abandon
from inflight.wire import ProcessGroupSpec

dist: Any = torch.distributed  # its stubs leave out Gloo's options and the stores
JOINING = "joining the weight group"
GRACE_S = 0.5
"""How much longer than its timeout a call may take, so that its own, more specific error arrives. torch's store may
retry for twice its timeout; it is abandoned after this."""
_SHORTEST_POLL_S = 0.0001
_LONGEST_POLL_S = 0.001
_LATER_S = 5.0
"""How much later than its caller's deadline a polled operation may end on its own."""


class CollectiveGroup(Protocol):
    """One rank's end of a group; ``raw`` is torch's own object."""

    raw: Any

    @abstractmethod
    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Return a call that broadcasts ``flat`` from rank 0, and returns when that is done on this rank.

        It blocks and may have to be abandoned, so it must run in a thread of its own. It raises `RuntimeError`. It
        holds the group: dropping a group would wait for the operation.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abandon the group. Returns at once."""


class GlooGroup(CollectiveGroup):
    """A group of gloo."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: self.raw.broadcast(flat, 0, timeout_of(timeout_s)).wait()

    def abort(self) -> None:
        self.raw.abort()


class PolledGroup(CollectiveGroup):
    """A group, such as NCCL's, whose operations have no deadline of their own and whose abort may block for seconds.

    Memory of an operation that has not ended is held until the group is aborted: the device may still write to it.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._is_given_up = False
        self._unfinished: list[tuple[Any, torch.Tensor]] = []

    def make_broadcast(self, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        def broadcast() -> None:
            deadline = time.monotonic() + timeout_s
            with on_weight_stream(flat.device):
                work = self.raw.broadcast(flat, 0, timeout_of(timeout_s + _LATER_S))
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

        return broadcast

    def abort(self) -> None:
        self._is_given_up = True
        start_in_thread(self._abort, "inflight-abort-group")

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
    make: Callable[[Any, int, int, str, float], CollectiveGroup]


def new_gloo_group(keys: Any, rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    """Return torch's group of gloo, which binds to ``address``. Raises `RuntimeError`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout_of(timeout_s)
    return dist.ProcessGroupGloo(keys, rank, world_size, options)


GLOO = GroupKind("cpu", sends_from_device=False, make=lambda *arguments: GlooGroup(new_gloo_group(*arguments)))
NCCL = GroupKind(
    "cuda", sends_from_device=True, make=lambda keys, rank, size, *_: PolledGroup(new_nccl_group(keys, rank, size))
)


class AnnouncedRanks:
    """Ranks of an engine that itself joins and receives, whose waits have no deadline and cannot be interrupted.

    Announces ``spec.rank`` and the ranks after it on the engine's behalf. Once `meet` returns, every other rank is
    there and joining; once `await_send` returns, the sender is sending. Calling `abandon` from another thread ends both
    early, with `TransferError`.
    """

    def __init__(self, spec: ProcessGroupSpec, num_ranks: int) -> None:
        self._spec = spec
        self._ranks = range(spec.rank, spec.rank + num_ranks)
        self._abandoned: Future[str] = Future()
        self._store: Any = None

    def meet(self) -> None:
        """Block until all ranks have arrived. Raises `TransferError` after ``spec.timeout_s`` seconds."""
        spec = self._spec
        what = f"{JOINING} through its store at {spec.master_address}:{spec.master_port}"
        self._store = run_unless_abandoned(
            self._abandoned, lambda: meet(spec, self._ranks), what, spec.timeout_s + GRACE_S
        )

    def await_send(self, index: int, timeout_s: float) -> None:
        """Block until the sender sends bucket ``index`` of this group, counted from 0."""
        store, what = self._store, "waiting for the sender"
        if store is None:
            raise TransferError("no weight group is formed")
        try:
            run_unless_abandoned(
                self._abandoned,
                lambda: store.wait([_send_key(index)], timeout_of(timeout_s)),
                what,
                timeout_s + GRACE_S,
            )
        except RuntimeError as error:
            raise transfer_error(error, what) from error

    def abandon(self) -> None:
        """End the pending calls. Returns at once. Idempotent."""
        abandon(self._abandoned)


def host_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return a store that listens on ``address``, and its port. Raises `TransferError` if it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            hosted = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise transfer_error(error, f"hosting the weight group's store on {address}") from error
    return hosted, port


def announce_send(hosted: Any, group_name: str, index: int) -> None:
    """Notify the ranks that wait for it that bucket ``index`` of the group is being sent. Raises `RuntimeError`."""
    dist.PrefixStore(group_name, hosted).set(_send_key(index), "")


def _send_key(index: int) -> str:
    return f"sending/{index}"


def meet(spec: ProcessGroupSpec, ranks: Sequence[int]) -> Any:
    """Announce ``ranks`` in the group's store, and return the store once all ranks are announced."""
    deadline = time.monotonic() + spec.timeout_s
    timeout = timeout_of(spec.timeout_s)
    where = f"{spec.master_address}:{spec.master_port}"
    try:
        store = dist.TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise transfer_error(error, f"reaching the weight group's store at {where}") from error
    prefixed = dist.PrefixStore(spec.group_name, store)
    try:
        for rank in ranks:
            prefixed.set(f"here/{rank}", "")  # NCCL waits for no rank before its first operation
        here = [f"here/{other}" for other in range(spec.world_size)]
        prefixed.wait(here, timeout_of(deadline - time.monotonic()))
    except RuntimeError as error:
        raise transfer_error(error, f"rank {ranks[0]} joining the weight group of {spec.world_size} ranks") from error
    return prefixed


def timeout_of(timeout_s: float) -> timedelta:
    """Return a timeout of at least a millisecond: Gloo counts whole milliseconds, and treats 0 as no timeout."""
    return timedelta(seconds=max(timeout_s, 0.001))


def local_address_for(address: str, port: int) -> str:
    """Return the local address from which packets to ``address`` leave, so that nothing wider is bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
