"""Engines that were started wrongly, killed in the middle of an update, and replaced by new ones on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.engines.launch import started
from inflight.errors import ConfigError, EndpointError, PublishError
from inflight.http.client import HttpEndpoint
from inflight.http.kinds import load_engine_kind
from inflight.types import EndpointOutcome
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import EndpointState, WeightVersion
from tests.real_engines.servers import (
    ENGINES,
    RealEngine,
    is_uniform,
    logprobs,
    muted,
    publish,
    publish_worker,
    python_of,
    request,
    run,
    running,
)
from tests.weights.workers import PlainWorker

DEADLINE_S = 20.0


class WithoutFlags:
    """An engine that is started without what inflight needs."""

    def __init__(self, kind: EngineKind) -> None:
        self.kind = kind
        self.name = kind.name
        self.health_path = kind.health_path
        self.liveness_path = kind.liveness_path

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        words = self.kind.command(options, host, port)
        first = {"vllm": "--enable-scale-out", "sglang": "--disable-overlap-schedule"}[self.name]
        return words[: words.index(first)]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        variables = dict(self.kind.environment(options))
        variables.pop("VLLM_SERVER_DEV_MODE", None)
        return variables

    def connect(self, url: str, **options: object) -> InferenceEndpoint:
        return self.kind.connect(url, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vllm", r"VLLM_SERVER_DEV_MODE=1.*\n.*--enable-scale-out.*processed_logprobs.*weight-transfer-config"),
        ("sglang", r"(?s)overlap.*--disable-overlap-schedule"),
    ],
)
def test_a_server_without_the_needed_flags_is_refused_with_the_command_that_starts_it(
    engine: str, says: str, tiny_model: Path
) -> None:
    kind = WithoutFlags(load_engine_kind(engine))
    options = EngineOptions(model=tiny_model, dtype="float32", threads=1)
    with started(kind, options, python=python_of(engine), timeout_s=240.0) as process:
        endpoint = kind.connect(process.url, token=None, control_timeout_s=20.0, generate_timeout_s=60.0)
        with pytest.raises(ConfigError, match=says):
            run(endpoint, lambda found: found.capabilities())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_url_that_is_another_server_is_refused_in_time(engine: str) -> None:
    kind = load_engine_kind(engine)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(EndpointError):
            run(
                kind.connect(url, token=None, control_timeout_s=2.0, generate_timeout_s=2.0),
                lambda found: found.capabilities(),
            )
        assert time.monotonic() - began < 10


BEFORE_THE_PAUSE, BETWEEN_BUCKETS, BEFORE_THE_COMMIT = range(3)


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        ("vllm", (BETWEEN_BUCKETS,)),
        ("sglang", (BEFORE_THE_COMMIT,)),
        pytest.param("vllm", (BEFORE_THE_PAUSE, BEFORE_THE_COMMIT), marks=pytest.mark.exhaustive),
        pytest.param("sglang", (BEFORE_THE_PAUSE, BETWEEN_BUCKETS), marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_killed_at_any_step_is_told_in_time_and_its_successor_is_synced_before_it_counts(
    engine: str, steps: tuple[int, ...], tiny_model: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(engine, tiny_model, port=port))]
        publisher = stack.enter_context(servers[0].publisher("killed"))
        tensors = muted(servers[0].tensors)
        bucket_bytes = sum(tensor.nbytes for tensor in tensors.values()) // 2
        num_buckets = len(plan_buckets(PlainWorker(tensors).parameter_specs(), bucket_bytes))
        indices = {BEFORE_THE_PAUSE: 0, BETWEEN_BUCKETS: 2, BEFORE_THE_COMMIT: num_buckets}
        for version, step in enumerate(steps, start=1):
            index = indices[step]
            worker = PlainWorker(tensors, version, lambda i, index=index: kill(servers[-1]) if i == index else None)
            began = time.monotonic()
            with pytest.raises(PublishError) as raised:
                publish_worker(publisher, worker, deadline_s=DEADLINE_S, bucket_bytes=bucket_bytes)
            assert time.monotonic() - began < DEADLINE_S + 10, step
            (report,) = raised.value.report.endpoints
            assert report.outcome in (EndpointOutcome.UNREACHABLE, EndpointOutcome.TIMED_OUT), (step, report)
            servers.append(stack.enter_context(running(engine, tiny_model, port=port)))
            found = run(servers[-1].endpoint(), weight_version)
            assert (found.state, found.version, found.run_id) == (EndpointState.READY, 0, None), step
            assert publish(publisher, tensors, version).applied_everywhere, step
            answer = run(servers[-1].endpoint(), lambda endpoint: endpoint.generate(request()))
            assert all(is_uniform(logprob, 258) for logprob in logprobs(answer)), step


@pytest.mark.parametrize("engine", ENGINES)
def test_the_death_of_an_engines_inner_process_ends_what_serves_it_with_the_cause_within_two_seconds(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "inflight", "serve", str(tiny_model), "--port", "0", "--dtype", "float32"]
    command += ["--engine", engine, "--python", python_of(engine), "--threads", "1", "--exit-with-stdin"]
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "INFLIGHT_TOKEN": "token"},
        )
    try:
        while not ready.exists():
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        endpoint = HttpEndpoint(json.loads(ready.read_text())["url"], token="token")
        name = {"vllm": "VLLM::EngineCor", "sglang": "sglang::schedul"}[engine]  # the kernel keeps 15 characters
        (part,) = [pid for pid in family_of(server.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == name]

        async def use() -> float:
            generating = asyncio.ensure_future(endpoint.generate(request(900)))
            asking = asyncio.ensure_future(ask())
            await asyncio.wait({generating, asking}, timeout=1.0)
            assert not generating.done()
            os.kill(part, signal.SIGKILL)
            killed_at = time.monotonic()
            for call in (generating, asking):
                with pytest.raises(EndpointError):
                    await call
            await endpoint.aclose()
            return killed_at

        async def ask() -> None:
            while True:  # one of them is under way when the engine dies
                await endpoint.weight_version()

        killed_at = asyncio.run(use())
        status = server.wait(20)
        took_s = time.monotonic() - killed_at
        assert status == 1
        assert re.search(rf"inflight: {engine} has died: its process {part} \({name}\) ", log.read_text()), (
            log.read_text()
        )
        assert took_s < 2.0
    finally:
        server.kill()
        server.wait(10)
        assert server.stdin is not None
        server.stdin.close()


async def weight_version(endpoint: InferenceEndpoint) -> WeightVersion:
    return await endpoint.weight_version()


def family_of(pid: int) -> set[int]:
    """A process and everything that came of it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def kill(engine: RealEngine) -> None:
    """SIGKILL everything that came of an engine, at once."""
    for pid in family_of(engine.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
