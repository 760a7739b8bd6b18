"""Calls on one SGLang server's own routes: their deadlines, and SGLang's words where it refuses. Knows no contract."""

from __future__ import annotations

from typing import Any

from inflight.errors import ProtocolError, UnauthorizedError
from inflight.http.connection import HttpConnection


class SglangRoutes:
    """The routes of the server at ``url``. Every call ends within ``control_timeout_s``, unless it is given its own."""

    def __init__(self, url: str, *, api_key: str | None, control_timeout_s: float) -> None:
        self.url = url
        self._http = HttpConnection(url)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._control_timeout_s = control_timeout_s

    async def get(self, path: str) -> Any:
        """Return the JSON of a GET. Raises `ProtocolError` for an answer that is none."""
        status, answer = await self.ask("GET", path)
        if status != 200 or not isinstance(answer, dict):
            raise ProtocolError(f"GET {path} answered status {status}: {words_of(answer)}; is it SGLang?", self.url)
        return answer

    async def post(self, path: str, body: Any, timeout_s: float | None = None) -> Any:
        """Return what a POST answers. Raises `ProtocolError` with SGLang's words if it refuses."""
        status, answer = await self.ask("POST", path, body, timeout_s)
        if status != 200:
            raise ProtocolError(f"POST {path} answered status {status}: {words_of(answer)}", self.url)
        return answer

    async def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> tuple[int, Any]:
        """Return status and answer, whatever the status; `UnauthorizedError` if the key is refused."""
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        status, answer = await self._http.ask(method, path, body, timeout_s=timeout_s, headers=self._headers)
        if status in (401, 403):
            raise UnauthorizedError(f"{method} {path} was refused with status {status}: give --api-key's key", self.url)
        return status, answer

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        await self._http.aclose()


def words_of(answer: Any) -> str:
    """Return what SGLang says in an answer that is no success, in one line."""
    found = answer
    for key in ("error", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:400]
