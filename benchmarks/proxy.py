"""What the recording proxy costs: agents that use it, compared with the same agents on the engine's own route.

    python benchmarks/proxy.py            # streamed tokens, and memory
    python benchmarks/proxy.py embedded   # compared with the embedded engine's own route
    python benchmarks/proxy.py vllm       # compared with vLLM's own route, after `make engines`

``at_once``: agents in one process play episodes of three turns, all at once, first against the engine's own chat
completions, as they would without inflight, then through ``inflight proxy`` on the same engine, in turns. Every
process is its own, so CPU time is distinguished; seconds are those of the agents, for each sampled token. A streamed
token is timed from the moment at which the sampler gives it, every 5 ms, until the agent has read it. Memory is the
resident set after calls in a row, ten to an episode, with a sampler that answers at once. Writes
``results/proxy.json``, ``proxy-embedded.json`` and ``proxy-vllm.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from inflight.engines.embedded.tiny import TinyShape, byte_tokenizer, create_tiny_model, save_tiny_model
from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.run_server import ProxyServer
from inflight.environments.transcripts import ChatTemplate
from inflight.wire import Completion, CompletionChunk, GenerateRequest, SamplingParams, VersionSpan
from results import write_results

NUM_TURNS, NUM_TOKENS, TOKEN_S = 3, 32, 0.005
TOKEN = "benchmark"
OWN = {"authorization": f"Bearer {TOKEN}"}
SETTINGS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


# ------------------------------------------------------------------------------------------------- the agents' process


async def agents(urls: list[str], model: str, num_tokens: int) -> None:
    """Play an episode under each URL at once; prints the seconds and the sampled tokens."""
    # A connection for each call: on a loaded machine servers close idle ones just as they are used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    num_sampled = 0
    async with httpx.AsyncClient(trust_env=False, timeout=1800, limits=limits) as client:

        async def play(url: str) -> None:
            nonlocal num_sampled
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for _ in range(NUM_TURNS):
                body = {"model": model, "messages": messages, "max_tokens": num_tokens, "temperature": 1.0}
                answer = (await client.post(f"{url}/chat/completions", json=body)).json()
                num_sampled += answer["usage"]["completion_tokens"]
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "continue"}]

        started = time.perf_counter()
        await asyncio.gather(*map(play, urls))
        print(json.dumps([time.perf_counter() - started, num_sampled]))


async def reader(url: str) -> None:
    """Stream an answer; prints when each of its tokens was read."""
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "return_token_ids": True}
    times = []
    async with (
        httpx.AsyncClient(trust_env=False, timeout=600) as client,
        client.stream("POST", f"{url}/chat/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                times.append(time.monotonic())
    print(json.dumps(times))


async def in_another_process(role: str, *arguments: Any) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--role", role, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(json.dumps(arguments).encode())
    return json.loads(said)


# ------------------------------------------------------------------------------------------------------ the episodes


def completion_of(token_ids: tuple[int, ...]) -> Completion:
    return Completion(
        index=0,
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        version_spans=(VersionSpan(version=0, start=0, end=len(token_ids)),),
        finish_reason="length",
    )


def episode(template: ChatTemplate, generate: Any, number: int, proxy: ProxyServer, stream: Any = None) -> Any:
    return PlayingEpisode(f"b-{number}", number, template, generate, SETTINGS, 4000, proxy=proxy.serve, stream=stream)


@dataclass(frozen=True)
class Engine:
    """A running engine: its own URL, the one that inflight attaches to, the name of its model, and its process."""

    url: str
    endpoint: str
    model: str
    pid: int


async def played_at_once(
    engine: Engine, model: Path, num_episodes: int, num_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return what each way of playing costs, in turns."""
    rows: dict[str, list[dict[str, float]]] = {"direct": [], "proxy": []}
    async with proxied(engine, model, num_episodes, num_tokens) as (url, proxy_pid):
        for _ in range(rounds):
            for way in rows:
                urls = [f"{engine.url}/v1"] * num_episodes if way == "direct" else await opened(url, num_episodes)
                engine_s, proxy_s = cpu_of(engine.pid), cpu_of(proxy_pid)
                wall_s, num_sampled = await in_another_process("agents", urls, engine.model, num_tokens)
                row = {
                    "wall_s": wall_s,
                    "num_sampled": num_sampled,
                    "engine_cpu_s": cpu_of(engine.pid) - engine_s,
                    "proxy_cpu_s": cpu_of(proxy_pid) - proxy_s,
                }
                rows[way].append(row)
                print(way, row, flush=True)
                if way == "proxy":
                    await finished(url, urls)
    per_token = {
        way: {
            key: min(row[key] / row["num_sampled"] for row in of) for key in ("wall_s", "engine_cpu_s", "proxy_cpu_s")
        }
        for way, of in rows.items()
    }
    num_calls = num_episodes * NUM_TURNS
    return {
        "num_episodes": num_episodes,
        "num_tokens": num_tokens,
        "proxy_cpu_ms_per_call": 1000 * min(row["proxy_cpu_s"] for row in rows["proxy"]) / num_calls,
        "proxy_cpu_share": per_token["proxy"]["proxy_cpu_s"] / per_token["direct"]["engine_cpu_s"],
        "added_engine_cpu_share": per_token["proxy"]["engine_cpu_s"] / per_token["direct"]["engine_cpu_s"] - 1,
        "added_wall_share": per_token["proxy"]["wall_s"] / per_token["direct"]["wall_s"] - 1,
        "rows": rows,
    }


async def opened(url: str, num_episodes: int) -> list[str]:
    """Open episodes; returns the URL of each."""
    async with httpx.AsyncClient(trust_env=False, timeout=600, headers=OWN) as client:
        return [(await client.post(f"{url}/episodes")).json()["openai_url"] for _ in range(num_episodes)]


async def finished(url: str, episodes: list[str]) -> None:
    """Finish episodes, which must be one rollout of all turns each."""
    async with httpx.AsyncClient(trust_env=False, timeout=600, headers=OWN) as client:
        for episode in episodes:
            key = episode.split("/")[-2]
            answer = (await client.post(f"{url}/episodes/{key}/finish", json={"reward": 0.0})).json()
            turns = sorted(turn["end"] for rollout in answer["rollouts"] for turn in rollout["turns"])
            assert len(turns) == NUM_TURNS, answer


async def streamed(template: ChatTemplate) -> dict[str, float]:
    """Return how much later than the sampler gives a token its agent has read it, in milliseconds."""
    given: list[float] = []

    async def stream(request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        for i in range(200):
            await asyncio.sleep(TOKEN_S)
            given.append(time.monotonic())
            last = "length" if i == 199 else None
            yield CompletionChunk(
                request_id="x", index=0, start=i, token_ids=(97,), logprobs=(-1.0,), version=0, finish_reason=last
            )

    async with ProxyServer("policy") as proxy:
        one = episode(template, None, 0, proxy, stream)
        read = await in_another_process("reader", await one.openai_url())
        await one.aclose()
    late = sorted(1000 * (at - since) for at, since in zip(read, given, strict=True))
    return {"median_ms": statistics.median(late), "p90_ms": late[int(0.9 * len(late))], "num_tokens": len(late)}


async def in_a_row(template: ChatTemplate, num_calls: int) -> dict[str, float]:
    """Return how much memory remains in use after many calls, and what one call costs."""

    async def generate(request: GenerateRequest) -> Completion:
        return completion_of((97,) * NUM_TOKENS)

    async def calls(proxy: ProxyServer, client: httpx.AsyncClient, num: int) -> None:
        for number in range(num // 10):
            one = episode(template, generate, number, proxy)
            url = await one.openai_url()
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for _ in range(10):
                answer = await client.post(f"{url}/chat/completions", json={"messages": messages})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "continue"}]
            await one.aclose()

    async with ProxyServer("policy") as proxy, httpx.AsyncClient(trust_env=False) as client:
        await calls(proxy, client, num_calls // 10)
        before, started = resident_bytes(), time.process_time()
        await calls(proxy, client, num_calls)
        cpu_s = time.process_time() - started
        return {
            "num_calls": num_calls,
            "growth_bytes": resident_bytes() - before,
            "cpu_ms_per_call_with_its_client": 1000 * cpu_s / num_calls,
        }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process, and of those that descend from it."""
    seconds, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            one = int(path.parent.name)
            parents[one] = int(fields[1])
            seconds[one] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descends(one: int) -> bool:
        return one == pid or (one in parents and descends(parents[one]))

    return sum(spent for one, spent in seconds.items() if descends(one))


@contextlib.asynccontextmanager
async def proxied(
    engine: Engine, model: Path, num_episodes: int, num_tokens: int
) -> AsyncGenerator[tuple[str, int], None]:
    """Yield the URL of ``inflight proxy`` on an engine, and its process."""
    command = [sys.executable, "-m", "inflight", "proxy", engine.endpoint, "--model", str(model), "--port", "0"]
    command += ["--max-episodes", str(num_episodes), "--max-tokens", str(num_tokens)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "INFLIGHT_TOKEN": TOKEN}
    )
    try:
        assert process.stdout is not None
        found = re.search(r"serving episodes at (\S+),", (await process.stdout.readline()).decode())
        assert found is not None
        yield found[1], process.pid
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def embedded(model: Path) -> AsyncGenerator[Engine, None]:
    ready = model.with_suffix(".ready")
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--exit-with-stdin"]
    command += ["--ready-file", str(ready), "--threads", "1", "--max-concurrent", "256", "--device", "cpu"]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(300):
            while not ready.exists():  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.1)
        found = json.loads(ready.read_text())
        yield Engine(found["url"], found["url"], model.name, found["pid"])
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def vllm(model: Path) -> AsyncGenerator[Engine, None]:
    """Yield vLLM's own server."""
    from tests.real_engines.servers import running

    with running("vllm", model, max_concurrent=256) as server:
        url = server.process.url
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            models = (await client.get(f"{url}/v1/models")).json()
        yield Engine(url, server.url, models["data"][0]["id"], server.process.pid)


async def measure(engine: str, num_episodes: int, num_tokens: int, rounds: int, num_calls: int) -> dict[str, Any]:
    rows: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    if engine == "none":
        template = ChatTemplate(byte_tokenizer())
        rows["streaming"] = await streamed(template)
        print(rows["streaming"], flush=True)
        rows["in_a_row"] = await in_a_row(template, num_calls)
        print(rows["in_a_row"], flush=True)
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            save_tiny_model(create_tiny_model(TinyShape("llama", 64, 2, 2, 1024), 0), model)
            async with (embedded if engine == "embedded" else vllm)(model) as running:
                rows |= await played_at_once(running, model, num_episodes, num_tokens, rounds)
    rows["load_average_after"] = os.getloadavg()[0]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", nargs="?", choices=("none", "embedded", "vllm"), default="none")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each turn, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--role", choices=("agents", "reader"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        asyncio.run({"agents": agents, "reader": reader}[arguments.role](*json.load(sys.stdin)))
        return
    rows = asyncio.run(
        measure(arguments.engine, arguments.episodes, arguments.tokens, arguments.rounds, arguments.calls)
    )
    write_results("proxy" if arguments.engine == "none" else f"proxy-{arguments.engine}", rows)


if __name__ == "__main__":
    main()
