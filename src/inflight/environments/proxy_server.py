"""The recording proxy in the event loop of a run: it listens from the first episode that asks for a URL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy import ServedEpisodes, proxy_app, proxy_routes
from inflight.errors import InflightError
from inflight.http.serving import bind

_PARTING_S = 2
"""How long answers that are on their way may take once the proxy ends."""


class ProxyServer:
    """Serves episodes to agents on loopback, as long as its context is open.

    ``model`` is the name under which the model is listed. ``note`` is told, once, that an agent asks for other sampling
    than the run's.
    """

    def __init__(self, model: str, note: Callable[[str], None] | None = None) -> None:
        self._model = model
        self._episodes = ServedEpisodes()
        self._app = proxy_app(proxy_routes(self._episodes, note))
        self._listening: asyncio.Future[str] | None = None
        self._server: InLoopServer | None = None

    async def __aenter__(self) -> ProxyServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.aclose()

    @contextlib.asynccontextmanager
    async def serve(self, episode: PlayingEpisode, role: str = "") -> AsyncIterator[str]:
        """Serve an episode to a role during the body, under the base URL that is returned. Raises `ConfigError`."""
        if self._server is None:
            self._server = InLoopServer(self._app, bind("127.0.0.1", 0))
        url = await self._server.started()
        with self._episodes.serving(episode, self._model, role) as key:
            yield f"{url}/e/{key}/v1"


class InLoopServer:
    """A uvicorn server in the running event loop, which leaves signals to others."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_PARTING_S,
            ws="none",
        )
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._started = asyncio.Event()
        self._server = _Uvicorn(config, self._started)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))

    async def started(self) -> str:
        """Return the URL once it answers. Raises `InflightError` if it has ended."""
        starting = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({starting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
        if self._serving.done():
            raise InflightError(f"the server for agents at {self.url} has ended")
        return self.url

    async def aclose(self) -> None:
        """End it, with what it still answers."""
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: asyncio.Event) -> None:
        super().__init__(config)
        self._is_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self._is_started.set()
