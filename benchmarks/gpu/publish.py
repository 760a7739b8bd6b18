"""One publish of 1, 8 and 16 GB by each transport, and the bare operation that limits it on this machine.

The trainer is this process, the server another one: on the same GPU, or on the second GPU for NCCL, which refuses two
ranks on one. ``share_of_limit`` is the time of the bare operation over the time of the publish, from the call to the
commit. ``kept`` is the share of a server's tokens that still arrive in an interval with one publish.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal
from benchmarks.gpu.broadcast import broadcast_s
from benchmarks.gpu.models import MAX_MODEL_LEN, NUM_SERVED, config_of_size, random_model
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import in_words, seconds_of, spread

from inflight.base.transport_registry import installed_transports
from inflight.bench import limits
from inflight.bench.server import BenchServer, serving
from inflight.http.client import HttpEndpoint
from inflight.types import PublishReport
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import GenerateRequest, SamplingParams

SIZES = (1_000_000_000, 8_000_000_000, 16_000_000_000)
QUICK_SIZES = (2_000_000,)
TRANSPORTS = ("ipc", "nccl", "shm", "gloo", "http", "file")
"""The fastest first; a slow one is left out where it would take the time of the others."""
_ON_DEVICE = ("ipc", "nccl")
_LIMIT_BYTES = 1_000_000_000
"""Most bytes by which a limit is measured; it is scaled to the size of the model."""
_MOST_OF_TIME = 0.3
"""Largest part of the time left that the publishes of one transport may take."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the figures of this section."""
    limit_bytes = QUICK_SIZES[0] if settings.quick else _LIMIT_BYTES
    bare = _limits(limit_bytes, settings)
    rows: list[dict[str, Any]] = []
    bytes_per_s: dict[str, float] = {}
    for size_bytes in QUICK_SIZES if settings.quick else SIZES:
        if (why := _does_not_fit(size_bytes, settings)) is not None:
            rows.append({"size_bytes": size_bytes, "left_out": why})
            continue
        if settings.left_s < 25 and rows:
            rows.append({"size_bytes": size_bytes, "left_out": f"{settings.left_s:.0f} s were left"})
            continue
        rows += _measure_size(size_bytes, bare, bytes_per_s, settings)
    return {"dtype": "bfloat16", "limits": bare, "limit_bytes": limit_bytes, "publishes": rows}


def _limits(size_bytes: int, settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the bare operation of each transport, with its seconds for ``size_bytes``, or why there is none."""
    num_rounds = 1 if settings.quick else 3
    found: dict[str, dict[str, Any]] = {}

    def note(transports: tuple[str, ...], what: str, measured: Callable[[], list[float]]) -> None:
        try:
            row: dict[str, Any] = {"limit": what, "seconds": spread(measured())}
        except Exception as error:  # NCCL and gloo raise RuntimeErrors of their own
            row = {"limit": what, "failed": in_words(error)}
        found.update(dict.fromkeys(transports, row))

    def copied() -> list[float]:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=settings.device)
        target = torch.zeros_like(source)
        return [seconds_of(lambda: target.copy_(source), settings) for _ in range(num_rounds + 1)][1:]

    note(("ipc",), "one copy on the device", copied)
    if _has_two_gpus(settings):
        note(("nccl",), "one broadcast over NCCL", lambda: broadcast_s("nccl", size_bytes, num_rounds))
    note(("shm",), "one copy in host memory", lambda: limits.copy_s(size_bytes, num_rounds))
    note(("gloo",), "one broadcast over gloo", lambda: broadcast_s("gloo", size_bytes, num_rounds))
    note(("http",), "one socket", lambda: limits.socket_s(size_bytes, num_rounds))
    note(("file",), "one file, written and read", lambda: limits.file_s(size_bytes, num_rounds, settings.place))
    return found


def _measure_size(
    size_bytes: int, bare: dict[str, dict[str, Any]], bytes_per_s: dict[str, float], settings: Settings
) -> list[dict[str, Any]]:
    """Measure every transport with a model of one size; ``bytes_per_s`` holds and gets their speeds."""
    config = config_of_size(size_bytes)
    directory = settings.place / f"size-{size_bytes}"
    config.save_pretrained(directory)
    model = random_model(config, settings.device)
    installed = {transport.name for transport in installed_transports()}
    rows = []
    groups = [[name for name in TRANSPORTS if name != "nccl"], ["nccl"]]  # on the trainer's GPU, and on another
    for index, names in enumerate(groups):
        absent = {name: why for name in names if (why := _absent(name, installed, settings)) is not None}
        rows += [{"transport": name, "size_bytes": size_bytes, "absent": why} for name, why in absent.items()]
        if len(absent) == len(names):
            continue
        device = f"cuda:{index}" if settings.on_gpu else "cpu"
        engine = ("--engine", "benchmarks.gpu.models:serve_random", "--device", device)
        place = directory / f"server-{index}"
        place.mkdir()
        with serving(directory, place, "bfloat16", 1, *engine) as server:
            for name in names:
                if name in absent:
                    continue
                row: dict[str, Any] = {"transport": name, "size_bytes": size_bytes}
                predicted_s = 2 * size_bytes / bytes_per_s.get(name, math.inf)
                if predicted_s > _MOST_OF_TIME * settings.left_s:
                    rows.append(row | {"left_out": f"two publishes would take {predicted_s:.0f} s"})
                    continue
                try:
                    row |= _measure_transport(name, server, model, place, settings)
                except Exception as error:  # one transport that fails says nothing about the next
                    rows.append(row | {"failed": in_words(error)})
                    continue
                bytes_per_s[name] = row["size_bytes"] / row["total_s"]["median"]
                limit = bare[name]
                if "seconds" in limit:
                    scale = row["size_bytes"] / (QUICK_SIZES[0] if settings.quick else _LIMIT_BYTES)
                    row["limit_s"] = scale * limit["seconds"]["median"]
                    row["share_of_limit"] = row["limit_s"] / row["total_s"]["median"]
                rows.append(row | {"limit": limit["limit"]})
    return rows


def _measure_transport(name: str, server: BenchServer, model: Any, place: Path, settings: Settings) -> dict[str, Any]:
    weights = ModuleWeights(model)
    reports: list[PublishReport] = []
    budget_s = _MOST_OF_TIME * settings.left_s
    with WeightPublisher.connect(
        [server.url],
        run_id=f"gpu-{name}-{uuid.uuid4().hex[:6]}",
        token=server.token,
        transport=name,
        directory=place / "store" if name == "file" else None,
    ) as publisher:

        def update() -> None:
            weights.version += 1
            reports.append(publish_weights(weights, publisher, deadline_s=max(10.0, settings.left_s / 2)))

        started = time.monotonic()
        update()  # makes buffers and touches new memory, and is not counted
        first_s = time.monotonic() - started
        del reports[:]
        for _ in range(1 if settings.quick else max(1, min(3, int(budget_s / 3 / first_s)))):
            update()
        idle = list(reports)
        kept = None
        interval_s = 0.5 if settings.quick else max(2.0, 2 * first_s)
        if 2 * interval_s < budget_s:
            kept = _kept(server, interval_s, update)
    spans = [report.spans for report in idle]
    timings = [endpoint.timings for report in idle for endpoint in report.endpoints if endpoint.timings is not None]
    return {
        "size_bytes": idle[-1].size_bytes,
        "first_s": first_s,
        "num_rounds": len(idle),
        "total_s": spread([it.total_s for it in spans]),
        "gather_s": spread([it.gather_s for it in spans]),
        "wire_s": spread([it.wire_s for it in spans]),
        "paused_s": spread([it.paused_s for it in timings]),
        "gb_per_s": idle[-1].size_bytes / spread([it.total_s for it in spans])["median"] / 1e9,
        "kept": kept,
    }


def _kept(server: BenchServer, interval_s: float, update: Callable[[], None]) -> dict[str, float | None]:
    """Count the tokens that arrive in an interval without an update, and in one that begins with an update."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_arriving(server)) as arrived:

        def tokens_per_s(call: Callable[[], None]) -> float:
            before, started = sum(arrived), time.monotonic()
            call()
            time.sleep(max(0.0, interval_s - (time.monotonic() - started)))
            return (sum(arrived) - before) / (time.monotonic() - started)

        tokens_per_s(lambda: None)  # until every request has begun
        without, with_one = tokens_per_s(lambda: None), tokens_per_s(update)
    return {
        "interval_s": interval_s,
        "without_per_s": without,
        "with_one_per_s": with_one,
        "share": with_one / without if without else None,
    }


@asynccontextmanager
async def _arriving(server: BenchServer) -> AsyncIterator[list[int]]:
    """Keep requests running during the block; yield the number of tokens that have arrived for each."""
    endpoint = HttpEndpoint(server.url, token=server.token)
    arrived = [0] * NUM_SERVED
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - 16, ignore_eos=True)

    async def stream(index: int) -> None:
        while True:
            request = GenerateRequest(
                request_id=f"kept-{uuid.uuid4().hex}", prompt_token_ids=tuple(range(32, 48)), sampling=params
            )
            async for chunk in endpoint.generate_stream(request):
                arrived[index] += len(chunk.token_ids)

    streams = [asyncio.ensure_future(stream(index)) for index in range(NUM_SERVED)]
    try:
        yield arrived
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await endpoint.aclose()


def _absent(name: str, installed: set[str], settings: Settings) -> str | None:
    if name not in installed:
        return "no such transport is installed"
    if name in _ON_DEVICE and not settings.on_gpu:
        return "it needs CUDA"
    if name == "nccl" and not _has_two_gpus(settings):
        return "NCCL needs a GPU for each rank, and there is one GPU"
    return None


def _has_two_gpus(settings: Settings) -> bool:
    return settings.on_gpu and torch.cuda.device_count() > 1


def _does_not_fit(size_bytes: int, settings: Settings) -> str | None:
    """Return why a model of this size cannot be measured.

    Over IPC, the device holds it four times: in the trainer, twice in memory that both see, and in what the server's
    allocator keeps of the weights that it began with.
    """
    if settings.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        needed_bytes = int(4.2 * size_bytes) + 5_000_000_000  # keys and values, buckets, two contexts
        free_bytes = torch.cuda.mem_get_info()[0]
        if free_bytes < needed_bytes:
            return f"it takes {needed_bytes / 1e9:.0f} GB of the GPU, and {free_bytes / 1e9:.0f} GB are free"
    return None
