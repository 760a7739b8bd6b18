"""The same with real servers: processes of ``inflight serve`` behind TCP proxies, killed, stopped and cut off.

There is no looking into their models: which weights they sample from is told by the logprobs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from inflight.conformance.chaos.palette import VOCAB_SIZE, Palette, Shade
from inflight.conformance.chaos.plan import TRANSPORTS
from inflight.conformance.chaos.proxy import Rule, TcpProxy
from inflight.conformance.chaos.servers import Fleet
from inflight.conformance.chaos.trainer import BUCKET_BYTES, CLEAN_UP_S, ShadeSource
from inflight.errors import InflightError, PublishError
from inflight.http.client import HttpEndpoint
from inflight.types import Outcome, PublishReport
from inflight.weights.publish import publish_weights
from inflight.weights.publisher import WeightPublisher
from inflight.weights.transports import make_sender
from inflight.wire import (
    BucketTransfer,
    EndpointState,
    GenerateRequest,
    SamplingParams,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

_TOKEN = "chaos"
_START_S = 90.0
_DEADLINE_S = 2.0
_FINAL_DEADLINE_S = 20.0
_HTTP_SLACK_S = 2.0  # of processes that share cores
STAGES = ("request", "receive", "commit")
ACTS = ("kill", "stop", "cut", "delay", "swallow")


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to server ``index`` when the trainer comes to ``stage`` of its publish number ``publish``."""

    act: str
    stage: str
    index: int
    publish: int


class ServerProcess:
    """A server of ``checkpoint`` behind a proxy of its own."""

    def __init__(self, checkpoint: Path, directory: Path, index: int, fleet: Fleet) -> None:
        self.is_killed = False
        self.is_stopped = False
        self._fleet = fleet
        self._ready = directory / f"ready-{index}.json"
        command = [sys.executable, "-m", "inflight", "serve", str(checkpoint), "--port", "0", "--exit-with-stdin"]
        command += ["--ready-file", str(self._ready), "--threads", "1", "--name", "chaos"]
        self._log = (directory / f"log-{index}.txt").open("w")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "INFLIGHT_TOKEN": _TOKEN, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.proxy: TcpProxy
        self.url = ""

    def wait_until_ready(self) -> None:
        """Return once it serves, and its proxy listens. Raises ``TimeoutError``."""
        deadline = time.monotonic() + _START_S
        while not self._ready.exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError("a server did not start")
            time.sleep(0.05)
        self.proxy = TcpProxy("127.0.0.1", urlsplit(json.loads(self._ready.read_text())["url"]).port or 0)
        self._fleet.run(self.proxy.start())
        self.url = f"http://127.0.0.1:{self.proxy.port}"

    def strike(self, act: str) -> None:
        """Have something happen to it."""
        if act == "kill":
            self.is_killed = True
            self.process.kill()
        elif act == "stop":
            self.is_stopped = True
            self.process.send_signal(signal.SIGSTOP)
        elif act == "cut":
            self._fleet.loop.call_soon_threadsafe(self.proxy.cut)
        elif act == "delay":
            self.proxy.rule = Rule(delay_s=0.2)
        else:
            self.proxy.rule = Rule(is_blackhole=True)

    def heal(self) -> None:
        """Undo what can be undone. What was swallowed is lost, and so are the connections it was swallowed on."""
        self.proxy.rule = Rule()
        if self.is_stopped:
            self.process.send_signal(signal.SIGCONT)
            self.is_stopped = False
        self._fleet.loop.call_soon_threadsafe(self.proxy.cut)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(10)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log.close()
        if self.url:
            self._fleet.run(self.proxy.aclose())


class _Struck(HttpEndpoint):
    """A server over HTTP, to which something happens at a stage, as the trainer comes to it."""

    def __init__(self, server: ServerProcess, on_stage: Callable[[str], None]) -> None:
        super().__init__(server.url, token=_TOKEN, control_timeout_s=5.0)
        self._on_stage = on_stage

    async def request_weight_update(self, update: WeightUpdate) -> None:
        self._on_stage("request")
        await super().request_weight_update(update)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        if bucket.bucket_index == 1:
            self._on_stage("receive")
        await super().receive_weights(bucket)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        self._on_stage("commit")
        return await super().commit_weight_update(ref)


def run_process_schedule(seed: int, checkpoint: Path, palette: Palette, fleet: Fleet) -> list[str]:
    """Run a schedule of three real servers; return what was wrong."""
    random_ = random.Random(f"processes {seed}")
    strikes = [
        Strike(ACTS[(seed + i) % len(ACTS)], STAGES[(seed // 2 + i) % len(STAGES)], random_.randrange(3), i)
        for i in range(2)
    ]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for i in range(3):
            servers.append(ServerProcess(checkpoint, directory, i, fleet))
            stack.callback(servers[-1].close)
        for server in servers:
            server.wait_until_ready()
        backend = TRANSPORTS[seed % len(TRANSPORTS)]
        sender = make_sender(backend, directory=None if backend == "gloo" else directory)
        return _ProcessSchedule(strikes, servers, palette).run(
            lambda endpoints: stack.enter_context(
                WeightPublisher(endpoints, sender, run_id="chaos", connect_timeout_s=10.0)
            )
        )


class _ProcessSchedule:
    """One schedule under way."""

    def __init__(self, strikes: Sequence[Strike], servers: Sequence[ServerProcess], palette: Palette) -> None:
        self._strikes = strikes
        self._servers = servers
        self._palette = palette
        self._publish = 0
        self._problems: list[str] = []

    def run(self, connect: Callable[[Sequence[HttpEndpoint]], WeightPublisher]) -> list[str]:
        """Publish twice while something happens, then once when nothing does; return what was wrong."""
        publisher = connect([_Struck(server, self._on_stage(i)) for i, server in enumerate(self._servers)])
        for version in (1, 2):
            self._publish = version - 1
            report = self._published(publisher, version, _DEADLINE_S)
            for server in self._servers:
                server.heal()
            self._compare(report)
            for server in self._servers:
                if server.is_killed:
                    publisher.remove(server.url)
        self._publish = -1
        reports = [self._published(publisher, 3, _FINAL_DEADLINE_S)]
        if not reports[0].applied_everywhere:  # a server may have given up the group without the trainer's knowing
            reports.append(self._published(publisher, 3, _FINAL_DEADLINE_S))
        if not reports[-1].applied_everywhere:
            self._problems.append(f"no clean publish succeeds any more: {reports[-1].summary()}")
        self._compare(reports[-1])
        return self._problems

    def _on_stage(self, index: int) -> Callable[[str], None]:
        def on_stage(stage: str) -> None:
            for strike in self._strikes:
                if (strike.index, strike.stage, strike.publish) == (index, stage, self._publish):
                    self._servers[index].strike(strike.act)

        return on_stage

    def _published(self, publisher: WeightPublisher, version: int, deadline_s: float) -> PublishReport:
        shade = Shade(version, publisher.epoch)
        self._palette.add(shade)
        started = time.monotonic()
        try:
            report = publish_weights(
                ShadeSource(self._palette, shade), publisher, deadline_s=deadline_s, bucket_bytes=BUCKET_BYTES
            )
            assert report is not None  # rank 0 gets one
        except PublishError as error:
            report = error.report
        took_s = time.monotonic() - started
        if took_s > deadline_s + CLEAN_UP_S + _HTTP_SLACK_S:
            self._problems.append(f"the publish of version {version} took {took_s:.1f} s")
        return report

    def _compare(self, report: PublishReport) -> None:
        """Compare what a report says with what servers that live sample from, and with what they say."""
        said = {one.endpoint: one for one in report.endpoints}
        for server in self._servers:
            if server.is_killed:
                continue
            try:
                found, version = asyncio.run(_asked(server, self._palette))
            except (InflightError, TimeoutError) as error:
                self._problems.append(f"{server.url} does not answer any more: {error!r}")
                continue
            self._problems += found
            one = said.get(server.url)
            if one is not None and one.outcome is Outcome.APPLIED and version != report.version:
                self._problems.append(f"{server.url} is reported to serve {report.version}, it serves {version}")
            if one is not None and one.serves is not None and one.serves != version:
                self._problems.append(f"{server.url} is reported to serve {one.serves}, it serves {version}")


async def _asked(server: ServerProcess, palette: Palette) -> tuple[list[str], int]:
    """Return what is wrong with a completion of a server, and the version that it says it serves."""
    endpoint = HttpEndpoint(server.url, token=_TOKEN, control_timeout_s=10.0)
    problems = []
    try:
        async with asyncio.timeout(_DEADLINE_S + 20.0):
            while (said := await endpoint.weight_version()).state is not EndpointState.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # at the latest its lease ends
            request = GenerateRequest(
                request_id=f"after-{said.version}",
                prompt_token_ids=(1, VOCAB_SIZE - 1),
                sampling=SamplingParams(max_tokens=12),
            )
            completion = (await endpoint.generate(request)).completions[0]
    finally:
        await endpoint.aclose()
    versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
    if set(versions) != {said.version} or len(versions) != 12:
        problems.append(f"{server.url} says version {said.version}, its spans say {versions}")
    for version, token, logprob in zip(versions, completion.token_ids, completion.logprobs, strict=False):
        if not palette.is_sampled_from(version, token, logprob):
            problems.append(f"{server.url}: a token of version {version} has logprob {logprob:.4f}")
            break
    return problems, said.version
