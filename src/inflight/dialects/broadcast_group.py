"""A gloo group over which another project's trainer broadcasts weights: rank 0 is the trainer, all others are servers.

The ranks connect through a TCPStore at a known address, under keys whose prefixes depend on the project. The group is
formed only once: a rank that leaves cannot return.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed

from inflight.base.threads import run_unless_abandoned
from inflight.errors import ConfigError, TransferError, transfer_error
from inflight.weights.transports.groups import (
    GRACE_S,
    CollectiveGroup,
    GlooGroup,
    local_address_for,
    new_gloo_group,
    timeout_of,
)
from inflight.weights.transports.store import ABANDONED, abandon

dist: Any = torch.distributed  # its stubs leave out the stores


@dataclass(frozen=True, slots=True)
class GroupRank:
    """The address of a group, the rank of this process in it, and how long the other ranks may take to join.

    ``prefixes`` are prefixes of the keys in the store, outermost first; ``project`` is used in messages.
    ``hosts_store`` specifies whether this process hosts the store.
    """

    project: str
    prefixes: tuple[str, ...]
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    hosts_store: bool


def group_rank_of(
    init_method: str,
    project: str,
    prefixes: tuple[str, ...],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    hosts_store: bool | None = None,
) -> GroupRank:
    """Return a rank of the group at ``tcp://HOST:PORT``. Rank 0 hosts the store by default. Raises `ConfigError`."""
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or not port:
        raise ConfigError(f"{init_method!r} is not the address of a group; write it as tcp://HOST:PORT")
    if not 0 <= rank < world_size or world_size < 2:
        raise ConfigError(
            f"rank {rank} of {world_size} is not a rank of the group; ranks go from 0, the trainer, to {world_size - 1}"
        )
    if not timeout_s > 0:
        raise ConfigError(f"the timeout of the group must be above 0, not {timeout_s:g}")
    hosts = rank == 0 if hosts_store is None else hosts_store
    return GroupRank(project, prefixes, host, port, rank, world_size, timeout_s, hosts)


class BroadcastGroup:
    """One rank's end of the group. Its calls block; `abort` ends them from another thread."""

    def __init__(self, place: GroupRank) -> None:
        self._place = place
        self._abandoned: Future[str] = Future()
        self._group: CollectiveGroup | None = None
        self._store: Any = None

    @property
    def is_formed(self) -> bool:
        return self._group is not None and not self._abandoned.done()

    def join(self) -> None:
        """Join the group, first starting the store if this process hosts it.

        Returns once all ranks have joined. Raises `TransferError`.
        """
        place = self._place
        what = f"joining {place.project}'s group at {place.address}:{place.port}"
        # A client of the store uses its timeout twice: to connect, and to wait for the other ranks.
        run_unless_abandoned(self._abandoned, lambda: self._form(what), what, place.timeout_s + GRACE_S)

    def broadcast(self, tensor: torch.Tensor, timeout_s: float, what: str) -> None:
        """Send ``tensor`` on rank 0, or receive into it on other ranks. It must be contiguous and on the CPU.

        Raises `TransferError`; the ranks are then out of step, and the group is abandoned.
        """
        group = self._group
        if group is None or self._abandoned.done():
            raise TransferError(
                f"{self._place.project}'s group is not formed, or was abandoned; restart the trainer and the servers"
            )
        try:
            flat = tensor.reshape(-1).view(torch.uint8)  # tensors are sent as bytes
            run_unless_abandoned(self._abandoned, group.make_broadcast(flat, timeout_s), what, timeout_s + GRACE_S)
        except (RuntimeError, TransferError) as error:
            self.abort()
            raise error if isinstance(error, TransferError) else transfer_error(error, what) from error

    def abort(self) -> None:
        """Leave the group permanently, which ends pending operations on every rank. Idempotent."""
        abandon(self._abandoned)
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()

    def _form(self, what: str) -> None:
        place, deadline = self._place, time.monotonic() + self._place.timeout_s
        try:
            store = _hosted(place) if place.hosts_store else _found(place)
            local = place.address if place.hosts_store else local_address_for(place.address, place.port)
            keys = store
            for prefix in place.prefixes:
                keys = dist.PrefixStore(prefix, keys)
            raw = new_gloo_group(keys, place.rank, place.world_size, local, max(deadline - time.monotonic(), 1.0))
        except (OSError, RuntimeError) as error:
            raise transfer_error(error, what) from error
        group = GlooGroup(raw)
        self._store = store  # kept where it is hosted, because the others still read it
        self._group = group
        if self._abandoned.done():
            self.abort()
            raise TransferError(ABANDONED)


def _hosted(place: GroupRank) -> Any:
    """Return a store that listens only on the group's address; the projects' own stores listen on all addresses."""
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.address, place.port))
        listener.listen(128)
        return dist.TCPStore(
            place.address,
            place.port,
            world_size=place.world_size,
            is_master=True,
            timeout=timedelta(seconds=place.timeout_s),
            use_libuv=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


def _found(place: GroupRank) -> Any:
    """Return the store at the group's address. The store counts the ranks that have joined."""
    timeout = timeout_of(place.timeout_s)
    return dist.TCPStore(
        place.address, place.port, world_size=place.world_size, is_master=False, timeout=timeout, use_libuv=False
    )
