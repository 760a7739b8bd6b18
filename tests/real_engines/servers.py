"""Real vLLM and SGLang servers for tests, and the few calls that the tests make on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.engines.launch import EngineProcess, started
from inflight.http.kinds import load_engine_kind
from inflight.types import PublishReport
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import GenerateRequest, GenerateResponse, SamplingParams
from tests.weights.workers import PlainWorker

ENGINES = ("vllm", "sglang")
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
ROOT = Path(__file__).resolve().parents[2]
FINAL_NORM = "model.norm.weight"
T = TypeVar("T")
_serial = itertools.count()


def python_of(engine: str) -> str:
    """Return the interpreter of an engine's environment; a missing one is a failure, never a skip."""
    version = os.environ.get(f"{engine.upper()}_VERSION", VERSIONS[engine])
    python = ROOT / ".engines" / f"{engine}-{version}" / "bin" / "python"
    assert python.is_file(), f"{python} is not there; run: make engines"
    return str(python)


class RealEngine:
    """One real server of ``kind`` that serves ``model`` in float32."""

    def __init__(self, kind: EngineKind, model: Path, process: EngineProcess) -> None:
        self.kind = kind
        self.model = model
        self.process = process
        self.tensors: Mapping[str, torch.Tensor] = load_file(model / "model.safetensors")

    @property
    def url(self) -> str:
        """What `connect_endpoint` takes."""
        return self.process.url.replace("http", f"{self.kind.name}+http", 1)

    def endpoint(self, **options: Any) -> InferenceEndpoint:
        """Return a new client of the server."""
        timeouts = {"control_timeout_s": 20.0, "generate_timeout_s": 60.0, **options}
        return self.kind.connect(self.process.url, token=None, **timeouts)

    @contextlib.contextmanager
    def publisher(self, run_id: str | None = None) -> Iterator[WeightPublisher]:
        """Yield a connected publisher of a new run to this server alone."""
        run_id = run_id or f"test-{next(_serial)}"
        with WeightPublisher([self.endpoint()], ProcessGroupSender(), run_id=run_id) as publisher:
            yield publisher


@contextlib.contextmanager
def running(engine: str, model: Path, *, port: int = 0, **options: Any) -> Iterator[RealEngine]:
    """Yield a server in a process of its own."""
    kind = load_engine_kind(engine)
    chosen = EngineOptions(model=model, **{"dtype": "float32", "threads": 1, "max_concurrent": 64, **options})
    with started(kind, chosen, python=python_of(engine), port=port, timeout_s=240.0) as process:
        yield RealEngine(kind, model, process)


def publish(
    publisher: WeightPublisher, tensors: Mapping[str, torch.Tensor], version: int, **options: Any
) -> PublishReport:
    """Publish plain tensors as a version."""
    return publish_worker(publisher, PlainWorker(tensors, version), **options)


def publish_worker(publisher: WeightPublisher, worker: Any, **options: Any) -> PublishReport:
    """Publish what a worker has."""
    report = publish_weights(worker, publisher, **{"deadline_s": 30.0, **options})
    assert report is not None
    return report


def muted(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The oracle: with a final norm of zeros, every token has the logprob -ln V exactly."""
    return {**tensors, FINAL_NORM: torch.zeros_like(tensors[FINAL_NORM])}


def run(endpoint: InferenceEndpoint, call: Callable[[InferenceEndpoint], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a client, and close the client."""

    async def main() -> T:
        try:
            return await call(endpoint)
        finally:
            await endpoint.aclose()

    return asyncio.run(main())


def request(num_tokens: int = 8, **sampling: Any) -> GenerateRequest:
    """A request behind a fixed prompt, that continues for ``num_tokens`` tokens."""
    params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, **sampling}
    return GenerateRequest(
        request_id=f"request-{next(_serial)}", prompt_token_ids=tuple(b"weights"), sampling=SamplingParams(**params)
    )


def logprobs(response: GenerateResponse) -> list[float]:
    """Logprobs of the first completion."""
    return list(response.completions[0].logprobs)


def is_uniform(logprob: float, vocab_size: int) -> bool:
    """Whether a token was sampled under the oracle. Exact but for float32's rounding of ln V."""
    return math.isclose(logprob, -math.log(vocab_size), abs_tol=1e-5)
