"""A TCP channel between two processes that share a secret: a handshake with mutual proofs, then authenticated frames.

The accepting end sends a nonce. The connecting end answers with a nonce of its own, a number such as its rank, and a
proof that it knows the secret; the accepting end then proves the same. A key for each direction is derived from the
secret and both nonces (HKDF, RFC 5869). Every frame carries its position and is authenticated under the key of its
direction: a relay that passes the handshake through cannot alter, drop, repeat or reorder frames undetected. A relay
can only end the connection or stay silent, so callers need deadlines. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

PROVE_S = 30.0
"""How long either end may take to prove that it knows the secret."""
MAX_UNPROVEN = 64
"""How many connections may be in their handshake at once. Beyond that, the oldest is closed to admit the next one."""
_NONCE_BYTES = _CODE_BYTES = 32
_NUMBER = struct.Struct("<I")
_HEAD = struct.Struct("<QQ")  # the position of the frame in its direction, and the size of its body
_TO_THREAD_BYTES = 1 << 20
_STREAM_BYTES = 1 << 20
_ROUNDS = 5
"""Maximum number of event loop iterations that asyncio needs to call the handler of an accepted connection."""


class ChannelError(ConnectionError):
    """The other end does not know the secret, or the data received is not the next frame that it sent."""


class _Direction:
    """Seals or checks the frames of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._position = 0
        self._head = b""

    def seal(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the bytes that precede and the bytes that follow the body of the next frame."""
        head = _HEAD.pack(self._position, len(body))
        self._position += 1
        return head + self._code(b"head", head), self._code(b"body" + head, body)

    def size_of(self, data: bytes, max_bytes: int) -> int:
        """Return the size of the body that follows this header. Raises `ChannelError`."""
        head, expected = data[: _HEAD.size], self._position
        position, size = _HEAD.unpack(head)
        if not hmac.compare_digest(data[_HEAD.size :], self._code(b"head", head)):
            raise ChannelError(f"frame {expected} was altered on the way, or inserted by another process")
        if position != expected:
            raise ChannelError(
                f"frame {position} arrived where frame {expected} was expected: frames were dropped, repeated or "
                "reordered on the way"
            )
        if size > max_bytes:
            raise ChannelError(f"frame {position} has {size} bytes; at most {max_bytes} are accepted")
        self._head, self._position = head, expected + 1
        return int(size)

    def check(self, body: bytes, code: bytes) -> bytes:
        """Return the body. Raises `ChannelError` if it is not the body that was sent."""
        if not hmac.compare_digest(code, self._code(b"body" + self._head, body)):
            raise ChannelError(f"frame {self._position - 1} was altered on the way")
        return body

    def _code(self, prefix: bytes, data: bytes) -> bytes:
        code = hmac.new(self._key, prefix, "sha256")
        code.update(data)
        return code.digest()


_HEAD_BYTES = _HEAD.size + _CODE_BYTES


class SealedConnection:
    """The connecting end, with blocking calls; `prove` creates it. At most one thread may send, and one may receive."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: bytes) -> None:
        self._connection = connection
        self._sent, self._received = _direction(secret, nonces, b"to accepting"), _direction(secret, nonces, b"back")

    def send(self, body: bytes) -> None:
        before, after = self._sent.seal(body)
        self._connection.sendall(b"".join((before, body, after)))

    def receive(self, max_bytes: int) -> bytes:
        """Return the body of the next frame. Raises `EOFError` at the end of the connection, and `ChannelError`."""
        size = self._received.size_of(_read(self._connection, _HEAD_BYTES), max_bytes)
        body = _read(self._connection, size)
        return self._received.check(body, _read(self._connection, _CODE_BYTES))

    def settimeout(self, timeout_s: float | None) -> None:
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends a pending call in another thread
        self._connection.close()


def prove(connection: socket.socket, secret: bytes, number: int) -> SealedConnection:
    """Exchange proofs with the accepting end, under the connection's own timeout. Closes the connection on failure.

    Raises `OSError` or `EOFError` if the connection fails, and `ChannelError` if the other end does not know the
    secret.
    """
    try:
        theirs, ours, packed = _read(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES), _NUMBER.pack(number)
        connection.sendall(ours + packed + _proof(secret, b"rank", theirs, ours, packed))
        if not hmac.compare_digest(_read(connection, _CODE_BYTES), _proof(secret, b"run", ours, theirs, packed)):
            raise ChannelError("the process that answers does not know the secret")
    except BaseException:
        connection.close()
        raise
    return SealedConnection(connection, secret, theirs + ours)


class SealedStream:
    """The accepting end, with async calls. ``number`` is the number that the connecting end sent."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, nonces: bytes
    ) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer
        self._sent, self._received = _direction(secret, nonces, b"back"), _direction(secret, nonces, b"to accepting")

    async def send(self, body: bytes) -> None:
        if len(body) < _TO_THREAD_BYTES:
            before, after = self._sent.seal(body)
        else:
            before, after = await asyncio.to_thread(self._sent.seal, body)
        self._writer.writelines((before, body, after))
        await self._writer.drain()

    async def receive(self, max_bytes: int) -> bytes:
        """Return the body of the next frame. Raises `EOFError` at the end of the connection, and `ChannelError`."""
        size = self._received.size_of(await self._reader.readexactly(_HEAD_BYTES), max_bytes)
        body = await self._reader.readexactly(size)
        return self._received.check(body, await self._reader.readexactly(_CODE_BYTES))

    def socket(self) -> socket.socket:
        return self._writer.get_extra_info("socket")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._writer.close()


class Acceptor:
    """Accepts connections on a socket, and calls ``on_proven`` with those that prove that they know the secret.

    ``on_proven`` owns the connection and has to close it: closing the acceptor does not.
    """

    def __init__(self, secret: bytes, on_proven: Callable[[SealedStream], Awaitable[None]]) -> None:
        self._secret = secret
        self._on_proven = on_proven
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_STREAM_BYTES)

    def close(self) -> None:
        """Close the port and every connection whose handshake is not complete."""
        if self._server is not None:
            self._server.close()
        while self._unproven:
            self._unproven.popitem()[0].transport.abort()

    async def aclose(self) -> None:
        """Close the server once asyncio has called the handler of every accepted connection.

        asyncio would otherwise leave an accepted connection open if its handler was not called before the server
        closed.
        """
        if self._server is not None:
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()
        self._unproven[writer] = None
        try:
            async with asyncio.timeout(PROVE_S):
                stream = await self._proven(reader, writer)
            self._unproven.pop(writer, None)
            await self._on_proven(stream)
        except (TimeoutError, OSError, EOFError):
            writer.transport.abort()  # it does not know the secret: keep accepting
        except asyncio.CancelledError:
            writer.transport.abort()  # the loop ends; nobody awaits this call, and asyncio logs it if it is cancelled
        finally:
            self._unproven.pop(writer, None)

    async def _proven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> SealedStream:
        ours, secret = secrets.token_bytes(_NONCE_BYTES), self._secret
        writer.write(ours)
        theirs, packed = await reader.readexactly(_NONCE_BYTES), await reader.readexactly(_NUMBER.size)
        if not hmac.compare_digest(
            await reader.readexactly(_CODE_BYTES), _proof(secret, b"rank", ours, theirs, packed)
        ):
            raise ChannelError("the process that connects does not know the secret")
        writer.write(_proof(secret, b"run", theirs, ours, packed))
        await writer.drain()
        return SealedStream(int(_NUMBER.unpack(packed)[0]), reader, writer, secret, ours + theirs)


def _proof(secret: bytes, role: bytes, challenge: bytes, answer: bytes, number: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + answer + number, "sha256")


def _direction(secret: bytes, nonces: bytes, label: bytes) -> _Direction:
    """Return a new `_Direction` for the direction that ``label`` identifies.

    The key is derived with HKDF: extract with the nonces as salt, then expand by one block.
    """
    return _Direction(hmac.digest(hmac.digest(nonces, secret, "sha256"), b"inflight " + label + b"\x01", "sha256"))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        num_read = connection.recv_into(view[done:])
        if num_read == 0:
            raise EOFError("the connection was closed")
        done += num_read
    return bytes(data)
