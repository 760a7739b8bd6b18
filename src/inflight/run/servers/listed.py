"""Servers that join and leave during a run, through a file that lists them or by themselves."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.base.backoff import Backoff
from inflight.base.tasks import run_together
from inflight.errors import ConfigError, InflightError
from inflight.run.config import RunConfig
from inflight.run.servers.checks import read_server_list
from inflight.run.servers.joining import JoinServer
from inflight.run.servers.membership import FleetMembership

_LOOK_AGAIN_S = 0.5
"""How often the list of servers is read."""
_ASK_S = 2.0
"""How long a newly listed server may take to answer at first, and the first pause before it is asked again."""
_MAX_ASK_S = 10.0
"""The upper limit of that time, which doubles after each missed answer, because a server may be busy."""
_MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class _Line:
    url: str
    backoff: Backoff = field(default_factory=lambda: Backoff(_ASK_S, _MAX_PAUSE_S))
    patience_s: float = field(default_factory=lambda: _ASK_S)
    takes_part: bool = False


class ListedServers:
    """Lets servers take part while they are listed, and retires those that are no longer listed."""

    def __init__(self, config: RunConfig, membership: FleetMembership, note: Callable[[str], None]) -> None:
        self._config = config
        self._membership = membership
        self._note = note
        self._note_once = functools.cache(note)
        self._lines: dict[str, _Line] = {}
        """Known servers by endpoint name."""
        self._desk: JoinServer | None = None
        """The HTTP server through which servers join, with ``servers.attach.join``."""

    async def open(self, desk: JoinServer) -> str:
        """Open the HTTP server through which servers join, and return its URL. Raises `ConfigError`."""
        self._desk = desk
        return await desk.open()

    async def close(self) -> None:
        if self._desk is not None:
            await self._desk.close()

    async def wait_for_the_first(self) -> None:
        """Let the listed servers take part; if there are no other servers, wait for one of them.

        Raises `ConfigError` if none can take part in time.
        """
        timeout_s = self._config.run.start_timeout_s
        deadline = time.monotonic() + timeout_s
        await self._look()
        while not self._membership.taking_part:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no server of {self._where} could take part within {timeout_s:g} s; raise run.start_timeout_s to "
                    "wait longer"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)
            await self._look()

    async def follow(self) -> None:
        """Follow the list until cancelled."""
        while True:
            for name in await self._look():
                self._note(f"{name} joins with the next update")
            await asyncio.sleep(_LOOK_AGAIN_S)

    @property
    def _where(self) -> str:
        """The settings that list servers, as text."""
        attach = self._config.servers.attach
        settings = {"urls_file": attach.urls_file, "join": attach.join}
        return " or ".join(f"servers.attach.{key} {str(it)!r}" for key, it in settings.items() if it is not None)

    def _listed(self) -> dict[str, str] | None:
        """Return the URLs of listed and joined servers, by endpoint name; None if the file cannot be read."""
        listed: dict[str, str] | None = {}
        if self._config.servers.attach.urls_file is not None:
            listed, problems = read_server_list(self._config.servers.attach.urls_file)
            for problem in problems:
                self._note_once(problem)
        if listed is not None and self._desk is not None:
            listed |= self._desk.listed()
        return listed

    async def _look(self) -> list[str]:
        """Retire servers that are no longer listed and contact new ones; return the names of those that have joined.

        A server that does not answer or cannot take part is retried later. An unreadable file changes nothing.
        """
        listed = self._listed()
        if listed is None:
            return []
        for name in self._lines.keys() - listed.keys():
            if self._lines.pop(name).takes_part:
                hands_on = self._desk is not None and self._desk.hands_on(name)
                how = (
                    ("is handing on its partial completions and leaving")
                    if hands_on
                    else "will leave once its groups have ended"
                )
                self._note(f"{name} is no longer listed: it {how}")
                self._membership.retire(name, hands_on=hands_on)
        present = {endpoint.name for endpoint in self._membership.taking_part}  # includes those that are leaving
        for name in [name for name in listed if name not in present]:
            self._lines.setdefault(name, _Line(listed[name]))
        now = time.monotonic()
        due = [line for line in self._lines.values() if not line.takes_part and line.backoff.is_due(now)]
        came = await run_together(*(self._ask(line) for line in due))
        return [name for name in came if name is not None]

    async def _ask(self, line: _Line) -> str | None:
        """Let the server of a line take part, and return its name; None if it does not answer or cannot take part."""
        endpoint = self._membership.connect(line.url)
        try:
            async with asyncio.timeout(line.patience_s):
                can = await self._membership.check(endpoint)
        except (TimeoutError, InflightError) as error:
            await endpoint.aclose()
            why = str(error) or f"{endpoint.name} did not answer within {line.patience_s:g} s"
            if isinstance(error, TimeoutError):
                line.patience_s = min(2 * line.patience_s, _MAX_ASK_S)
            self._note_once(f"a server of {self._where} cannot take part yet: {why}")
            line.backoff.next(time.monotonic())
            return None
        line.takes_part = True
        self._membership.add(endpoint, line.url, self._config.servers.slots_of_joining, can)
        return endpoint.name
