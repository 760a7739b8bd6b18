"""Servers that a command starts: real processes, reached over HTTP, that are killed, stopped and disconnected.

They are judged by the contract alone. They keep running from one schedule to the next, and are restarted only if a
fault killed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from inflight.base.tasks import cancel_and_wait, start
from inflight.conformance.endpoint.opening import open_target
from inflight.conformance.fleet.palette import FROZEN, Palette, Shade, make_checkpoint
from inflight.conformance.fleet.plan import OUTSIDE, Kind
from inflight.conformance.fleet.servers import Call, Loop, Testbed, TestedServer
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.tcp_proxy import TcpProxy
from inflight.errors import ConfigError, PoisonedError, UnreachableError
from inflight.http.client import HttpEndpoint
from inflight.wire import GenerateRequest, SamplingParams

T = TypeVar("T")

_START_S = 300.0
"""Time limit for starting a server: engines that compile at start take minutes on a busy machine."""
_CONTROL_S = 10.0
_GENERATE_S = 60.0
_BASE_SCALE = 2.0
"""Factor for deadlines. These were chosen for servers in one process, whereas here several processes share the
cores."""
_NUM_PROBED = 8


class ServedServer(TestedServer):
    """A server behind its own proxy, whose port stays the same when the server restarts."""

    def __init__(self, name: str, testbed: ServedTestbed) -> None:
        self.name = name
        self._testbed = testbed
        self._proxy = TcpProxy("127.0.0.1", 0)
        self._process: tuple[contextlib.AsyncExitStack, subprocess.Popen[bytes]] | None = None
        self._endpoint: HttpEndpoint
        self._coming_back: asyncio.Task[None] | None = None
        self._num_probes = 0
        self.is_up = False
        self.begin()

    def begin(self) -> None:
        self.num_starts = int(self.is_up)
        self.num_breaks = 0
        self.is_gone = self.was_torn = False
        self._problems: list[str] = []

    @property
    def _status(self) -> int | None:
        """Exit status of the server's process; None if it is running or was killed by a fault."""
        return None if self._process is None else self._process[1].poll()

    async def start(self) -> None:
        """Start a process unless one is alive. Raises `ConfigError` if the command does not start a server."""
        if self._status is not None:
            await self.kill(None)
        if self._process is not None:
            return
        testbed, stack = self._testbed, contextlib.AsyncExitStack()
        target = EndpointTarget(command=testbed.command)
        found = await stack.enter_async_context(open_target(target, testbed.model, testbed.directory, testbed.start_s))
        assert found.process is not None
        if not self._proxy.port:
            await self._proxy.start()
        self._proxy.target = ("127.0.0.1", urlsplit(found.url or "").port or 0)
        url = f"http://127.0.0.1:{self._proxy.port}"
        scale = testbed.scale
        self._endpoint = HttpEndpoint(
            url, token=found.token, control_timeout_s=_CONTROL_S * scale, generate_timeout_s=_GENERATE_S * scale
        )
        stack.push_async_callback(self._endpoint.aclose)
        self._process, self.is_up = (stack, found.process), True
        self.num_starts += 1
        self.num_breaks += 1

    async def deliver(self, call: Call[T]) -> T:
        if self._process is None:
            raise UnreachableError("the server is down", self.name)
        try:
            return await call(self._endpoint)
        except PoisonedError:
            self.was_torn = True
            raise

    async def inject(self, kind: Kind, seconds: float) -> None:
        if kind is Kind.DISCONNECT:
            self.num_breaks += 1
            self._proxy.cut()
        elif self._process is not None:
            process_group = self._process[1].pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_group, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                os.killpg(process_group, signal.SIGCONT)

    async def kill(self, back_after_s: float | None) -> None:
        status, running, self._process, self.is_up = self._status, self._process, None, False
        self.is_gone = self.is_gone or back_after_s is None
        if running is None:
            return
        stack, process = running
        self.num_breaks += 1
        if back_after_s is not None:
            self._coming_back = start(self._come_back(back_after_s))
        if status is not None:
            self._problems.append(f"its process ended unexpectedly with status {status}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await stack.aclose()

    async def back(self) -> None:
        if self._coming_back is not None:
            await asyncio.wait([self._coming_back])

    async def shade(self) -> Shade | None:
        self._num_probes += 1
        request = GenerateRequest(
            request_id=f"{self.name}-probe-{self._num_probes}",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=_NUM_PROBED, ignore_eos=True),
        )
        found = (await self.deliver(lambda endpoint: endpoint.generate(request))).completions[0]
        return self._testbed.shades.shade_of(found.token_ids, found.logprobs)

    def may_have_held(self, shade: Shade) -> bool:
        return True

    def problems(self) -> Sequence[str]:
        died = [] if self._status is None else [f"its process ended unexpectedly with status {self._status}"]
        return [*self._problems, *died]

    async def aclose(self) -> None:
        if self._coming_back is not None:
            await cancel_and_wait(self._coming_back)
        await self.kill(None)
        await self._proxy.aclose()

    async def _come_back(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            if not self.is_gone:
                await self.start()
        except ConfigError as error:
            self.is_gone = True
            self._problems.append(f"it did not restart: {error}")


class ServedTestbed(Testbed):
    """Servers that ``command`` starts, with ``{model}``, ``{port}`` and ``{token_file}`` filled in.

    A context manager that starts the servers on entry, and raises `ConfigError` if they do not start.
    ``report_progress`` receives lines that report progress.
    """

    def __init__(
        self, command: str, num_servers: int, deadline_scale: float, report_progress: Callable[[str], None]
    ) -> None:
        self.command = command
        self.num_servers = num_servers
        self.scale = _BASE_SCALE * deadline_scale
        self.start_s = _START_S * deadline_scale
        self.kinds = OUTSIDE
        self._report_progress = report_progress
        self.directory = Path(tempfile.mkdtemp(prefix="inflight-fleet-"))
        self.model = self.directory / "model"
        self.loop = Loop()
        self._servers: list[ServedServer] = []

    def __enter__(self) -> ServedTestbed:
        try:
            like = make_checkpoint(self.model)
            self._servers = [ServedServer(f"server-{i}", self) for i in range(self.num_servers)]
            self._start_all()
            self.capabilities = self.loop.run(self._servers[0].deliver(lambda endpoint: endpoint.capabilities()))
            dtype: torch.dtype = getattr(torch, self.capabilities.dtype)
            self.shades = Palette({name: tensor.to(dtype) for name, tensor in like.items()}, 0, FROZEN)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            with contextlib.suppress(TimeoutError):
                self.loop.run(server.aclose())
        self.loop.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def palette(self, seed: int, frozen: tuple[str, ...]) -> Palette:
        """Return the same palette for every schedule.

        When a schedule begins, the servers still serve weights of the previous schedule, and the palette must contain
        these weights.
        """
        return self.shades

    @contextlib.contextmanager
    def servers(self, palette: Palette, frozen: tuple[str, ...]) -> Iterator[Sequence[TestedServer]]:
        if frozen:  # engines forget the values that an earlier schedule sent, and refuse updates without them
            for server in self._servers:
                self.loop.run(server.kill(None))
        self._start_all()
        for server in self._servers:
            server.begin()
        yield self._servers

    def _start_all(self) -> None:
        if down := [server for server in self._servers if not server.is_up]:
            self._report_progress(f"starting {' and '.join(server.name for server in down)}")
        started = [self.loop.start(server.start()) for server in self._servers]
        for one in started:
            one.result(self.start_s + 30.0)
