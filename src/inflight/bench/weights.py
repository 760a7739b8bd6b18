"""``inflight bench weights``: measures publishing one model to a server over each transport, and the transport's limit.

The embedded engine's server runs in its own process. Each transport publishes the model several times, first while the
server is idle and then while it samples. Between two publishes, a share of the elements changes, as in an optimizer
step.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal

from inflight.base.peak_memory import PeakMemory
from inflight.base.tasks import run_in_background
from inflight.base.text_tables import align_columns
from inflight.base.unknown_names import unknown_name
from inflight.bench import limits
from inflight.bench.server import BenchServer, make_model, serving
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InflightError
from inflight.types import PublishReport
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import GenerateRequest, SamplingParams

TRANSPORTS = (
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
"""Combinations of a transport and an encoding that can be measured on one host without a GPU."""
DEFAULT_TRANSPORTS = ("gloo", "shm", "file", "http", "gloo+delta", "http+delta")
_PROMPT = tuple(range(32, 48))


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several rounds, in seconds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class TransportResult:
    """The measurements of one transport with one model."""

    transport: str
    size_bytes: int
    sent_bytes: int
    spans: dict[str, Spread]
    """``gather``, ``wire``, ``pause``, ``load``, ``paused`` and ``total`` while the server is idle."""
    busy: dict[str, Spread]
    """The same while the server samples, plus ``first_token``."""
    limit: str
    """The name of the raw operation on the same bytes; its time is ``limit_s``."""
    limit_s: Spread
    copy_s: Spread
    """The time of one copy of the same bytes in memory."""
    grown_bytes: int | None
    """How much the memory of the publishing process grew at its peak, including memory shared with the server; None if
    the system does not report it."""

    @property
    def gb_per_s(self) -> float:
        """Weights published per second, from the call to the commit, in units of 10^9 bytes."""
        return self.size_bytes / self.spans["total"].median / 1e9

    @property
    def share_of_limit(self) -> float:
        """The time of the raw operation divided by the time of the publish."""
        return self.limit_s.median / self.spans["total"].median

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s, "share_of_limit": self.share_of_limit}


def measure(
    subject: int | Path,
    transports: Sequence[str] = DEFAULT_TRANSPORTS,
    *,
    num_rounds: int = 5,
    num_requests: int = 2,
    changed_share: float = 0.02,
    dtype: str = "float32",
    num_threads: int = 1,
    directory: Path | None = None,
    report_progress: Callable[[str], None] = lambda text: None,
) -> list[TransportResult]:
    """Measure each transport with a model; ``report_progress`` receives progress lines.

    ``subject`` is the directory of a checkpoint, or the approximate size in bytes of a random model to create. Both
    processes use ``num_threads`` threads; torch in this process keeps that setting. ``directory`` holds the random
    model and the files of the transport ``file``. Raises `ConfigError` for an unknown transport or a directory without
    a model, and the errors that a publish raises.
    """
    torch.set_num_threads(num_threads)
    for transport in transports:
        if transport not in TRANSPORTS:
            raise ConfigError(unknown_name("transport", transport, TRANSPORTS))
    with tempfile.TemporaryDirectory(dir=directory) as made:
        place = Path(made)
        if isinstance(subject, Path):
            path, model = subject, _loaded(subject, dtype)
        else:
            report_progress(f"making a model of {subject / 1e6:,.0f} MB")
            path = place / "model"
            model = make_model(path, subject, dtype)
        with serving(path, place, dtype, num_threads) as server:
            results = []
            for transport in transports:
                report_progress(f"{transport}: {num_rounds} idle and {num_rounds} busy publishes")
                results.append(
                    _measure_transport(transport, server, model, place, num_rounds, num_requests, changed_share)
                )
    return results


def _loaded(path: Path, dtype: str) -> Any:
    """Return the model of a checkpoint. Raises `ConfigError` if there is none."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no model that can be loaded: {error}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a mapped file becomes resident only when it is read
    return model


def _measure_transport(
    transport: str,
    server: BenchServer,
    model: Any,
    place: Path,
    num_rounds: int,
    num_requests: int,
    changed_share: float,
) -> TransportResult:
    weights = ModuleWeights(model)
    size_bytes = sum(spec.size_bytes for spec in weights.parameter_specs())
    limit, before = _limit(transport, size_bytes, num_rounds, place)
    copies = limits.copy_s(size_bytes, num_rounds)
    idle: list[PublishReport] = []
    busy: list[PublishReport] = []
    memory = _peak_memory()
    with _publisher(transport, server, place / "store") as publisher:
        for i in range(2 * num_rounds + 2):
            is_busy = i > num_rounds
            weights.version += 1
            _change(model, changed_share, seed=weights.version)
            with sampling(server.connect, num_requests) if is_busy else nullcontext():
                report = publish_weights(weights, publisher)
            if i in (0, num_rounds + 1):
                continue  # warm-up: the first publish touches new memory, the first busy one waits for the prompts
            (busy if is_busy else idle).append(report)
    grown_bytes = None if memory is None else memory.grown_bytes()
    _, after = _limit(transport, size_bytes, num_rounds, place)
    return TransportResult(
        transport=transport,
        size_bytes=size_bytes,
        sent_bytes=idle[-1].sent_bytes,
        spans=_spreads(idle),
        busy=_spreads(busy),
        limit=limit,
        limit_s=_spread([*before, *after]),
        copy_s=_spread([*copies, *limits.copy_s(size_bytes, num_rounds)]),
        grown_bytes=grown_bytes,
    )


def _peak_memory() -> PeakMemory | None:
    try:
        return PeakMemory()
    except OSError:  # not Linux, or not permitted
        return None


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def _spreads(reports: Sequence[PublishReport]) -> dict[str, Spread]:
    spans = [report.spans for report in reports]
    named = {name: [getattr(s, f"{name}_s") for s in spans] for name in ("gather", "wire", "pause", "load", "total")}
    named["paused"] = [max(e.timings.paused_s for e in r.endpoints if e.timings is not None) for r in reports]
    named["first_token"] = [s.first_token_s for s in spans if s.first_token_s is not None]
    return {name: _spread(seconds) for name, seconds in named.items() if seconds}


def table(results: Sequence[TransportResult]) -> str:
    """Return a table with one line for each result and times in milliseconds."""
    rows = [
        {
            "transport": result.transport,
            "weights": f"{result.size_bytes / 1e6:,.0f} MB",
            "sent": f"{result.sent_bytes / 1e6:,.1f} MB",
            **{name: _ms(result.spans[name]) for name in ("gather", "wire", "pause", "load")},
            "first token": _ms(result.busy["first_token"]) if "first_token" in result.busy else "",
            "total": _ms(result.spans["total"]),
            "GB/s": f"{result.gb_per_s:.2f}",
            "limit": f"{result.limit} {_ms(result.limit_s)}",
            "share": f"{100 * result.share_of_limit:.0f} %",
            "memory": "" if result.grown_bytes is None else f"{result.grown_bytes / 1e6:,.0f} MB",
        }
        for result in results
    ]
    return align_columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def _ms(spread: Spread) -> str:
    return f"{1000 * spread.median:,.0f} ms"


def _limit(transport: str, size_bytes: int, num_rounds: int, place: Path) -> tuple[str, list[float]]:
    name = transport.partition("+")[0]
    if name == "gloo":
        return "one broadcast", limits.broadcast_s([size_bytes], num_rounds)
    if name == "shm":
        return "one copy", limits.copy_s(size_bytes, num_rounds)
    if name == "file":
        return "one file, written and read", limits.file_s(size_bytes, num_rounds, place)
    return "one socket", limits.socket_s(size_bytes, num_rounds)


def _publisher(transport: str, server: BenchServer, store: Path) -> WeightPublisher:
    name, _, encoding = transport.partition("+")
    options: dict[str, Any] = {"delta": True} if encoding == "delta" else {"encoding": encoding or "raw"}
    return WeightPublisher.connect(
        [server.url],
        run_id=f"bench-{transport.replace('+', '-')}-{uuid.uuid4().hex[:6]}",
        token=server.token,
        transport=name,
        directory=store if name == "file" else None,
        **options,
    )


@torch.no_grad()
def _change(model: Any, share: float, seed: int) -> None:
    """Change about ``share`` of the elements of every parameter, as an optimizer step in a narrow dtype does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        flat = parameter.view(-1)
        num_changed = max(1, int(share * flat.numel()))
        chosen = torch.randint(flat.numel(), (num_changed,), generator=generator)
        flat[chosen] = flat[chosen] * 1.01 + 1e-6


@contextmanager
def sampling(connect: Callable[[], InferenceEndpoint], num_requests: int, max_tokens: int = 4_000) -> Iterator[None]:
    """Keep requests running on the server that ``connect`` connects to while the context is open.

    Each request asks for up to ``max_tokens`` tokens; when it ends, a new one is sent. Raises `InflightError` if the
    requests are not all running at the same time within 60 s.
    """
    clients = _clients(connect, num_requests, max_tokens)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(clients):
        yield


@asynccontextmanager
async def _clients(connect: Callable[[], InferenceEndpoint], num_requests: int, max_tokens: int) -> AsyncIterator[None]:
    endpoint = connect()
    most = (await endpoint.capabilities()).max_model_len - len(_PROMPT)
    params = SamplingParams(max_tokens=min(max_tokens, most), ignore_eos=True)

    async def client() -> None:
        while True:
            request_id = f"bench-{uuid.uuid4().hex}"
            await endpoint.generate(GenerateRequest(request_id=request_id, prompt_token_ids=_PROMPT, sampling=params))

    async with aclosing(endpoint), run_in_background(*(client() for _ in range(num_requests))):
        num_running = 0
        try:
            async with asyncio.timeout(60):
                while num_running < num_requests:
                    num_running = (await endpoint.weight_version()).num_running
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise InflightError(
                f"the server was not running {num_requests} requests at the same time within 60 s; {num_running} of "
                "them were running at the end"
            ) from error
        yield
