"""Connections to a server that can send arbitrary bytes and can be cut.

They implement as much of HTTP/1.1 as checks need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLACK_S, within
from inflight.http.routes import GENERATION_PATHS
from inflight.http.tls import client_tls


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer to one request."""

    status: int
    body: bytes


@contextlib.asynccontextmanager
async def connection(subject: EndpointSubject) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the server, and cut it on exit, even in the middle of an answer."""
    assert subject.opened.url is not None
    parts = urlsplit(subject.opened.url)
    is_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if is_tls else 80), ssl=client_tls() if is_tls else None
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(subject: EndpointSubject, method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return the request line and headers of a request that asks the server to close the connection after its
    answer."""
    assert subject.opened.url is not None
    parts = urlsplit(subject.opened.url)
    lines = {"host": parts.netloc, "content-type": "application/json", "connection": "close", **headers}
    if path in GENERATION_PATHS and subject.opened.token:
        lines.setdefault("authorization", f"Bearer {subject.opened.token}")
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {parts.path}{path} HTTP/1.1\r\n{text}\r\n".encode()


async def answer_to(
    subject: EndpointSubject, method: str, path: str, body: bytes = b"", token: str | None = None
) -> HttpAnswer:
    """Return the server's answer to a request whose body consists of arbitrary bytes."""
    headers = {"content-length": str(len(body))}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    async with connection(subject) as (reader, writer):
        writer.write(head(subject, method, path, headers) + body)
        return await within(SLACK_S, read_answer(reader), f"the answer to {method} {path}")


async def read_answer(reader: asyncio.StreamReader) -> HttpAnswer:
    """Return one complete answer. Raises ``ConnectionError`` if the connection is closed before a status line."""
    status_line = await reader.readline()
    if not status_line:
        raise ConnectionResetError("closed without an answer")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) and b":" in line:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length")
    body = await (reader.read() if length is None else reader.readexactly(int(length)))
    return HttpAnswer(int(status_line.split()[1]), body)
