"""Calls to one HTTP server, each with a deadline and a size limit. Errors of httpx are translated to inflight's."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import httpx

from inflight.errors import DeadlineError, EndpointError, ProtocolError, UnreachableError
from inflight.http.bodies import parse_body
from inflight.http.connection_pool import make_connection_pool
from inflight.http.tls import CA_VARIABLE, CERTIFICATE_VARIABLE

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
_MAX_EVENT_BYTES = 1024 * 1024
"""Maximum size of one server-sent event, in bytes."""
MAX_ERROR_BYTES = 1024 * 1024
"""Maximum body size of a response with a status other than 200."""
_DISCONNECTED = re.compile("disconnected|peer closed connection")
"""Matches the messages with which httpx's own transport reports, as `httpx.RemoteProtocolError`, that a connection was
closed early.
"""
_FAILURES = (TimeoutError, httpx.HTTPError, httpx.InvalidURL)
_IDENTITY = {"accept-encoding": "identity"}
"""A compressed body could expand to a thousand times the size limit."""


class BoundedClient:
    """Calls the server at ``url``; errors contain this URL.

    ``client`` sends the requests and stays open. If it is None, this object creates a client that ignores the
    environment's proxy settings, and `aclose` closes it. The object belongs to the event loop in which it is first
    used. If ``keeps_alive`` is False, each call opens a new connection. Use this for servers that silently close a
    connection after an error: the next call on that connection would fail, and could be retried only if it is
    idempotent.
    """

    def __init__(
        self,
        url: str,
        *,
        client: httpx.AsyncClient | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        keeps_alive: bool = True,
    ) -> None:
        self._url = url
        self._client = client
        self._transport: httpx.AsyncBaseTransport | None = None
        self._max_response_bytes = max_response_bytes
        self._keeps_alive = keeps_alive
        self._has_answered = False
        """Whether the server has answered a call with HTTP."""
        self._url_of = functools.lru_cache(64)(lambda path: checked_url(f"{url.rstrip('/')}{path}"))

    async def request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> tuple[int, bytes]:
        """Return the status and the body, regardless of the status.

        Raises `UnreachableError`, `DeadlineError`, or `ProtocolError` if the response is not HTTP or is too long.
        Cancelling the call closes its connection.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(method, path, content, headers or {})
                self._has_answered = True
                try:
                    return response.status_code, await self._read(response, max_response_bytes)
                finally:
                    await response.aclose()
        except _FAILURES as error:
            raise self._error_of(error, f"{method} {path}", timeout_s) from error

    async def request_json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Send a JSON body, and return the status and the response: decoded if it is JSON, else as text.

        Raises the errors of `request`.
        """
        content = None if body is None else json.dumps(body)
        status, answer = await self.request(
            method,
            path,
            timeout_s=timeout_s,
            content=content,
            headers={"content-type": "application/json", **(headers or {})},
        )
        try:
            return status, await parse_body(json.loads, answer)
        except (ValueError, RecursionError):
            return status, answer.decode(errors="replace")

    async def events(
        self,
        method: str,
        path: str,
        *,
        content: str,
        headers: Mapping[str, str],
        timeout_s: float,
        on_refusal: Callable[[int, bytes], Exception],
    ) -> AsyncGenerator[bytearray, None]:
        """Yield the data of a response's server-sent events.

        A status other than 200 raises what ``on_refusal`` returns. Raises `ProtocolError` for a response that ends
        without the event ``[DONE]``.
        """
        rest, is_done = bytearray(), False
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(method, path, content, headers)
                self._has_answered = True
                try:
                    if response.status_code != 200:
                        raise on_refusal(response.status_code, await self._read(response, MAX_ERROR_BYTES))
                    size_bytes = 0
                    async for part in self._body_of(response, self._max_response_bytes):
                        size_bytes += len(part)
                        self._check_size(size_bytes, self._max_response_bytes)
                        rest += part
                        if len(rest) > _MAX_EVENT_BYTES + len(part):
                            raise ProtocolError(
                                f"the stream has an event of more than {_MAX_EVENT_BYTES} bytes", self._url
                            )
                        if b"\n" not in part:
                            continue
                        *lines, rest = rest.split(b"\n")
                        for line in lines:
                            if line == b"data: [DONE]":
                                is_done = True
                            elif line.startswith(b"data: "):
                                yield line.removeprefix(b"data: ")
                finally:
                    await response.aclose()
        except _FAILURES as error:
            raise self._error_of(error, f"{method} {path}", timeout_s) from error
        if not is_done:
            raise ProtocolError(f"the stream of {method} {path} ended early", self._url)

    async def aclose(self) -> None:
        """Close the connections, unless they belong to a client that was passed in."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            await transport.aclose()

    def _send(
        self, method: str, path: str, content: str | None, headers: Mapping[str, str]
    ) -> Coroutine[Any, Any, httpx.Response]:
        """Return a coroutine that returns the response, whose body has not been read yet."""
        url = self._url_of(path)
        if self._client is not None:
            request = self._client.build_request(
                method, url, content=content, headers={**headers, **_IDENTITY}, timeout=None
            )
            return self._client.send(request, stream=True)
        if self._transport is None:
            self._transport = make_connection_pool(url, keeps_alive=self._keeps_alive)
        return self._transport.handle_async_request(bare_request(method, url, content, headers))

    def _error_of(self, error: Exception, what: str, timeout_s: float) -> EndpointError:
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return DeadlineError(f"{what} received no answer within {timeout_s:g} s", self._url)
        if isinstance(error, httpx.RemoteProtocolError) and not _DISCONNECTED.search(str(error)):
            return ProtocolError(f"the answer to {what} is not HTTP ({error})", self._url)
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return UnreachableError(f"{what} failed ({cause}): {self._advice_on(error)}", self._url)

    def _advice_on(self, error: Exception) -> str:
        """Return what to do about a call that failed without an answer."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"check that ${CA_VARIABLE} names a PEM file with the CA of the server's certificate, and that the "
                "certificate is valid for the host in the URL"
            )
        if cause is not None:
            return "check that the server has a TLS certificate; otherwise, write http://"
        if isinstance(error, httpx.ReadError) and not self._has_answered:
            if self._url.startswith("http://"):
                return "check that the server is running, and write https:// if it has a TLS certificate"
            return (
                "check that the server is running, and if it was started with --tls-client-ca, that "
                f"${CERTIFICATE_VARIABLE} names a certificate that it accepts"
            )
        return "check that the server is running"

    async def _read(self, response: httpx.Response, max_bytes: int) -> bytes:
        max_bytes = min(max_bytes, self._max_response_bytes)
        if response.status_code != 200:
            max_bytes = min(max_bytes, MAX_ERROR_BYTES)
        parts: list[bytes] = []
        size_bytes = 0
        async for part in self._body_of(response, max_bytes):
            size_bytes += len(part)
            self._check_size(size_bytes, max_bytes)
            parts.append(part)
        return b"".join(parts)

    def _body_of(self, response: httpx.Response, max_bytes: int) -> httpx.AsyncByteStream:
        """Return the body as it arrives. Raises `ProtocolError` if the headers announce compression or excess size."""
        headers = {name.lower(): value for name, value in response.headers.raw}
        encoding = headers.get(b"content-encoding", b"identity").decode(errors="replace")
        if encoding != "identity":
            raise ProtocolError(
                f"the answer has the content-encoding {encoding[:40]!r}, which was not requested", self._url
            )
        length = headers.get(b"content-length", b"0")
        self._check_size(int(length[:20]) if length.isdigit() else 0, max_bytes)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return response.stream

    def _check_size(self, size_bytes: int, max_bytes: int) -> None:
        if size_bytes > max_bytes:
            raise ProtocolError(f"the answer is longer than {max_bytes} bytes", self._url)


def bare_request(method: str, url: httpx.URL, content: str | None, headers: Mapping[str, str]) -> httpx.Request:
    """Return a request with the given headers and those that HTTP requires. httpx takes three times as long."""
    body = b"" if content is None else content.encode()
    pairs = [
        (b"host", url.netloc),
        *((name.encode(), value.encode()) for name, value in {**headers, **_IDENTITY}.items()),
    ]
    if content is not None:
        pairs.append((b"content-length", b"%d" % len(body)))
    return httpx.Request(method, url, headers=pairs, stream=httpx.ByteStream(body))


def checked_url(text: str) -> httpx.URL:
    """Return the URL of a server. Raises an httpx error unless it is an HTTP URL with a host and no user name."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or (url.port or 0) > 65535:
        raise httpx.UnsupportedProtocol("its URL is not of the form http://HOST:PORT")
    return url
