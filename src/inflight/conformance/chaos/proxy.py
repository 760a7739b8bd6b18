"""A TCP proxy on loopback that delays, cuts, swallows or changes what passes. Knows nothing of protocols."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

_PIECE_BYTES = 1 << 16
_LONG_ENOUGH_BYTES = 512
"""Pieces that carry more than the header of an answer; shorter ones are not changed."""


@dataclass(slots=True)
class Rule:
    """What happens to bytes that pass, in either direction, once the rule is set.

    ``cut_after_bytes`` are counted from then on, over all connections; ``num_cuts`` connections are cut so.
    """

    delay_s: float = 0.0
    cut_after_bytes: int | None = None
    num_cuts: int = 1
    is_blackhole: bool = False
    num_corrupted: int = 0
    """Answers' pieces whose last byte is to be changed."""


class TcpProxy:
    """Passes connections to ``host:port`` on from ``port`` of 127.0.0.1. Belongs to the event loop it is started in."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.rule = Rule()
        self.port = 0

    async def start(self) -> None:
        """Listen; `port` is known from now on."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Cut every connection and stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut every connection that is open."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        ways: list[asyncio.Future[None]] = []
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            ways = [
                asyncio.ensure_future(self._copy(reader, far_writer, is_answer=False)),
                asyncio.ensure_future(self._copy(far_reader, writer, is_answer=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the target is gone: so is the connection
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                rule = self.rule
                if rule.delay_s:
                    await asyncio.sleep(rule.delay_s)
                if rule.is_blackhole:
                    continue
                if rule.num_corrupted and is_answer and len(data) > _LONG_ENOUGH_BYTES:
                    rule.num_corrupted -= 1
                    data = data[:-1] + bytes([data[-1] ^ 0x55])
                if rule.cut_after_bytes is not None and rule.num_cuts:
                    if len(data) > rule.cut_after_bytes:
                        writer.write(data[: rule.cut_after_bytes])
                        rule.num_cuts -= 1
                        with contextlib.suppress(ConnectionError):
                            await writer.drain()
                        return
                    rule.cut_after_bytes -= len(data)
                writer.write(data)
                await writer.drain()
