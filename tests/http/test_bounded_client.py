"""Connections of calls: kept for the next call, or one for each."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from inflight.base.tasks import cancel_and_wait
from inflight.errors import DeadlineError, ProtocolError, UnreachableError
from inflight.http.bounded_client import BoundedClient
from inflight.http.connection_pool import ConnectionPool
from inflight.http.tls import client_tls


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


# ---------------------------------------------------------------------------------------------------------------
# Clients of httpx


@contextlib.asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[str]:
    """A server that answers the first request of each connection with these bytes, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


TRANSPORTS = pytest.mark.parametrize("transport", [ConnectionPool, httpx.AsyncHTTPTransport])


@TRANSPORTS
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", UnreachableError),
        (b"HTTP/1.1 200 OK\r\ncontent-le", UnreachableError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", UnreachableError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{", UnreachableError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n", ProtocolError),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ProtocolError),
    ],
)
def test_what_goes_wrong_is_the_same_error_over_the_transport_of_httpx(
    transport: Callable[[], httpx.AsyncBaseTransport], answer: bytes, error: type[Exception]
) -> None:
    async def run() -> None:
        async with answering(answer) as url, httpx.AsyncClient(transport=transport()) as http:
            with pytest.raises(error) as raised:
                await BoundedClient(url, client=http).request("GET", "/", timeout_s=10)
            assert type(raised.value) is error

    asyncio.run(run())


@TRANSPORTS
def test_a_given_client_adds_its_headers_stays_open_and_does_not_shorten_the_deadline(
    transport: Callable[[], httpx.AsyncBaseTransport],
) -> None:
    async def run() -> None:
        requests: list[bytes] = []
        connections: list[asyncio.Task[None] | None] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(asyncio.current_task())
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    requests.append((await reader.readuntil(b"\r\n\r\n")).lower())
                    if b"/never" in requests[-1]:
                        continue
                    await asyncio.sleep(0.2)
                    writer.write(b"HTTP/1.1 200 ok\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        async with (
            await asyncio.start_server(answer, "127.0.0.1", 0) as server,
            httpx.AsyncClient(transport=transport(), headers={"x-gateway": "key"}, timeout=0.01) as http,
        ):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for _ in range(2):
                client = BoundedClient(url, client=http)
                assert await client.request("GET", "/", timeout_s=10, headers={"x-ours": "1"}) == (200, b"{}")
                await client.aclose()
            with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
                await BoundedClient(url, client=http).request("GET", "/never", timeout_s=0.05)
            await http.aclose()
            await asyncio.gather(*[task for task in connections if task is not None])
        for request in requests[:2]:
            assert b"x-gateway: key" in request
            assert b"x-ours: 1" in request
            assert b"accept-encoding: identity" in request

    asyncio.run(run())


def test_bytes_after_an_answer_are_not_read_as_the_answer_to_the_next_request() -> None:
    async def run() -> None:
        connections: list[asyncio.Task[None] | None] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(asyncio.current_task())
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                good = b"HTTP/1.1 200 ok\r\ncontent-length: 2\r\n\r\n{}"
                writer.write(good + b"HTTP/1.1 403 no\r\ncontent-length: 0\r\n\r\n")
                await reader.read()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = BoundedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            for _ in range(3):
                assert await client.request("GET", "/", timeout_s=5) == (200, b"{}")
            await client.aclose()
            await asyncio.gather(*[task for task in connections if task is not None])
        assert len(connections) == 3

    asyncio.run(run())


def test_a_cancelled_call_has_closed_its_connection_and_leaves_the_others() -> None:
    async def run() -> None:
        arrived, closed = asyncio.Event(), asyncio.Event()
        may_answer = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            if b"cancelled" in line:
                arrived.set()
                await reader.read()
                closed.set()
            else:
                await may_answer.wait()
                writer.write(b"HTTP/1.1 200 ok\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(30):
            client = BoundedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            other = asyncio.ensure_future(client.request("GET", "/other", timeout_s=30))
            call = asyncio.ensure_future(client.request("GET", "/cancelled", timeout_s=30))
            await arrived.wait()
            await cancel_and_wait(call)
            assert call.cancelled()
            await closed.wait()
            may_answer.set()
            assert await other == (200, b"{}")
            await client.aclose()

    asyncio.run(run())


def test_all_servers_with_tls_share_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def counting() -> ssl.SSLContext:
        made.append(create())
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counting)
    client_tls.cache_clear()

    async def run() -> None:
        for port in (1, 2, 3):
            client = BoundedClient(f"https://127.0.0.1:{port}")
            with pytest.raises(UnreachableError):
                await client.request("GET", "/", timeout_s=5)
            await client.aclose()

    asyncio.run(run())
    assert len(made) == 1
