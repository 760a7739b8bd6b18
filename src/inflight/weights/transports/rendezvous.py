"""How the ranks of a weight group meet: the store that the sender hosts, and the keys in it. Moves no weights.

The store binds to the given address only. Taking it down ends every pending join, on either side.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed

from inflight.base.threads import run_unless
from inflight.errors import TransferError, transfer_failed
from inflight.weights.transports.store import give_up
from inflight.wire import ProcessGroupSpec

dist: Any = torch.distributed  # its stubs leave out the stores
JOINING = "joining the weight group"
GRACE_S = 0.5
"""How much longer a call may take than its timeout. torch's store may retry for twice the timeout, and is cut off; else
its own error says more."""


class AnnouncedRanks:
    """Ranks of an engine that joins and receives by itself, whose own waits have no deadline and cannot be ended.

    Announces ``spec.rank`` and the ranks after it on the engine's behalf. Once `meet` returns, every other rank is
    there and joining; once `await_send` returns, the sender is sending. Calling `give_up` from another thread ends both
    early, with `TransferError`.
    """

    def __init__(self, spec: ProcessGroupSpec, num_ranks: int) -> None:
        self._spec = spec
        self._ranks = range(spec.rank, spec.rank + num_ranks)
        self._given_up: Future[str] = Future()
        self._store: Any = None

    def meet(self) -> None:
        """Block until all ranks have come. Raises `TransferError` after ``spec.timeout_s``."""
        spec = self._spec
        what = f"{JOINING} through its store at {spec.master_address}:{spec.master_port}"
        self._store = run_unless(self._given_up, lambda: meet(spec, self._ranks), what, spec.timeout_s + GRACE_S)

    def await_send(self, index: int, timeout_s: float) -> None:
        """Block until the sender sends bucket ``index`` of this group, counted from 0."""
        store, what = self._store, "waiting for the sender"
        if store is None:
            raise TransferError("no weight group is formed")
        try:
            run_unless(
                self._given_up,
                lambda: store.wait([_sending(index)], timeout_of(timeout_s)),
                what,
                timeout_s + GRACE_S,
            )
        except RuntimeError as error:
            raise transfer_failed(error, what) from error

    def give_up(self) -> None:
        """End what is pending. Returns at once. Idempotent."""
        give_up(self._given_up)


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
        raise transfer_failed(error, f"hosting the weight group's store on {address}") from error
    return hosted, port


def announce_send(hosted: Any, group_name: str, index: int) -> None:
    """Tell ranks that wait for it that bucket ``index`` of the group is being sent. Raises `RuntimeError`."""
    dist.PrefixStore(group_name, hosted).set(_sending(index), "")


def _sending(index: int) -> str:
    return f"sending/{index}"


def meet(spec: ProcessGroupSpec, ranks: Sequence[int]) -> Any:
    """Announce ``ranks`` in the group's store, and return the store once all ranks are announced."""
    deadline = time.monotonic() + spec.timeout_s
    timeout = timeout_of(spec.timeout_s)
    where = f"{spec.master_address}:{spec.master_port}"
    try:
        store = dist.TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise transfer_failed(error, f"reaching the weight group's store at {where}") from error
    prefixed = dist.PrefixStore(spec.group_name, store)
    try:
        for rank in ranks:
            prefixed.set(f"here/{rank}", "")  # NCCL waits for no rank before its first operation
        here = [f"here/{other}" for other in range(spec.world_size)]
        prefixed.wait(here, timeout_of(deadline - time.monotonic()))
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {ranks[0]} joining the weight group of {spec.world_size} ranks") from error
    return prefixed


def timeout_of(timeout_s: float) -> timedelta:
    """Return a timeout of at least a millisecond: Gloo counts whole milliseconds, and takes 0 for no timeout."""
    return timedelta(seconds=max(timeout_s, 0.001))


def address_towards(address: str, port: int) -> str:
    """Return the local address from which packets to ``address`` leave, so that nothing wider is bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
