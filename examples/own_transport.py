"""A transport of your own: it sends weights over one TCP connection to each rank."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator

import torch
from pydantic import Field

from inflight.contracts import Transport, WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import pack, unpack
from inflight.wire import TransportSpec

_STEP_S = 0.05  # how long a socket may block: then the deadline and `abort` are looked at


class TcpSpec(TransportSpec):
    """The address on which the sender listens, and the token that connecting ranks present."""

    host: str = Field(max_length=253)
    port: int = Field(ge=1, le=65535)
    token: str = Field(pattern=r"^[0-9a-f]{32}$", repr=False)


class _End:
    """Base of both ends: sockets that never block for long, and calls that end when the group is abandoned."""

    def __init__(self) -> None:
        self.is_open, self.sockets = False, []

    def take(self, found: socket.socket) -> socket.socket:
        found.settimeout(_STEP_S)
        self.sockets.append(found)
        return found

    @contextlib.contextmanager
    def doing(self, what: str, timeout_s: float) -> Iterator[float]:
        """Name in every error what was being done, and yield the deadline."""
        if not self.is_open:
            raise TransferError(f"{what} failed: no group is open")
        try:
            yield time.monotonic() + timeout_s
        except OSError as error:
            raise TransferError(f"{what} failed: {error}") from error

    def check(self, deadline: float) -> None:
        if not self.is_open:
            raise ConnectionAbortedError("the group was abandoned")
        if time.monotonic() > deadline:
            raise TimeoutError("its time is over")

    def write(self, to: socket.socket, data: memoryview, deadline: float) -> None:
        while data:
            self.check(deadline)
            with contextlib.suppress(TimeoutError):
                data = data[to.send(data) :]

    def read(self, source: socket.socket, size_bytes: int, deadline: float) -> bytearray:
        data, num_read = bytearray(size_bytes), 0
        while num_read < size_bytes:
            self.check(deadline)
            with contextlib.suppress(TimeoutError):
                count = source.recv_into(memoryview(data)[num_read:])
                if not count:
                    raise ConnectionResetError("the other end is gone")
                num_read += count
        return data

    def abort(self) -> None:
        self.is_open = False
        sockets, self.sockets = self.sockets, []
        for it in sockets:
            it.close()


class TcpSender(_End, WeightSender):
    """The trainer's end."""

    is_collective = True  # a bucket is received while it is sent

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address, self.ranks, self.num_ranks, self.timeout_s = address, [], 0, 0.0
        self.ref = None

    def specs(self, run_id, num_ranks, timeout_s):
        self.abort()
        try:
            self.listener = self.take(socket.create_server((self.address, 0)))
        except OSError as error:
            raise TransferError(f"listening on {self.address} failed: {error}") from error
        self.is_open, self.ranks, self.num_ranks, self.ref = True, [], sum(num_ranks), None
        self.token, self.timeout_s = secrets.token_hex(16), timeout_s
        port = self.listener.getsockname()[1]
        spec = TcpSpec(
            run_id=run_id, transport="tcp", host=self.address, port=port, token=self.token, timeout_s=timeout_s
        )
        return [spec] * len(num_ranks)

    def join(self):
        with self.doing("joining the group", self.timeout_s) as deadline:
            while len(self.ranks) < self.num_ranks:
                self.check(deadline)
                with contextlib.suppress(TimeoutError):
                    rank = self.take(self.listener.accept()[0])
                    if secrets.compare_digest(bytes(self.read(rank, 32, deadline)), self.token.encode()):
                        self.ranks.append(rank)
            for rank in self.ranks:
                self.write(rank, memoryview(b"!"), deadline)  # all are there

    def begin(self, update):
        self.ref = update.ref  # ranks distinguish buckets by their order

    def send(self, bucket, timeout_s):
        if bucket.ref not in (None, self.ref):
            raise TransferError(f"bucket {bucket.index} belongs to another update: {bucket.ref}")
        with self.doing(f"sending bucket {bucket.index}", timeout_s) as deadline:
            ranks = self.ranks
            if len(ranks) < self.num_ranks:
                raise ConnectionError("the group is not formed")
            data = pack(bucket.tensors).cpu().numpy().data
            try:
                for rank in ranks:
                    self.write(rank, data, deadline)
            except OSError:
                while ranks:  # some ranks have a part of this bucket, and no other bucket may follow a part
                    ranks.pop().close()
                raise

    def end(self, *, is_done):
        pass  # nothing is stored


class TcpReceiver(_End, WeightReceiver):
    """The end of one rank of an endpoint."""

    def __init__(self, spec: TcpSpec) -> None:
        super().__init__()
        self.spec, self.connection, self.is_open = spec, None, True

    def join(self):
        with self.doing("joining the group", self.spec.timeout_s) as deadline:
            address = (self.spec.host, self.spec.port)
            connection = self.take(socket.create_connection(address, self.spec.timeout_s))
            self.write(connection, memoryview(self.spec.token.encode()), deadline)
            self.read(connection, 1, deadline)
            self.connection = connection

    def begin(self, ref):
        pass

    def receive(self, specs, timeout_s):
        with self.doing("receiving a bucket", timeout_s) as deadline:
            if self.connection is None:
                raise ConnectionError("the group is not formed")
            try:
                data = self.read(self.connection, sum(spec.size_bytes for spec in specs), deadline)
            except OSError:
                self.connection.close()  # the next bytes are the rest of this bucket, not the next bucket
                raise
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return unpack(flat, specs)


class TcpTransport(Transport):
    """The transport: creates the two ends."""

    name, spec_type, needs_gpu = "tcp", TcpSpec, False

    def sender(self, *, address, directory):
        return TcpSender(address)

    def receiver(self, spec, *, rank, device):
        return TcpReceiver(spec)


TCP = TcpTransport()
