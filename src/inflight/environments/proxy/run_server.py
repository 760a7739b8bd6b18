"""The recording proxy in the event loop of a run: it starts listening when the first episode asks for a URL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.app import ServedEpisodes, proxy_app, proxy_routes
from inflight.http.listening import InLoopServer, bind


class ProxyServer:
    """Serves episodes to agents on loopback while its context is open.

    ``model`` is the name under which the model is listed. ``note`` is called once, if an agent requests sampling
    settings that differ from the run's.
    """

    def __init__(self, model: str, note: Callable[[str], None] | None = None) -> None:
        self._model = model
        self._episodes = ServedEpisodes()
        self._app = proxy_app(proxy_routes(self._episodes, note))
        self._server: InLoopServer | None = None

    async def __aenter__(self) -> ProxyServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.aclose()

    @contextlib.asynccontextmanager
    async def serve(self, episode: PlayingEpisode, role: str = "") -> AsyncIterator[str]:
        """Serve an episode to a role while the context is open, under the base URL that it yields.

        Raises `ConfigError` if the proxy cannot listen.
        """
        if self._server is None:
            self._server = InLoopServer(self._app, bind("127.0.0.1", 0))
        url = await self._server.started()
        with self._episodes.serving(episode, self._model, role) as key:
            yield f"{url}/e/{key}/v1"
