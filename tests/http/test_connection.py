"""Connections of calls: kept for the next call, or one for each."""

from __future__ import annotations

import asyncio

import pytest

from inflight.http.connection import HttpConnection


@pytest.mark.parametrize(("keeps_alive", "num_connections"), [(True, 1), (False, 3)])
def test_calls_share_a_connection_unless_each_is_to_have_its_own(keeps_alive: bool, num_connections: int) -> None:
    async def conversation() -> None:
        served: list[asyncio.Task[None] | None] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(asyncio.current_task())
            while await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                writer.write(b"HTTP/1.1 500 no\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = HttpConnection(f"http://127.0.0.1:{port}", keeps_alive=keeps_alive)
            for _ in range(3):
                assert await connection.exchange("GET", "/", timeout_s=5) == (500, b"{}")
            await connection.aclose()
            await asyncio.gather(*[task for task in served if task is not None])
        assert len(served) == num_connections

    asyncio.run(conversation())
