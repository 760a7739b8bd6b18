"""``inflight bench weights``: one model's way from a trainer to a server, over each transport, beside the bare limit.

A server of the embedded engine runs in a process of its own. Each transport publishes the same weights several times,
first while the server is idle, then while it samples. Between two publishes a part of the elements changes, as a step
of the optimizer changes them.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from inflight.bench import limits
from inflight.bench.server import BenchServer, make_model, serving
from inflight.errors import ConfigError, InflightError
from inflight.http.client import HttpEndpoint
from inflight.types import PublishReport
from inflight.weights.module import ModuleWeights
from inflight.weights.publish import WeightPublisher, publish_weights
from inflight.wire import Backend, GenerateRequest, SamplingParams

WAYS = (
    "gloo",
    "shm",
    "file",
    "http",
    "gloo+delta",
    "shm+delta",
    "file+delta",
    "http+delta",
    "gloo+bfloat16",
    "gloo+float8",
)
"""What can be measured on one host without a GPU: a transport, and how buckets are encoded on it."""
DEFAULT_WAYS = ("gloo", "shm", "file", "http", "gloo+delta", "http+delta")
_PROMPT = tuple(range(32, 48))


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several rounds, in seconds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class WayResult:
    """What one way did with one model."""

    way: str
    size_bytes: int
    sent_bytes: int
    spans: dict[str, Spread]
    """gather, wire, hold, load and total of an idle server, in seconds; ``first_token`` while it samples"""
    busy: dict[str, Spread]
    """The same while the server samples"""
    limit: str
    """What the machine was asked to do with the same bytes, bare"""
    limit_s: Spread
    copy_s: Spread
    """One copy of the same bytes in memory"""

    @property
    def gb_per_s(self) -> float:
        """Weights per second, from the call to the commit, in units of 10^9 bytes."""
        return self.size_bytes / self.spans["total"].median / 1e9

    @property
    def share_of_limit(self) -> float:
        """The bare operation's time over the publish's."""
        return self.limit_s.median / self.spans["total"].median

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON-compatible values."""
        return {**asdict(self), "gb_per_s": self.gb_per_s, "share_of_limit": self.share_of_limit}


@dataclass(slots=True)
class _Spans:
    reports: list[PublishReport] = field(default_factory=list)

    def spreads(self) -> dict[str, Spread]:
        spans = [report.spans for report in self.reports]
        named = {name: [getattr(s, f"{name}_s") for s in spans] for name in ("gather", "wire", "hold", "load", "total")}
        named["held"] = [max(e.timings.held_s for e in r.endpoints if e.timings is not None) for r in self.reports]
        named["first_token"] = [s.first_token_s for s in spans if s.first_token_s is not None]
        return {name: spread(seconds) for name, seconds in named.items() if seconds}


def spread(seconds: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def measure(
    size_bytes: int,
    ways: Sequence[str] = DEFAULT_WAYS,
    *,
    num_rounds: int = 5,
    num_requests: int = 2,
    changed_share: float = 0.02,
    dtype: str = "float32",
    num_threads: int = 1,
    directory: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[WayResult]:
    """Return what each way does with a model of about ``size_bytes``; ``tell`` hears of progress.

    Both processes use ``num_threads`` threads; torch in this one keeps to that. ``directory`` is where the model and
    the files of the transport ``file`` lie. Raises `ConfigError` for an unknown
    way, and what a publish raises.
    """
    torch.set_num_threads(num_threads)
    for way in ways:
        if way not in WAYS:
            raise ConfigError(f"unknown way {way!r}; known: {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory(dir=directory) as made:
        place = Path(made)
        tell(f"making a model of {size_bytes / 1e6:,.0f} MB")
        model = make_model(place / "model", size_bytes, dtype)
        with serving(place / "model", place, dtype, num_threads) as server:
            results = []
            for way in ways:
                tell(f"{way}: {num_rounds} idle and {num_rounds} busy publishes")
                results.append(_measure_way(way, server, model, place, num_rounds, num_requests, changed_share))
    return results


def _measure_way(
    way: str, server: BenchServer, model: Any, place: Path, num_rounds: int, num_requests: int, changed_share: float
) -> WayResult:
    weights = ModuleWeights(model)
    size_bytes = sum(spec.size_bytes for spec in weights.parameter_specs())
    limit, before = _limit(way, size_bytes, num_rounds, place)
    copies = limits.copy_s(size_bytes, num_rounds)
    idle, busy = _Spans(), _Spans()
    with _publisher(way, server, place / "store") as publisher:
        for i in range(2 * num_rounds + 2):
            is_busy = i > num_rounds
            weights.version += 1
            _change(model, changed_share, seed=weights.version)
            with sampling(server, num_requests if is_busy else 0):
                report = publish_weights(weights, publisher)
            assert report is not None  # this is rank 0
            if i in (0, num_rounds + 1):
                continue  # the first touches memory for the first time; the first busy one waits for the prompts
            (busy if is_busy else idle).reports.append(report)
    _, after = _limit(way, size_bytes, num_rounds, place)
    return WayResult(
        way=way,
        size_bytes=size_bytes,
        sent_bytes=idle.reports[-1].sent_bytes,
        spans=idle.spreads(),
        busy=busy.spreads(),
        limit=limit,
        limit_s=spread([*before, *after]),
        copy_s=spread([*copies, *limits.copy_s(size_bytes, num_rounds)]),
    )


def _limit(way: str, size_bytes: int, num_rounds: int, place: Path) -> tuple[str, list[float]]:
    transport = way.partition("+")[0]
    if transport == "gloo":
        return "one broadcast", limits.broadcast_s([size_bytes], num_rounds)
    if transport == "shm":
        return "one copy", limits.copy_s(size_bytes, num_rounds)
    if transport == "file":
        return "one file, written and read", limits.file_s(size_bytes, num_rounds, place)
    return "one socket", limits.socket_s(size_bytes, num_rounds)


@contextmanager
def _publisher(way: str, server: BenchServer, store: Path) -> Iterator[WeightPublisher]:
    transport, _, encoding = way.partition("+")
    assert transport in get_args(Backend)
    options: dict[str, Any] = {"delta": True} if encoding == "delta" else {"encoding": encoding or "raw"}
    backend: Any = transport
    with WeightPublisher.connect(
        [server.url],
        run_id=f"bench-{way.replace('+', '-')}-{uuid.uuid4().hex[:6]}",
        token=server.token,
        backend=backend,
        directory=store if transport == "file" else None,
        **options,
    ) as publisher:
        yield publisher


@torch.no_grad()
def _change(model: Any, share: float, seed: int) -> None:
    """Change about ``share`` of the elements of every weight, as an optimizer's step in a narrow dtype does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        flat = parameter.view(-1)
        num_changed = max(1, int(share * flat.numel()))
        chosen = torch.randint(flat.numel(), (num_changed,), generator=generator)
        flat[chosen] = flat[chosen] * 1.01 + 1e-6


@contextmanager
def sampling(server: BenchServer, num_requests: int) -> Iterator[None]:
    """Keep requests running on the server while the block runs."""
    if not num_requests:
        yield
        return
    started, ended = threading.Event(), threading.Event()

    async def sample() -> None:
        endpoint = HttpEndpoint(server.url, token=server.token)
        sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
        requests = [
            asyncio.ensure_future(
                endpoint.generate(
                    GenerateRequest(request_id=f"bench-{uuid.uuid4().hex}", prompt_token_ids=_PROMPT, sampling=sampling)
                )
            )
            for _ in range(num_requests)
        ]
        try:
            async with asyncio.timeout(60):
                while (await endpoint.weight_version()).num_running < num_requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            started.set()
            await asyncio.to_thread(ended.wait)
        finally:
            started.set()
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await endpoint.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(sample()), name="bench-sampling", daemon=True)
    thread.start()
    try:
        if not started.wait(90):
            raise InflightError("the server took no requests within 90 s")
        yield
    finally:
        ended.set()
        thread.join(30)
