"""The URLs of an episode: one for each role played by clients of OpenAI's API, served until the episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from inflight.base.tasks import TaskOwner


class RoleUrls:
    """Serves each role from its first use on, under one URL. Belongs to one event loop."""

    def __init__(self) -> None:
        self._urls: dict[str, asyncio.Future[str]] = {}
        self._is_over = asyncio.Event()
        self._serving = TaskOwner()

    async def url(self, role: str, proxy: Callable[[], AbstractAsyncContextManager[str]]) -> str:
        """Return the URL of a role. If ``proxy`` cannot serve the role, its error is raised."""
        if role not in self._urls:
            self._urls[role] = asyncio.get_running_loop().create_future()
            self._serving.start(self._serve(proxy(), self._urls[role]))
        return await self._urls[role]

    async def aclose(self) -> None:
        """Stop serving all roles, and wait until that is complete."""
        self._is_over.set()
        await self._serving.aclose(wait_s=None)

    async def _serve(self, proxy: AbstractAsyncContextManager[str], served: asyncio.Future[str]) -> None:
        try:
            async with proxy as url:
                served.set_result(url)
                await self._is_over.wait()
        except Exception as error:
            if served.done():
                raise
            served.set_exception(error)
