"""A TCP proxy on loopback that cuts connections, slows them down, or changes bytes."""

from __future__ import annotations

import asyncio
import contextlib

from inflight.base.tasks import TaskOwner, any_of

_PIECE_BYTES = 1 << 16
_STEP_S = 0.05
"""Time between two pieces of an answer whose rate is limited."""
_LONG_ENOUGH_BYTES = 512
"""Only pieces longer than this are corrupted, because shorter ones may contain only the header of an answer."""


class TcpProxy:
    """Forwards connections from `port` of 127.0.0.1 to ``target``.

    The proxy belongs to the event loop that starts it.
    """

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks = TaskOwner()
        self.port = 0
        self.cut_after_bytes: int | None = None
        """A connection is cut once all connections together have carried this many more bytes, in either direction."""
        self.num_cuts = 0
        """Number of connections that are still to be cut in this way."""
        self.bytes_per_s: int | None = None
        """Rate at which each connection carries answers, if it is limited."""
        self.num_corrupted = 0
        """Number of pieces of answers in which the last byte is still to be changed."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Cut every connection and stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._tasks.aclose()

    def cut(self) -> None:
        self._tasks.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._pass_on(reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            await any_of(
                self._copy(reader, far_writer, is_answer=False), self._copy(far_reader, writer, is_answer=True)
            )
        except OSError:
            pass  # the target has ended, so the connection ends
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                if self.num_corrupted and is_answer and len(data) > _LONG_ENOUGH_BYTES:
                    self.num_corrupted -= 1
                    data = data[:-1] + bytes([data[-1] ^ 0x55])
                if self.cut_after_bytes is not None and self.num_cuts:
                    if len(data) > self.cut_after_bytes:
                        writer.write(data[: self.cut_after_bytes])
                        self.num_cuts -= 1
                        with contextlib.suppress(ConnectionError):
                            await writer.drain()
                        return
                    self.cut_after_bytes -= len(data)
                rate = self.bytes_per_s if is_answer else None
                step = len(data) if rate is None else max(1, int(rate * _STEP_S))
                for start in range(0, len(data), step):
                    writer.write(data[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(0.0 if rate is None else _STEP_S)
