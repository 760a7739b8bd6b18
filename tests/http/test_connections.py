"""Clients that send nothing, half of something, or come from a page: none of them keeps others from the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from inflight.http import connections, incoming_requests
from inflight.http.listening import InLoopServer, bind
from inflight.http.server import create_app
from tests.engine.reference import make_request, serving

OWN = {"authorization": "Bearer secret"}
BODY = make_request("r", [72, 105], max_tokens=2).model_dump_json()


@contextlib.asynccontextmanager
async def served(model_dir: Path) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    async with serving(model_dir) as endpoint, asyncio.timeout(90):
        server = InLoopServer(create_app(endpoint, token="secret"), bind("127.0.0.1", 0))
        url = await server.started()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            yield url, client
        await server.aclose()


async def open_and_send(url: str, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(content)
    return reader, writer


HALVES = {
    "nothing": b"",
    "half a head": b"POST /v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\n",
    "half a body": b"POST /v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    "a body that nobody reads": b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
}


@pytest.mark.parametrize("name", HALVES)
def test_what_does_not_arrive_is_not_waited_for(name: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    monkeypatch.setattr(incoming_requests, "_BODY_S", 0.2)

    async def run() -> None:
        async with served(model_dir) as (url, _):
            reader, writer = await open_and_send(url, HALVES[name])
            answer = await reader.readuntil(b"}") if "body" in name else b""
            assert b"200 OK" not in answer
            writer.write(b"x")
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            writer.close()

    asyncio.run(run())


def test_silent_connections_do_not_lock_others_out(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 20)

    async def run() -> None:
        async with served(model_dir) as (url, client):
            silent = [await open_and_send(url, b"") for _ in range(60)]
            assert (await client.get(f"{url}/health")).status_code == 200
            assert (await client.get(f"{url}/weight_version", headers=OWN)).status_code == 200
            for reader, _ in silent[:30]:  # the oldest ones are closed
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            for _, writer in silent:
                writer.close()

    asyncio.run(run())


REFUSED: dict[str, tuple[dict[str, str], int]] = {
    "a name that anybody may register": ({"host": "evil.example:8000"}, 403),
    "a name that begins like an address": ({"host": "127.0.0.1.evil.example"}, 403),
    "a page from elsewhere": ({"origin": "http://evil.example"}, 403),
    "a page of no origin": ({"origin": "null"}, 403),
    "a page on another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "a form": ({"content-type": "text/plain"}, 415),
    "another form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "files": ({"content-type": "multipart/form-data; boundary=a"}, 415),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["/v1/generate", "/abort_requests"])
def test_a_page_in_a_browser_does_not_drive_a_server(name: str, path: str, model_dir: Path) -> None:
    headers, status = REFUSED[name]

    async def run() -> None:
        async with served(model_dir) as (url, client):
            headers.setdefault("content-type", "application/json")
            answer = await client.post(f"{url}{path}", content=BODY, headers={**headers})
            assert answer.status_code == (401 if status == 415 and path == "/abort_requests" else status)
            usual = {"content-type": "application/json; charset=utf-8", "origin": url}
            assert (await client.post(f"{url}/v1/generate", content=BODY, headers=usual)).status_code == 200

    asyncio.run(run())


def test_a_name_that_the_user_lists_is_known(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connections.HOSTS_VARIABLE, "own.example, other.example")

    async def run() -> None:
        async with served(model_dir) as (url, client):
            for host in ("own.example", "localhost:8000", "[::1]:1", "127.0.0.1"):
                assert (await client.get(f"{url}/health", headers={"host": host})).status_code == 200

    asyncio.run(run())


def test_a_request_of_two_lengths_is_refused_and_its_connection_closed(model_dir: Path) -> None:
    head = b"POST /v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"

    async def run() -> None:
        async with served(model_dir) as (url, _):
            reader, writer = await open_and_send(
                url, head + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            )
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1") == 1
            assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))
            writer.close()

    asyncio.run(run())


def test_a_client_cannot_fill_the_log(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with served(model_dir) as (url, _):
            for _ in range(30):
                reader, writer = await open_and_send(url, b"\x00 nonsense\r\n\r\n")
                await reader.read()
                writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert len([it for it in caplog.records if "Invalid HTTP request" in it.message]) <= 1


@pytest.mark.parametrize("token", ["true", '"1"', "1e0", "1.0", "-1", "null"])
def test_only_an_integer_is_a_token_id(token: str, model_dir: Path) -> None:
    async def run() -> None:
        async with served(model_dir) as (url, client):
            body = BODY.replace("[72,105]", f"[72,{token}]")
            assert body != BODY
            headers = {"content-type": "application/json"}
            assert (await client.post(f"{url}/v1/generate", content=body, headers=headers)).status_code == 400

    asyncio.run(run())
