"""CPU time of the controller's parts, each by itself: for machines that others use too.

    python -m benchmarks.research.scale_parts [--name after] [--only scheduling http ...]

- ``scheduling``: sampling, actor and scheduler with 64 endpoints in this process, each of which answers when told.
- ``http``: `HttpEndpoint.generate` with 156 connections to one server, which is in another process.
- ``batch``: groups of a step of 1.2 million tokens, to the frame that a rank gets, and that frame over a socket pair.
- ``wire``: a completion of 1,000 tokens as JSON, read and checked.

Only CPU seconds of this process are counted. Writes ``results/scale-parts.json``.
"""

# ruff: noqa: ASYNC110, ASYNC220 - it measures processes and the loop from outside

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import DIRECTORY, read_results, write_results
from benchmarks.simulated import Parity, SimulatedEndpoint

from inflight.engines.embedded.tiny import VOCAB_SIZE, byte_tokenizer
from inflight.environments.proxy.run_server import ProxyServer
from inflight.http.client import HttpEndpoint
from inflight.http.listening import bind
from inflight.rollouts import HistoryStore, Ledger, load_composer, load_scheduler, load_staleness
from inflight.rollouts.packing import Packing
from inflight.run.config import RunConfig
from inflight.run.record.journal import Journal
from inflight.run.sampling.batches import frames_of, make_batch
from inflight.run.sampling.groups import work_of
from inflight.run.sampling.policies import Policies
from inflight.run.sampling.sampling import Sampling
from inflight.types import Group, Rollout
from inflight.wire import Completion, GenerateRequest, GenerateResponse, SamplingParams, VersionSpan

GROUP_SIZE, MEAN_TOKENS, NUM_ENDPOINTS = 4, 225, 64
RESULTS = "scale-parts"


def completion(index: int, num_tokens: int, version: int = 0) -> Completion:
    draw = random.Random(index)
    return Completion(
        index=index,
        token_ids=tuple(draw.choices(range(32, 127), k=num_tokens)),
        logprobs=tuple(-draw.expovariate(1.0) for _ in range(num_tokens)),
        version_spans=(VersionSpan(version=version, start=0, end=num_tokens),),
        finish_reason="stop",
    )


# --------------------------------------------------------------------------------------------------------- scheduling


class AnswersWhenTold(SimulatedEndpoint):
    """Keeps its requests in ``waiting``, which all of them share."""

    waiting: list[asyncio.Future[None]]
    answers: tuple[Completion, ...]

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        told = asyncio.get_running_loop().create_future()
        self.waiting.append(told)
        await told
        return GenerateResponse.model_construct(request_id=request.request_id, completions=self.answers)


def sampling(directory: Path) -> Sampling:
    config = RunConfig.model_validate(
        {
            "run": {"directory": str(directory), "num_steps": 1},
            "model": {"path": str(directory)},
            "task": {"name": "benchmarks.simulated:Parity"},
            "sampling": {"group_size": GROUP_SIZE, "max_tokens": 1024},
            "servers": {"urls": ["http://127.0.0.1:1"]},
            "rollouts": {"max_lag": 32},
            "train": {
                "tokens_per_worker": 1_000_000,
                "max_tokens_per_micro_batch": 65536,
                "train_on_equal_rewards": True,
            },
        }
    )
    history = HistoryStore()
    return Sampling(
        config,
        work_of(config, Parity(0), byte_tokenizer(), None, ProxyServer("tiny")),
        Policies(
            scheduler=load_scheduler("least_loaded", {}, group_size=GROUP_SIZE, history=history, seed=0),
            staleness=load_staleness("max_lag", {}, 32),
            composer=load_composer("token_budget", {}, config.tokens_per_step),
            history=history,
        ),
        ledger=Ledger(),
        curriculum=None,
        journal=Journal(directory, None),
        note=print,
        run_id="run",
    )


async def scheduling(num_requests: int, num_ended: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        run = sampling(Path(name))
        settings = argparse.Namespace(max_tokens=1024, vocab_size=VOCAB_SIZE)
        waiting: list[asyncio.Future[None]] = []
        endpoints = [AnswersWhenTold(settings, i) for i in range(NUM_ENDPOINTS)]
        for endpoint in endpoints:
            endpoint.waiting = waiting
            endpoint.answers = tuple(completion(i, MEAN_TOKENS) for i in range(GROUP_SIZE))
            run.actor.add(endpoint, -(-num_requests // NUM_ENDPOINTS) * GROUP_SIZE, await endpoint.capabilities())
        run.actor.serve([endpoint.name for endpoint in endpoints], 0)
        started = time.process_time()
        acting = asyncio.ensure_future(run.actor.run())
        while run.num_running < num_requests:
            await asyncio.sleep(0.01)
        filled, draw = time.process_time(), random.Random(0)
        for _ in range(num_ended):
            waiting.pop(draw.randrange(len(waiting))).set_result(None)
            await asyncio.sleep(0)
            while len(waiting) < num_requests:
                await asyncio.sleep(0.001)
        ended = time.process_time()
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
    return {
        "running": num_requests,
        "first_us_per_request": 1e6 * (filled - started) / num_requests,
        "then_us_per_request": 1e6 * (ended - filled) / num_ended,
        "then_us_per_token": 1e6 * (ended - filled) / num_ended / GROUP_SIZE / MEAN_TOKENS,
    }


# --------------------------------------------------------------------------------------------------------------- http


async def answer_all_but_few(num_connections: int) -> None:
    """Serve requests of any kind with one body; the last eight open ones wait for the next."""
    content = GenerateResponse(
        request_id="x", completions=tuple(completion(i, MEAN_TOKENS) for i in range(GROUP_SIZE))
    ).model_dump_json()
    answer = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n{content}"
    waiting: list[asyncio.Transport] = []

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.received = transport, b""

        def data_received(self, data: bytes) -> None:
            self.received += data
            if self.received.endswith(b"}"):
                self.received = b""
                waiting.append(self.transport)
                while len(waiting) > num_connections - 8:
                    waiting.pop(0).write(answer.encode())

    listener = bind("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Answering, sock=listener)
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


async def http(num_connections: int, num_calls: int) -> dict[str, float]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.research.scale_parts", "--serve", str(num_connections)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = HttpEndpoint(f"http://127.0.0.1:{int(server.stdout.readline())}")
        request = GenerateRequest(
            request_id="x", prompt_token_ids=tuple(range(64)), sampling=SamplingParams(n=GROUP_SIZE, max_tokens=1024)
        )
        num_done = 0

        async def call() -> None:
            nonlocal num_done
            while True:
                await endpoint.generate(request)
                num_done += 1

        calling = [asyncio.ensure_future(call()) for _ in range(num_connections)]
        while num_done < 8:
            await asyncio.sleep(0.01)
        started, before = time.process_time(), num_done
        while num_done < before + num_calls:
            await asyncio.sleep(0.01)
        spent_s = time.process_time() - started
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        await endpoint.aclose()
        server.stdin.close()
    return {"connections": num_connections, "us_per_call": 1e6 * spent_s / (num_done - before)}


# ----------------------------------------------------------------------------------------------------- batch and wire


def batch(num_groups: int) -> dict[str, float]:
    draw = random.Random(0)
    groups = []
    for g in range(num_groups):
        sampled = [completion(i, draw.randrange(100, 350)) for i in range(GROUP_SIZE)]
        rollouts = [
            Rollout(tuple(range(64)), it.token_ids, it.logprobs, it.version_spans, "stop", float(i), 1.0)
            for i, it in enumerate(sampled)
        ]
        groups.append(Group(g, g, rollouts))
    staleness, composer = load_staleness("max_lag", {}, 8), load_composer("token_budget", {}, 1_000_000)
    made = make_batch(groups, 5, "leave_one_out", staleness, composer)
    made_s = spent(lambda: make_batch(groups, 5, "leave_one_out", staleness, composer))
    (frame,) = frames_of(made, Packing(65536, 1), publish=None)
    frames_s = spent(lambda: frames_of(made, Packing(65536, 1), publish=None))
    sent_s = min(asyncio.run(sent(frame)) for _ in range(3))
    return {
        "tokens": made.num_tokens,
        "frame_mb": len(frame) / 1e6,
        "make_ns_per_token": 1e9 * made_s / made.num_tokens,
        "frame_ns_per_token": 1e9 * frames_s / made.num_tokens,
        "send_ns_per_token": 1e9 * sent_s / made.num_tokens,
    }


async def sent(frame: bytes) -> float:
    """Return CPU seconds of the loop's thread for a frame over a socket pair, as `RunChannel.send` does it."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)

    def receive() -> None:
        left = len(frame)
        while left:
            left -= len(theirs.recv(min(left, 1 << 20)))

    receiving = threading.Thread(target=receive)
    receiving.start()
    started = time.thread_time()
    writer.write(frame)
    while receiving.is_alive():
        await asyncio.sleep(0.002)
    spent_s = time.thread_time() - started
    writer.close()
    theirs.close()
    return spent_s


def wire() -> dict[str, float]:
    content = GenerateResponse(request_id="x", completions=(completion(0, 1000),)).model_dump_json().encode()
    spent_s = spent(lambda: [GenerateResponse.model_validate_json(content) for _ in range(100)]) / 100
    return {"bytes_per_token": len(content) / 1000, "ns_per_token": 1e9 * spent_s / 1000}


def spent(call: Callable[[], Any]) -> float:
    """Return the least CPU seconds of three calls."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return min(seconds)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "scheduling": lambda given: asyncio.run(scheduling(given.requests, given.ended)),
    "http": lambda given: asyncio.run(http(156, given.ended)),
    "batch": lambda given: batch(1050),
    "wire": lambda given: wire(),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="row of the results to write; none: print only")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--ended", type=int, default=400)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.serve is not None:
        asyncio.run(answer_all_but_few(settings.serve))
        sys.exit()
    for part in settings.only:
        row = PARTS[part](settings)
        print(part, json.dumps(row), flush=True)
        if settings.name:
            rows = read_results(RESULTS)["rows"] if (DIRECTORY / f"{RESULTS}.json").exists() else {}
            write_results(RESULTS, rows | {settings.name: rows.get(settings.name, {}) | {part: row}})
