"""The handshake of trainer ranks with their run: both sides prove over TCP that they know the run's token.

The token itself is not sent. The connection is not encrypted, so the hosts of a run must share a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time

from inflight.errors import TrainerError, WorkerDiedError
from inflight.run.ranks.channel import RunChannel

RUN_VARIABLE = "INFLIGHT_RUN"
"""``HOST:PORT`` at which a rank connects to its run."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_RANK = struct.Struct("<I")
_PROVE_S = 30.0
"""How long either side may take to prove that it knows the token."""
_CONNECT_S = 300.0
"""How long a rank tries to connect to its run, which may start later."""


class Meeting:
    """Accepts connections from the ranks of one run until it is closed."""

    def __init__(self, server: asyncio.Server, address: str, ranks: list[asyncio.Future[RunChannel]]) -> None:
        self._server = server
        self._ranks = ranks
        host = f"[{address}]" if ":" in address else address
        self.where = f"{host}:{server.sockets[0].getsockname()[1]}"

    @classmethod
    async def open(cls, address: str, token: str, num_ranks: int, port: int = 0) -> Meeting:
        """Listen on a port of ``address``, 0 for a free one."""
        loop = asyncio.get_running_loop()
        ranks: list[asyncio.Future[RunChannel]] = [loop.create_future() for _ in range(num_ranks)]

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(_PROVE_S):
                    rank = await _proven_rank(reader, writer, token)
                if rank >= num_ranks or ranks[rank].done():
                    raise WorkerDiedError(f"rank {rank} is not expected")
            except (TimeoutError, OSError, asyncio.IncompleteReadError, WorkerDiedError):
                writer.close()  # not a rank of this run: keep waiting
                return
            _keep_alive(writer.get_extra_info("socket"))
            ranks[rank].set_result(RunChannel(rank, reader, writer))

        server = await asyncio.start_server(meet, address, port, limit=1 << 20)
        return cls(server, address, ranks)

    async def channel(self, rank: int) -> RunChannel:
        """Wait for a rank to connect, and return the channel to it."""
        return await asyncio.shield(self._ranks[rank])

    def close(self) -> None:
        """Close the port and every channel, which ends the input of the ranks."""
        self._server.close()
        for rank in self._ranks:
            if rank.done() and not rank.cancelled():
                rank.result().close()
            rank.cancel()


def meet_run(where: str, token: str, rank: int) -> socket.socket:
    """Connect to the run, exchange proofs of the token, and return the connection. Blocks.

    Raises `TrainerError` if nothing answers in time, or if the other side does not know the token.
    """
    host, _, port = where.rpartition(":")
    try:
        connection = _connect(host.strip("[]"), int(port))
        connection.settimeout(_PROVE_S)
        theirs, ours = _receive_exactly(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        number = _RANK.pack(rank)
        connection.sendall(ours + number + _proof(token, b"rank", theirs, ours, number))
        if not hmac.compare_digest(
            _receive_exactly(connection, _PROOF_BYTES), _proof(token, b"run", ours, theirs, number)
        ):
            raise TrainerError(f"the process that answers at {where} does not know this run's token")
    except (OSError, EOFError) as error:
        raise TrainerError(
            f"rank {rank} could not connect to its run at {where}: {error or 'the connection was closed'}"
        ) from error
    connection.settimeout(None)
    _keep_alive(connection)
    return connection


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None for loopback, or if no interface has it.

    Without an explicit interface, Gloo and NCCL choose one by the name of the host.
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


async def _proven_rank(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> int:
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(ours)
    theirs, number = await reader.readexactly(_NONCE_BYTES), await reader.readexactly(_RANK.size)
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"rank", ours, theirs, number)):
        raise WorkerDiedError("a rank does not know this run's token")
    writer.write(_proof(token, b"run", theirs, ours, number))
    await writer.drain()
    return int(_RANK.unpack(number)[0])


def _proof(token: str, role: bytes, challenge: bytes, answer: bytes, number: bytes) -> bytes:
    return hmac.digest(token.encode(), role + challenge + answer + number, "sha256")


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_PROVE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return data


def _keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within a minute that the other host is unreachable."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
