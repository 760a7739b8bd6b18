"""Connections of calls: kept for the next call, or one for each."""

from __future__ import annotations

import asyncio

import pytest

from inflight.errors import UnreachableError
from inflight.http.bounded_client import BoundedClient


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
            client = BoundedClient(f"http://127.0.0.1:{port}", keeps_alive=keeps_alive)
            for _ in range(3):
                assert await client.request("GET", "/", timeout_s=5) == (500, b"{}")
            await client.aclose()
            await asyncio.gather(*[task for task in served if task is not None])
        assert len(served) == num_connections

    asyncio.run(conversation())


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again() -> None:
    async def conversation() -> int:
        num_connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            while await reader.readline() != b"\r\n":
                pass
            writer.write(b"HTTP/1.1 200 ok\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = BoundedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/")
            for _ in range(20):
                assert await client.request("GET", "/", timeout_s=5) == (200, b"{}")
            await client.aclose()
        return num_connections

    assert asyncio.run(conversation()) == 20


def test_an_idle_connection_is_closed_after_a_while_and_the_next_call_opens_another() -> None:
    async def conversation() -> list[bytes]:
        heard: list[bytes] = []
        closed = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                heard.append(line)
                while await reader.readline() != b"\r\n":
                    pass
                writer.write(b"HTTP/1.1 200 ok\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
            closed.set()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = BoundedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/")
            for _ in range(2):
                assert await client.request_json("GET", "/path", timeout_s=5) == (200, {})
                async with asyncio.timeout(10):
                    await closed.wait()
                closed.clear()
            await client.aclose()
        return heard

    assert asyncio.run(conversation()) == [b"GET /prefix/path HTTP/1.1\r\n"] * 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://user:secret@127.0.0.1:1", "http://", "ftp://host"])
def test_what_is_no_url_of_a_server_is_unreachable(url: str) -> None:
    async def call() -> None:
        await BoundedClient(url).request("GET", "/", timeout_s=5)

    with pytest.raises(UnreachableError, match="URL"):
        asyncio.run(call())


def test_calls_at_once_have_connections_of_their_own_which_later_calls_use_again() -> None:
    async def conversation() -> None:
        opened: list[asyncio.Task[None] | None] = []
        may_answer = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(asyncio.current_task())
            if len(opened) == 20:
                may_answer.set()
            while await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                await may_answer.wait()
                # In two pieces, and without a length.
                writer.write(b"HTTP/1.1 200 ok\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
                await writer.drain()
                writer.write(b"1\r\n \r\n0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = BoundedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            calls = [asyncio.ensure_future(client.request("GET", "/", timeout_s=5)) for _ in range(20)]
            assert await asyncio.gather(*calls) == [(200, b"{} ")] * len(calls)
            again = await asyncio.gather(*(client.request("GET", "/", timeout_s=5) for _ in calls))
            assert again == [(200, b"{} ")] * len(calls)
            assert len(opened) == len(calls)
            await client.aclose()
            await asyncio.gather(*[task for task in opened if task is not None])

    asyncio.run(conversation())
