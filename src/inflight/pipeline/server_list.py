"""Servers that come and go while a run goes on: a file with one URL per line, read again and again.

Knows nothing of publishes, nor of which endpoint gets work: it says who has come and may take part, and who is listed
no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, InflightError
from inflight.pipeline.config import RunConfig
from inflight.pipeline.fleet import connect_fleet, sequence_limits

_ASK_S = 2.0
"""How long a server that is new in the list may take to answer, and the first pause before it is asked again."""
_MAX_PAUSE_S = 30.0
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """A server that is new in the list and may take part."""

    url: str
    endpoint: InferenceEndpoint
    max_concurrent: int


@dataclass(slots=True)
class _Line:
    """One server of the list."""

    url: str
    has_arrived: bool = False
    ask_at: float = 0.0
    pause_s: float = _ASK_S


class ServerList:
    """The servers that ``path`` lists, beside those with names in ``fixed``. ``note`` takes each problem once."""

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        vocab_size: int,
        token: str,
        fixed: Collection[str],
        note: Callable[[str], None],
    ) -> None:
        self._path = path
        self._config = config
        self._vocab_size = vocab_size
        self._token = token
        self._fixed = frozenset(fixed)
        self._note = note
        self._lines: dict[str, _Line] = {}
        self._leaving: set[str] = set()
        self._told: set[str] = set()

    async def look(self) -> tuple[list[Arrival], list[str]]:
        """Read the list; returns who has come and may take part, and the names of those that are listed no more.

        Who does not answer, or cannot take part, is asked again later. A file that cannot be read changes nothing.
        """
        listed = self._read()
        if listed is None:
            return [], []
        gone = [name for name in self._lines if name not in listed]
        left = [name for name in gone if self._lines.pop(name).has_arrived]
        self._leaving.update(left)
        for name, url in listed.items():
            if name not in self._lines and name not in self._leaving:
                self._lines[name] = _Line(url)
        due = [line for line in self._lines.values() if not line.has_arrived and line.ask_at <= time.monotonic()]
        arrivals = await asyncio.gather(*(self._ask(line) for line in due))
        return [arrival for arrival in arrivals if arrival is not None], left

    def forget(self, name: str) -> None:
        """Note that a server that was listed no more has left; a line of it that comes back is a new one."""
        self._leaving.discard(name)

    def _read(self) -> dict[str, str] | None:
        """Return the URLs that the file lists by the names of their endpoints; None if it cannot be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
        except OSError as error:
            self._tell(
                f"servers.urls_file {str(self._path)!r} cannot be read: {error.strerror}; the fleet stays as it is"
            )
            return None
        listed: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            url = line.partition("#")[0].strip()
            if not url:
                continue
            try:
                name = connect_endpoint(url).name
            except ConfigError as error:
                self._tell(f"line {number} of {str(self._path)!r} is left out: {error}")
            else:
                if name not in self._fixed:
                    listed.setdefault(name, url)
        return listed

    async def _ask(self, line: _Line) -> Arrival | None:
        """Return the server of a line if it answers and may take part; else it is asked again later."""
        (endpoint,) = connect_fleet(self._config, [line.url], self._token)
        try:
            async with asyncio.timeout(_ASK_S):
                wanted = {endpoint: self._config.servers.max_concurrent}
                limits = await sequence_limits(self._config, self._vocab_size, wanted)
        except (TimeoutError, InflightError) as error:
            await endpoint.aclose()
            why = str(error) or f"{endpoint.name}: did not answer within {_ASK_S:g} s"
            self._tell(f"a server of {str(self._path)!r} cannot take part yet: {why}")
            line.ask_at = time.monotonic() + line.pause_s
            line.pause_s = min(2 * line.pause_s, _MAX_PAUSE_S)
            return None
        line.has_arrived = True
        return Arrival(line.url, endpoint, limits[endpoint])

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)
