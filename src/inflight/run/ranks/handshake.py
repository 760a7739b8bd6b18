"""How trainer ranks connect to their run: over channels that are authenticated with the run's token.

The token itself is not sent. Nothing is encrypted, so the hosts of a run must share a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
import time

from inflight.base.addresses import host_and_port, listen_on
from inflight.base.sealed_channel import (
    PROVE_S,
    Acceptor,
    ChannelError,
    SealedConnection,
    SealedStream,
    prove,
)
from inflight.errors import TrainerError
from inflight.run.ranks.channel import RunChannel

RUN_VARIABLE = "INFLIGHT_RUN"
"""The environment variable with the ``HOST:PORT`` at which a rank connects to its run."""
_CONNECT_S = 300.0
"""How long a rank tries to connect to its run, which may start later."""


class Meeting:
    """Accepts connections from the ranks of one run until it is closed."""

    def __init__(self, acceptor: Acceptor, where: str, ranks: list[asyncio.Future[RunChannel]]) -> None:
        self._acceptor = acceptor
        self._ranks = ranks
        self.where = where

    @classmethod
    async def open(cls, address: str, token: str, num_ranks: int, port: int = 0) -> Meeting:
        """Listen on a port of ``address``; 0 means any free port."""
        loop = asyncio.get_running_loop()
        ranks: list[asyncio.Future[RunChannel]] = [loop.create_future() for _ in range(num_ranks)]

        async def meet(stream: SealedStream) -> None:
            if stream.number >= num_ranks or ranks[stream.number].done():
                stream.close()  # it is not expected: keep waiting
                return
            _keep_alive(stream.socket())
            ranks[stream.number].set_result(RunChannel(stream))

        listener = listen_on(address, port)
        acceptor = Acceptor(token.encode(), meet)
        await acceptor.listen(listener)
        return cls(acceptor, host_and_port(address, listener.getsockname()[1]), ranks)

    async def channel(self, rank: int) -> RunChannel:
        """Wait for a rank to connect, and return the channel to it."""
        return await asyncio.shield(self._ranks[rank])

    def close(self) -> None:
        """Close the port and every channel, which ends the input of the ranks."""
        self._acceptor.close()
        for rank in self._ranks:
            if rank.done() and not rank.cancelled():
                rank.result().close()
            rank.cancel()


def meet_run(where: str, token: str, rank: int) -> SealedConnection:
    """Connect to the run, exchange proofs of the token, and return the connection. Blocks.

    Raises `TrainerError` if nothing answers in time or if the other side does not know the token.
    """
    host, _, port = where.rpartition(":")
    try:
        connection = _connect(host.strip("[]"), int(port))
        sealed = prove(connection, token.encode(), rank)
    except ChannelError as error:
        raise TrainerError(f"the process that answers at {where} does not know this run's token") from error
    except (OSError, EOFError) as error:
        raise TrainerError(
            f"rank {rank} could not connect to its run at {where}: {error or 'the connection was closed'}"
        ) from error
    connection.settimeout(None)
    _keep_alive(connection)
    return sealed


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address; None for a loopback address, or if no interface has it.

    Without an explicit interface, Gloo and NCCL choose one by the host's name.
    """
    import fcntl

    if ":" in address or ipaddress.ip_address(address).is_loopback:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def set_collective_interface(address: str) -> None:
    """Make the collectives of torch use the interface with this address, unless the environment names one."""
    if (name := interface_of(address)) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=PROVE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within a minute that the other host is unreachable."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
