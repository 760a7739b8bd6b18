"""The key-value store through which the ranks of a weight group meet.

The sender serves it to ranks that know the group's secret.

A client can set keys, wait for keys, and read a key. It cannot list or delete them. The number and size of entries are
limited, so that no client can fill the sender's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch.distributed
from pydantic import Field, ValidationError

from inflight.base.addresses import listen_on
from inflight.base.sealed_channel import Acceptor, SealedStream, prove
from inflight.base.threads import start_in_thread
from inflight.errors import TransferError, transfer_error
from inflight.wire import WireModel
from inflight.wire.fields import Items

_MAX_FRAME_BYTES = 1 << 20
_LIMITS_PER_RANK = (2, 16, 64 << 10)
"""Maximum numbers of clients, keys and bytes of values per rank of the group."""
_MIN_RANKS = 64
"""The limits are computed for at least this many ranks."""
_MAX_NAMED = 5
"""Maximum number of missing keys named in an answer."""
_ANSWER_S = 0.2
"""How much longer than its timeout, in seconds, a call waits for the answer, which names the missing keys."""
_STOP_S = 5.0
_SHORTEST_S = 0.001
_AGAIN_S = 0.02

dist: Any = torch.distributed  # its stubs leave out what subclasses of a store override


class _Request(WireModel):
    """A request to set the first key to the bytes that follow, or to wait until all keys are set."""

    keys: Items[Annotated[str, Field(max_length=1024)]] = Field(min_length=1)
    timeout_s: float | None = Field(default=None, ge=0)
    """How long to wait for the keys, in seconds. None means that the request sets a key."""


class _Answer(WireModel):
    """The outcome of a request. If all keys are set, the value of the first key follows it."""

    missing: tuple[str, ...] = ()
    refusal: str = ""


class HostedKeys:
    """A store that listens on ``address`` and ``port`` until it is closed. It runs in its own thread.

    Raises `TransferError` if the address cannot be bound.
    """

    def __init__(self, address: str, secret: bytes, world_size: int) -> None:
        self._secret = secret
        num_ranks = max(world_size, _MIN_RANKS)
        self._max_clients, self._max_keys, self._max_bytes = (it * num_ranks for it in _LIMITS_PER_RANK)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiter]] = {}
        self._num_clients = 0
        try:
            listener = listen_on(address)
        except OSError as error:
            raise transfer_error(error, f"hosting the weight group's store on {address}") from error
        self.port = int(listener.getsockname()[1])
        opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        name = "inflight-weight-group-store"
        self._ended: Future[None] = start_in_thread(lambda: asyncio.run(self._serve(listener, opened)), name)
        both: list[Future[Any]] = [opened, self._ended]
        wait(both, return_when=FIRST_COMPLETED)
        if not opened.done():
            self._ended.result()  # raises what went wrong
        self._loop, self._closed = opened.result()

    def close(self) -> None:
        """Close the port and every connection, which ends the pending calls of all clients. Idempotent."""
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._closed.set)
        wait([self._ended], _STOP_S)

    async def _serve(
        self, listener: socket.socket, opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
    ) -> None:
        acceptor, closed = Acceptor(self._secret, self._answer_client), asyncio.Event()
        await acceptor.listen(listener)
        opened.set_result((asyncio.get_running_loop(), closed))
        await closed.wait()
        await acceptor.aclose()

    async def _answer_client(self, client: SealedStream) -> None:
        self._num_clients += 1
        try:
            while self._num_clients <= self._max_clients:
                head, _, value = (await client.receive(_MAX_FRAME_BYTES)).partition(b"\n")
                request = _Request.model_validate_json(head)
                answer = self._set(request, value) if request.timeout_s is None else await self._wait_for(request)
                await client.send(answer.model_dump_json().encode() + b"\n" + self._values.get(request.keys[0], b""))
        except (OSError, EOFError, ValidationError):
            pass  # the client has left, or cannot be trusted
        finally:
            self._num_clients -= 1
            client.close()

    def _set(self, request: _Request, value: bytes) -> _Answer:
        key = request.keys[0]
        others = sum(len(it) for name, it in self._values.items() if name != key)
        if key not in self._values and len(self._values) >= self._max_keys:
            return _Answer(refusal=f"the store holds {self._max_keys} keys already, which is its limit")
        if others + len(value) > self._max_bytes:
            return _Answer(
                refusal=f"the values would take more than {self._max_bytes} bytes, which is the store's limit"
            )
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing and not waiter.found.done():
                waiter.found.set_result(None)
        return _Answer()

    async def _wait_for(self, request: _Request) -> _Answer:
        missing = {key for key in request.keys if key not in self._values}
        if missing and request.timeout_s:
            waiter = _Waiter(missing, asyncio.get_running_loop().create_future())
            for key in missing:
                self._waiting.setdefault(key, []).append(waiter)
            await asyncio.wait([waiter.found], timeout=request.timeout_s)
            for key in missing:
                self._waiting[key].remove(waiter)
                if not self._waiting[key]:
                    del self._waiting[key]
        return _Answer(missing=tuple(sorted(missing)[:_MAX_NAMED]))


@dataclass(eq=False, slots=True)
class _Waiter:
    """A client that waits until no key is missing."""

    missing: set[str]
    found: asyncio.Future[None]


class KeyStore(dist.Store):  # type: ignore[misc]
    """A client's view of `HostedKeys`, through which torch can form groups. torch calls it from its own threads.

    Its methods raise `TransferError`. A group needs the store until it is formed, so this Python object must be kept at
    least that long.
    """

    def __init__(self, address: str, port: int, secret: bytes, rank: int, timeout_s: float) -> None:
        super().__init__()
        self._where = f"the weight group's store at {address}:{port}"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = socket.create_connection((address, port), max(deadline - time.monotonic(), _SHORTEST_S))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connection = prove(connection, secret, rank)
                return
            except (EOFError, ConnectionResetError) as error:  # too many of its connections had proved nothing
                if time.monotonic() > deadline:
                    raise transfer_error(error, f"reaching {self._where}") from error
                time.sleep(_AGAIN_S)
            except OSError as error:
                raise transfer_error(error, f"reaching {self._where}") from error

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_Request(keys=(key,)), value if isinstance(value, bytes) else value.encode(), self._timeout_s)

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is set."""
        return self._found([key], self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set."""
        self._found(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return not self._ask(_Request(keys=tuple(keys), timeout_s=0.0), b"", self._timeout_s)[0].missing

    def close(self) -> None:
        """Close the connection, which ends any call that is pending in another thread."""
        self._connection.close()

    def _found(self, keys: Sequence[str], timeout_s: float) -> bytes:
        answer, value = self._ask(_Request(keys=tuple(keys), timeout_s=timeout_s), b"", timeout_s + _ANSWER_S)
        if answer.missing:
            raise TransferError(
                f"waiting at {self._where} failed: {', '.join(answer.missing)} not set after {timeout_s:g} s"
            )
        return value

    def _ask(self, request: _Request, value: bytes, timeout_s: float) -> tuple[_Answer, bytes]:
        try:
            with self._lock:
                self._connection.settimeout(max(timeout_s, _SHORTEST_S))
                self._connection.send(request.model_dump_json().encode() + b"\n" + value)
                head, _, found = self._connection.receive(_MAX_FRAME_BYTES).partition(b"\n")
            answer = _Answer.model_validate_json(head)
        except (OSError, EOFError) as error:
            self.close()  # the answer to this request would be taken for the next one's
            raise transfer_error(error, f"using {self._where}") from error
        if answer.refusal:
            raise TransferError(f"{self._where} refused a key: {answer.refusal}")
        return answer, found
