"""What a run is made of in addition to its controller, simulated: inference servers, a task, and a trainer that takes
batches.

    python benchmarks/simulated.py --count 16 --model DIR --report FILE ...

serves so many endpoints of the contract, each at a port of its own, and prints their URLs. Weights really arrive; only
what a GPU would do is a wait. A token takes ``base_s * max(1, b / knee)`` where b completions run, and lengths are
log-normal. At the end of its input, the process writes how long freed slots waited for the next request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn

from inflight.base.transport_registry import receivable_transports
from inflight.contracts import InferenceEndpoint, Task, TrainerWorker, WorkerKind
from inflight.errors import UnsupportedError
from inflight.http.listening import bind
from inflight.http.server import create_app
from inflight.types import MicroBatch, StepResult, TaskItem, WeightBucket
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.wire import (
    BucketSpec,
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    TensorSpec,
    VersionSpan,
    WeightUpdate,
)

WEIGHT = TensorSpec(name="model.embed_tokens.weight", dtype="float32", shape=(64, 64))
SIGMA = 0.5
"""Of the logarithm of a completion's length."""
_NUM_KEPT = 64
"""Versions that spans may name."""

# ------------------------------------------------------------------------------------------------ an inference server


class SimulatedEndpoint(ReceivingEndpoint, InferenceEndpoint, PausableEngine):
    """Answers after as long as an engine would take, with random printable bytes."""

    def __init__(self, settings: argparse.Namespace, number: int) -> None:
        self._settings = settings
        self._number = number
        self._random = random.Random(number)
        longest = settings.max_tokens
        self._token_ids = tuple(self._random.choices(range(32, 127), k=4 * longest))
        self._logprobs = tuple(-self._random.expovariate(1.0) for _ in range(4 * longest))
        self._num_running = 0
        self._served: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_NUM_KEPT)
        """When each version began."""
        self._capabilities = Capabilities(
            engine="simulated",
            engine_version="1",
            model="simulated",
            vocab_size=settings.vocab_size,
            max_model_len=1 << 16,
            dtype="float32",
            in_flight_policies=(InFlightPolicy.KEEP,),
            transports=receivable_transports(on_gpu=False),
            staging=True,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=1 << 20,
            streaming=False,
            chat=False,
        )
        sink = StagedSink(make_receiver, lambda update, arrived: None)
        self._updates = UpdateReceiver(self, sink, [WEIGHT], self._capabilities)

    @property
    def name(self) -> str:
        return f"simulated-{self._number}"

    async def capabilities(self) -> Capabilities:
        return self._capabilities

    async def receiver(self) -> UpdateReceiver:
        return self._updates

    async def pause(self, update: WeightUpdate) -> None:
        pass

    async def apply(self, update: WeightUpdate) -> None:
        self._served.append((time.monotonic(), update.version))

    async def resume(self) -> None:
        pass

    async def fail_requests(self) -> None:
        pass

    async def num_running(self) -> int:
        return self._num_running

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        self._updates.session.refuse_to_sample()
        sampling = request.sampling
        longest = sampling.max_tokens or self._settings.max_tokens
        drawn = [self._random.lognormvariate(math.log(self._settings.median_tokens), SIGMA) for _ in range(sampling.n)]
        lengths = [min(longest, max(1, round(length))) for length in drawn]
        self._num_running += sampling.n
        try:
            token_s = self._settings.base_s * max(1.0, self._num_running / self._settings.knee)
            started = time.monotonic()
            await asyncio.sleep(max(lengths) * token_s)
        finally:
            self._num_running -= sampling.n
        return GenerateResponse.model_construct(
            request_id=request.request_id,
            completions=tuple(self._completion(i, n, started, token_s) for i, n in enumerate(lengths)),
        )

    def _completion(self, index: int, length: int, started: float, token_s: float) -> Completion:
        at = self._random.randrange(len(self._token_ids) - length)
        return Completion.model_construct(
            index=index,
            token_ids=self._token_ids[at : at + length],
            logprobs=self._logprobs[at : at + length],
            version_spans=tuple(self._spans(length, started, token_s)),
            finish_reason="stop",
        )

    def _spans(self, length: int, started: float, token_s: float) -> Iterator[VersionSpan]:
        """Yield the spans of a completion whose tokens were sampled evenly from ``started`` on."""
        begins = [(min(length, max(0, math.ceil((at - started) / token_s))), version) for at, version in self._served]
        begins[0] = (0, begins[0][1])
        for (start, version), (end, _) in zip(begins, [*begins[1:], (length, 0)], strict=True):
            if end > start:
                yield VersionSpan.model_construct(version=version, start=start, end=end)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        raise UnsupportedError("a simulated engine has no chat")

    async def aclose(self) -> None:
        await self._updates.aclose()


class TimedApp:
    """Notes, around an application, how long each slot that an answer freed waited for the next request."""

    def __init__(self, app: Any, waits: array[float]) -> None:
        self._app = app
        self._freed: deque[float] = deque()
        self._waits = waits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/generate":
            return await self._app(scope, receive, send)
        if self._freed:
            self._waits.append(time.monotonic() - self._freed.popleft())
        await self._app(scope, receive, send)
        self._freed.append(time.monotonic())


async def serve(settings: argparse.Namespace) -> list[float]:
    """Serve until standard input ends; return the waits of slots, in seconds."""
    apps: dict[int, TimedApp] = {}
    listeners = []
    waits: array[float] = array("d")
    for i in range(settings.count):
        listeners.append(bind("127.0.0.1", 0))
        endpoint = SimulatedEndpoint(settings, settings.first + i)
        apps[listeners[-1].getsockname()[1]] = TimedApp(create_app(endpoint, token=os.environ["INFLIGHT_TOKEN"]), waits)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await apps[scope["server"][1]](scope, receive, send)

    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=600, ws="none", lifespan="off")
    server = uvicorn.Server(config)

    def watch() -> None:
        while line := sys.stdin.readline():  # a line forgets what was measured so far
            if line.strip() == "begin":
                del waits[:]
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    print(json.dumps([f"http://127.0.0.1:{port}" for port in apps]), flush=True)
    config.timeout_graceful_shutdown = 1
    await server.serve(sockets=listeners)
    return list(waits)


# ---------------------------------------------------------------------------------------------------- task and trainer


class Parity(Task):
    """Rewards that nothing can learn: how often a letter occurs. ``work`` repeats make a score as slow as a checker."""

    def __init__(self, seed: int, num_prompt_characters: int = 64, work: int = 0) -> None:
        self._num_characters = num_prompt_characters
        self._work = work

    @property
    def name(self) -> str:
        return "parity"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"{index} ".ljust(self._num_characters, "."))

    def score(self, item: TaskItem, completion: str) -> float:
        for _ in range(self._work):
            sum(map(ord, completion))
        return completion.count("e") % 7 / 6


class SimulatedWorker(TrainerWorker):
    """Takes batches and publishes a small weight. Trains nothing."""

    rank = 0
    world_size = 1
    version = 0

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return batch.behaviour_logprobs_T

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self) -> StepResult:
        self.version += 1
        return StepResult(self.version, 0.0, 0.0)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)

    def load(self, path: Path) -> None:
        raise UnsupportedError("a simulated worker has no checkpoint")

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return [WEIGHT]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            yield WeightBucket(bucket.index, (WEIGHT,), (torch.full(WEIGHT.shape, float(self.version)),))


class SimulatedKind(WorkerKind):
    """Makes simulated workers."""

    def create(self, settings: Mapping[str, object]) -> SimulatedWorker:
        return SimulatedWorker()


KIND = SimulatedKind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first endpoint")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--median-tokens", type=float, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--base-s", type=float, required=True, help="seconds per token up to `knee` completions")
    parser.add_argument("--knee", type=float, required=True)
    parser.add_argument("--report", required=True)
    given = parser.parse_args()
    Path(given.report).write_text(json.dumps(asyncio.run(serve(given))))
