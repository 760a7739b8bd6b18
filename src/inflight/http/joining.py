"""A server's membership in a run: it announces its URL periodically, and deregisters before it leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, EndpointError, InflightError
from inflight.http.bounded_client import BoundedClient
from inflight.wire.fields import usable_url

JOIN_PATH = "/v1/servers"
RENEW_S = 2.0
"""Interval in seconds at which a server announces itself."""
_ANSWER_S = 10.0
_IDLE_POLL_S = 0.1
_TAKEN_BACK_S = 1.5
"""How long, in seconds, the run may take to notice that a server is leaving; the run checks twice a second."""


class JoinRequest(BaseModel):
    """The message that a server sends when it joins or leaves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(max_length=2048), AfterValidator(usable_url)]
    """The URL at which the run reaches the server."""


class JoinAnswer(BaseModel):
    """The run's response."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """The run that a server joins, and how it leaves."""

    run_url: str
    grace_s: float
    """How long, in seconds, the run may take to reclaim the server's requests once the server is asked to stop."""
    own_url: str | None
    """The URL at which the run reaches the server; None for the URL at which it listens."""
    note: Callable[[str], None]
    """Receives a line when the server joins, and when no run answers."""


class Membership:
    """A server's membership in a run. The server listens at ``url``."""

    def __init__(self, settings: JoinSettings, token: str, url: str) -> None:
        self._run = BoundedClient(settings.run_url)
        self._run_url = settings.run_url
        self._headers = {"authorization": f"Bearer {token}"}
        self._url = settings.own_url or url
        self._grace_s = settings.grace_s
        self._note = settings.note

    async def renew(self) -> None:
        """Join, and renew the membership until cancelled. If the run does not answer, keep trying.

        Raises `ConfigError` if the run refuses.
        """
        was_there: bool | None = None
        while True:
            is_there = False
            with contextlib.suppress(EndpointError):
                is_there = await self._announce("POST")
            if is_there is not was_there:
                self._note(f"joined the run at {self._run_url}" if is_there else f"no run answers at {self._run_url}")
            was_there = is_there
            await asyncio.sleep(RENEW_S)

    async def leave(self, endpoint: InferenceEndpoint) -> None:
        """Deregister, and return once no request is running on the endpoint or the grace period is over."""
        with contextlib.suppress(InflightError, TimeoutError):
            async with asyncio.timeout(self._grace_s):
                if await self._announce("DELETE"):
                    self._note("left the run, which reclaims this server's running requests")
                await asyncio.sleep(_TAKEN_BACK_S)
                while (await endpoint.weight_version()).num_running:  # noqa: ASYNC110 - another process runs it
                    await asyncio.sleep(_IDLE_POLL_S)

    async def aclose(self) -> None:
        await self._run.aclose()

    async def _announce(self, method: str) -> bool:
        body = JoinRequest(url=self._url).model_dump()
        status, answer = await self._run.request_json(
            method, JOIN_PATH, body, timeout_s=_ANSWER_S, headers=self._headers
        )
        if status != 200:
            raise ConfigError(f"the run at {self._run_url} refused {self._url} with status {status}: {answer}")
        return True
