"""Calls on an engine's own routes: their deadlines, and the engine's words where it refuses. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any

from inflight.errors import DeadlineError, EndpointError, ProtocolError, UnauthorizedError, UnreachableError
from inflight.http.connection import HttpConnection

Answer = Coroutine[Any, Any, tuple[int, Any]]

_LIVENESS_S = 0.8
"""How long an answer is waited for before the server is asked whether its engine lives, and so long for that one."""


class EngineRoutes:
    """The routes of the server at ``url``. Every call ends within ``control_timeout_s``, unless it is given its own.

    A call ends early too when ``liveness_path``, as in `EngineKind`, answers that the engine has died: it never answers
    some calls then. ``keeps_alive`` as in `HttpConnection`.
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
        self._http = HttpConnection(url, keeps_alive=keeps_alive)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._control_timeout_s = control_timeout_s
        self._liveness_path = liveness_path

    async def get(self, path: str, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Return the JSON object of a GET. Raises `ProtocolError` with the server's words for any other answer."""
        status, answer = await self.ask("GET", path, None, timeout_s)
        if status != 200 or not isinstance(answer, dict):
            raise ProtocolError(f"GET {path} answered status {status}: {words_of(answer)}", self.url)
        return answer

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return what a POST answers. Raises `ProtocolError` with the server's words if it refuses."""
        status, answer = await self.ask("POST", path, body, timeout_s)
        if status != 200:
            raise ProtocolError(f"POST {path} answered status {status}: {words_of(answer)}", self.url)
        return answer

    async def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> tuple[int, Any]:
        """Return status and answer, whatever the status; `UnauthorizedError` if the key is refused."""
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        call = self._http.ask(method, path, body, timeout_s=timeout_s, headers=self._headers)
        if self._liveness_path is not None:
            call = self._while_alive(call, f"{method} {path}", self._liveness_path)
        status, answer = await call
        if status in (401, 403):
            raise UnauthorizedError(
                f"{method} {path} was refused with status {status}: {words_of(answer)}. Give --api-key's key", self.url
            )
        return status, answer

    async def offered(self) -> Mapping[str, Any]:
        """Return the routes that the server offers, by their paths."""
        paths = (await self.get("/openapi.json")).get("paths")
        if not isinstance(paths, dict):
            raise ProtocolError("GET /openapi.json answered no routes: is this the engine's own server?", self.url)
        return paths

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        await self._http.aclose()

    async def _while_alive(self, call: Answer, what: str, liveness_path: str) -> tuple[int, Any]:
        asking = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asking}, timeout=_LIVENESS_S))[0]:
                with contextlib.suppress(DeadlineError, UnreachableError):
                    status, _ = await self._http.exchange(
                        "GET", liveness_path, timeout_s=_LIVENESS_S, headers=self._headers
                    )
                    if status == 503:
                        raise EndpointError(
                            f"{what} has no answer, and GET {liveness_path} says that the engine has died", self.url
                        )
            return asking.result()
        finally:
            asking.cancel()


def words_of(answer: Any) -> str:
    """Return what an engine says in an answer that is no success, in one line."""
    for key in ("error", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:400]
