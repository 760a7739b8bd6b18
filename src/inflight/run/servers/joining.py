"""The HTTP route at which servers join a run and leave it, protected by the run's token.

A server renews its registration repeatedly. It is no longer listed once it stops doing so or announces its departure.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inflight.base.validation import describe_problems
from inflight.errors import ConfigError
from inflight.http.joining import JOIN_PATH, RENEW_S, JoinAnswer, JoinRequest
from inflight.http.kinds import connect_endpoint
from inflight.http.listening import InLoopServer, bind
from inflight.http.tokens import carries_token

_SILENT_S = 4 * RENEW_S
_FORGOTTEN_S = 600.0
_MAX_BODY_BYTES = 4096


@dataclass(slots=True)
class _JoinedServer:
    url: str
    renewed: float
    has_left: bool = False


def host_and_port(at: str) -> tuple[str, int]:
    """Return the host and port of ``servers.attach.join``. Raises `ConfigError` if it has any other form."""
    host, _, port = at.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"servers.attach.join {at!r} is not HOST:PORT, such as 10.0.0.1:8100")
    return host.strip("[]"), int(port)


class JoinServer:
    """Lists the servers that have joined. ``at`` is HOST:PORT on loopback or a private network."""

    def __init__(
        self,
        at: str,
        token: str,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._at = at
        self._token = token
        self._run_id = run_id
        self._clock = clock
        self._tls = tls
        self._joined: dict[str, _JoinedServer] = {}
        self._server: InLoopServer | None = None

    async def open(self) -> str:
        """Listen, and return the URL. Raises `ConfigError` if the address cannot be used."""
        listener = bind(*host_and_port(self._at), "choose another address for servers.attach.join")
        app = Starlette(routes=[Route(JOIN_PATH, self._answer, methods=["POST", "DELETE"])])
        self._server = InLoopServer(app, listener, self._tls)
        return await self._server.started()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.aclose()

    def listed(self) -> dict[str, str]:
        """Return the URLs of the servers that are registered, by endpoint name."""
        now = self._clock()
        return {name: it.url for name, it in self._joined.items() if not it.has_left and now - it.renewed < _SILENT_S}

    def hands_on(self, name: str) -> bool:
        """Return whether a server has announced its departure, so that its requests can continue elsewhere."""
        return name in self._joined and self._joined[name].has_left

    async def _answer(self, request: Request) -> Response:
        if not carries_token(request.headers.get("authorization", ""), self._token):
            return _refusal(401, "the token is missing or wrong: set INFLIGHT_TOKEN to the token of the run")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                return _refusal(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
        try:
            joining = JoinRequest.model_validate_json(body)
            name = connect_endpoint(joining.url).name
        except ValidationError as error:
            return _refusal(400, describe_problems(error, JoinRequest))
        except ConfigError as error:
            return _refusal(400, str(error).splitlines()[0])
        leaves, now = request.method == "DELETE", self._clock()
        self._joined = {other: it for other, it in self._joined.items() if now - it.renewed < _FORGOTTEN_S}
        self._joined[name] = _JoinedServer(joining.url, now, has_left=leaves)
        return JSONResponse(JoinAnswer(run_id=self._run_id).model_dump())


def _refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": {"message": why}}, status_code=status)
