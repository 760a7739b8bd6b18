"""Calls to an engine's own routes, with their deadlines and the engine's error messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from inflight.base.tasks import run_in_background
from inflight.errors import (
    ConfigError,
    DeadlineError,
    EndpointError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    UnauthorizedError,
    UnreachableError,
)
from inflight.http import routes
from inflight.http.bounded_client import BoundedClient

Answer = Coroutine[Any, Any, tuple[int, Any]]

_LIVENESS_S = 0.8
"""Seconds without a response after which the server is asked whether its engine is alive, and the time limit for its
answer.
"""


class EngineRoutes:
    """The routes of the server at ``url``. Every call ends within ``control_timeout_s``, unless it has its own timeout.

    Some calls are never answered if the engine is dead. A call therefore also ends when ``liveness_path`` (see
    `EngineKind`) reports that the engine has died. ``keeps_alive`` is passed to `BoundedClient`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        control_timeout_s: float,
        liveness_path: str | None = None,
        keeps_alive: bool = True,
    ) -> None:
        self.url = url
        self._http = BoundedClient(url, keeps_alive=keeps_alive)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._control_timeout_s = control_timeout_s
        self._liveness_path = liveness_path

    async def get(self, path: str, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Return the JSON object from a GET. Raises `ProtocolError` with the server's message for other responses."""
        status, answer = await self.ask("GET", path, None, timeout_s)
        if status != 200 or not isinstance(answer, dict):
            raise ProtocolError(f"GET {path} answered status {status}: {error_text_of(answer)}", self.url)
        return answer

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return the response to a POST. Raises `ProtocolError` with the server's message if the server refuses it."""
        status, answer = await self.ask("POST", path, body, timeout_s)
        if status != 200:
            raise ProtocolError(f"POST {path} answered status {status}: {error_text_of(answer)}", self.url)
        return answer

    async def request(self, path: str, body: Any, timeout_s: float | None = None) -> Any:
        """Return the response to a user's POST. Raises `InvalidRequestError` if the server calls it invalid."""
        return self.answer_of(path, *await self.ask("POST", path, body, timeout_s))

    def answer_of(self, path: str, status: int, answer: Any) -> Any:
        """Return the response to a user's POST if its status is 200. Raises the same errors as `request`."""
        if status != 200:
            raise self.refusal_of(path, status, answer)
        return answer

    def refusal_of(self, path: str, status: int, answer: Any) -> InflightError:
        """Return the error for a user's POST that the server refused."""
        if status == 400:
            return InvalidRequestError(f"the engine refused the request: {error_text_of(answer)}")
        if status in (401, 403):
            return self._unauthorized(f"POST {path}", status, answer)
        return ProtocolError(f"POST {path} answered status {status}: {error_text_of(answer)}", self.url)

    async def events(
        self,
        path: str,
        body: Any,
        timeout_s: float | None = None,
        refusal_of: Callable[[str, int, Any], Exception] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the decoded server-sent events with which the server answers a user's POST.

        Raises the error that ``refusal_of`` returns for a status other than 200, or for an event that contains an
        error.
        """
        refusal_of = refusal_of or self.refusal_of
        events = self._http.events(
            "POST",
            path,
            content=json.dumps(body),
            headers={"content-type": "application/json", **self._headers},
            timeout_s=self._control_timeout_s if timeout_s is None else timeout_s,
            on_refusal=lambda status, answer: refusal_of(path, status, _decoded(answer)),
        )
        async with contextlib.aclosing(events):
            async for data in events:
                event = _decoded(data)
                if isinstance(error := event.get("error") if isinstance(event, dict) else None, dict):
                    code = error.get("code")
                    raise refusal_of(path, code if isinstance(code, int) else 500, event)
                yield event

    async def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> tuple[int, Any]:
        """Return the status and the response, regardless of the status.

        Raises `UnauthorizedError` if the server refuses the API key.
        """
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        call = self._http.request_json(method, path, body, timeout_s=timeout_s, headers=self._headers)
        if self._liveness_path is not None:
            call = self._while_alive(call, f"{method} {path}", self._liveness_path)
        status, answer = await call
        if status in (401, 403):
            raise self._unauthorized(f"{method} {path}", status, answer)
        return status, answer

    def _unauthorized(self, what: str, status: int, answer: Any) -> UnauthorizedError:
        text = f"{what} was refused with status {status}: {error_text_of(answer)}. "
        return UnauthorizedError(f"{text}Pass the key of the server's --api-key", self.url)

    async def fetch_paths(self) -> Mapping[str, Any]:
        """Return the server's routes by path. Raises `ConfigError` for an inflight server."""
        paths = (await self.get("/openapi.json")).get("paths")
        if not isinstance(paths, dict):
            raise ProtocolError(
                "GET /openapi.json listed no routes: check that the URL is that of the engine's own server", self.url
            )
        if routes.CAPABILITIES.path in paths and routes.WEIGHT_VERSION.path in paths:
            raise ConfigError(f"{self.url} is an inflight server, not the engine's own: use the URL {self.url}")
        return paths

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _while_alive(self, call: Answer, what: str, liveness_path: str) -> tuple[int, Any]:
        async def watch() -> None:
            while True:
                await asyncio.sleep(_LIVENESS_S)
                with contextlib.suppress(DeadlineError, UnreachableError):
                    status, _ = await self._http.request(
                        "GET", liveness_path, timeout_s=_LIVENESS_S, headers=self._headers
                    )
                    if status == 503:
                        raise EndpointError(
                            f"{what} received no answer, and GET {liveness_path} reports that the engine has died: "
                            "restart the server",
                            self.url,
                        )

        async with run_in_background(watch()):
            return await call


def _decoded(content: bytes | bytearray) -> Any:
    """Return the JSON value of a text, or the text if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def error_text_of(answer: Any) -> str:
    """Return the message of an engine's error response in one line."""
    for key in ("error", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:400]
