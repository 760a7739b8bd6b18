"""Servers that outlive their run for a while, and are reused when the run is resumed (``servers.lease_s``).

A server whose run has ended keeps its weights, caches and histories as long as a client with its token calls it within
the lease. Only processes on this machine can outlive their run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

from inflight.base.tasks import cancel_and_wait, start
from inflight.contracts import InferenceEndpoint
from inflight.errors import InflightError
from inflight.http.kinds import connect_endpoint
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers import Launched, ProcessEnd
from inflight.run.config import RunConfig

_BEAT_S = 0.5
_ASK_S = 5.0
_PATIENCE_S = 15.0
"""A server that has not answered for this long is considered to have ended."""


class LeasedServer(Launched):
    """A server that an earlier process of this run started. Each call renews its lease."""

    def __init__(self, url: str, pid: int, endpoint: InferenceEndpoint) -> None:
        self.url = url
        self._pid = pid
        self._endpoint = endpoint
        self._ended: ProcessEnd | None = None
        self._watching = start(self._watch())

    @property
    def address(self) -> str:
        return str(urlsplit(self.url).hostname)

    @property
    def ended(self) -> ProcessEnd | None:
        return self._ended

    async def wait(self) -> ProcessEnd:
        return await asyncio.shield(self._watching)

    async def ready(self) -> str | None:
        return json.dumps({"url": self.url, "pid": self._pid})

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def stop(self, patience_s: float) -> None:
        if self._ended is None:
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._wait_until_gone()
            self.send_signal(signal.SIGKILL)
            self._ended = ProcessEnd(None, cause="the run has stopped the server")
            await cancel_and_wait(self._watching)
        await self._endpoint.aclose()

    async def _wait_until_gone(self) -> None:
        while _is_alive(self._pid):  # noqa: ASYNC110 - it is not a child process, so nothing reports its end
            await asyncio.sleep(0.05)

    async def _watch(self) -> ProcessEnd:
        answered = time.monotonic()
        while _is_alive(self._pid) and time.monotonic() - answered < _PATIENCE_S:
            with contextlib.suppress(InflightError, TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    await self._endpoint.weight_version()
                answered = time.monotonic()
            await asyncio.sleep(_BEAT_S)
        self._ended = ProcessEnd(
            None, cause=f"the server was started by an earlier process of this run; {self.url} no longer answers"
        )
        return self._ended


async def reconnect_leased_server(ready_file: Path, token: str, run_id: str) -> LeasedServer | None:
    """Return the server that wrote the ready file, if it still serves the weights of the run; otherwise None."""
    said = _read_ready_file(ready_file)
    if said is None:
        return None
    url, pid = said
    endpoint = connect_endpoint(url, token=token)
    with contextlib.suppress(InflightError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            if (await endpoint.weight_version()).run_id == run_id:
                return LeasedServer(url, pid, endpoint)
    await endpoint.aclose()
    return None


def _read_ready_file(ready_file: Path) -> tuple[str, int] | None:
    """Return the URL and process id of the server that wrote a ready file, or None if it has ended."""
    try:
        said = json.loads(ready_file.read_text())
        url, pid = str(said["url"]), int(said["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (url, pid) if _is_alive(pid) else None


def token_of(config: RunConfig, directory: Path) -> str:
    """Return the control token of a run: from the environment, or else a new one. Servers with a lease keep their
    token.
    """
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    return load_or_store_token(directory, token) if config.servers.lease_s else token


def load_or_store_token(directory: Path, token: str) -> str:
    """Return the token that an earlier process of the run stored for its servers, or store and return this one.

    Only the user can read the file.
    """
    path = directory / "token"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as file:
        file.write(token + "\n")
    return token


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # this system has no /proc
        return True
