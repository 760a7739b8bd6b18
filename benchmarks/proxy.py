"""What the recording proxy costs: episodes through it beside the same episodes played directly, and streamed tokens.

    python benchmarks/proxy.py

Episodes of three turns of 32 tokens, all at once, on the embedded engine in a process of its own; the agents are in
another process. CPU time is that of the process in which the episodes are played, and of the engine. A streamed token
is timed from the moment at which the sampler gives it, every 5 ms, until the agent has read it. Memory is the resident
set after calls in a row, ten to an episode, with a sampler that answers at once. Writes ``results/proxy.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy_server import ProxyServer
from inflight.environments.transcripts import ChatTemplate
from inflight.http.client import HttpEndpoint
from inflight.local.tiny import TinyShape, byte_tokenizer, create_tiny_model, save_tiny_model
from inflight.wire import Completion, CompletionChunk, GenerateRequest, SamplingParams, VersionSpan
from results import write_results

NUM_TURNS, NUM_TOKENS, TOKEN_S = 3, 32, 0.005
SETTINGS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


# ------------------------------------------------------------------------------------------------- the agents' process


async def agents(urls: list[str]) -> None:
    """Play an episode under each URL at once; prints the seconds."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=600, limits=limits) as client:

        async def play(url: str) -> None:
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for _ in range(NUM_TURNS):
                answer = await client.post(f"{url}/chat/completions", json={"messages": messages})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]

        started = time.perf_counter()
        await asyncio.gather(*map(play, urls))
        print(json.dumps(time.perf_counter() - started))


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


async def in_another_process(role: str, urls: list[str]) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--role", role, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(json.dumps(urls).encode())
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


async def played_at_once(url: str, pid: int, template: ChatTemplate, num_episodes: int) -> dict[str, Any]:
    """Return seconds of wall and CPU time, directly and through the proxy, in turn."""
    rows: dict[str, list[dict[str, float]]] = {"direct": [], "proxy": []}
    async with contextlib.aclosing(HttpEndpoint(url)) as endpoint, ProxyServer("policy") as proxy:

        async def generate(request: GenerateRequest) -> Completion:
            return (await endpoint.generate(request)).completions[0]

        async def directly(one: PlayingEpisode) -> None:
            conversation = one.conversation()
            for turn in range(NUM_TURNS):
                await conversation.say("go on" if turn else "begin")

        for repetition in range(3):
            for way in ("direct", "proxy"):
                first = repetition * num_episodes
                episodes = [episode(template, generate, first + i, proxy) for i in range(num_episodes)]
                urls = [await one.openai_url() for one in episodes] if way == "proxy" else []
                cpu_s, engine_s, started = time.process_time(), cpu_of(pid), time.perf_counter()
                if urls:
                    wall_s = await in_another_process("agents", urls)
                else:
                    await asyncio.gather(*map(directly, episodes))
                    wall_s = time.perf_counter() - started
                row = {"wall_s": wall_s, "cpu_s": time.process_time() - cpu_s, "engine_cpu_s": cpu_of(pid) - engine_s}
                rows[way].append(row)
                for one in episodes:
                    await one.aclose()
                    assert [len(it.turns) for it in one.played(0.0).rollouts(0, 1.0)] == [NUM_TURNS]
                print(way, row, flush=True)
    best = {way: {key: min(row[key] for row in rows[way]) for key in rows[way][0]} for way in rows}
    added_s = best["proxy"]["cpu_s"] - best["direct"]["cpu_s"]
    return {
        "num_episodes": num_episodes,
        **best,
        "added_cpu_ms_per_call": 1000 * added_s / (num_episodes * NUM_TURNS),
        "added_cpu_share": added_s / (best["direct"]["cpu_s"] + best["direct"]["engine_cpu_s"]),
        "added_wall_share": best["proxy"]["wall_s"] / best["direct"]["wall_s"] - 1,
        "rows": rows,
    }


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
        read = await in_another_process("reader", [await one.openai_url()])
        await one.aclose()
    late = sorted(1000 * (at - since) for at, since in zip(read, given, strict=True))
    return {"median_ms": statistics.median(late), "p90_ms": late[int(0.9 * len(late))], "num_tokens": len(late)}


async def in_a_row(template: ChatTemplate, num_calls: int) -> dict[str, float]:
    """Return how much memory many calls leave behind, and what one costs."""

    async def generate(request: GenerateRequest) -> Completion:
        return completion_of((97,) * NUM_TOKENS)

    async def calls(proxy: ProxyServer, client: httpx.AsyncClient, num: int) -> None:
        for number in range(num // 10):
            one = episode(template, generate, number, proxy)
            url = await one.openai_url()
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for _ in range(10):
                answer = await client.post(f"{url}/chat/completions", json={"messages": messages})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def engine(model: Path) -> AsyncGenerator[tuple[str, int], None]:
    ready = model.with_suffix(".ready")
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--exit-with-stdin"]
    command += ["--ready-file", str(ready), "--threads", "1", "--max-concurrent", "256", "--device", "cpu"]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(300):
            while not ready.exists():  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.1)
        found = json.loads(ready.read_text())
        yield found["url"], found["pid"]
    finally:
        process.terminate()
        await process.wait()


async def measure(num_episodes: int, num_calls: int) -> dict[str, Any]:
    template = ChatTemplate(byte_tokenizer())
    rows: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    rows["streaming"] = await streamed(template)
    print(rows["streaming"], flush=True)
    rows["in_a_row"] = await in_a_row(template, num_calls)
    print(rows["in_a_row"], flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        save_tiny_model(create_tiny_model(TinyShape("llama", 64, 2, 2, 1024), 0), model)
        async with engine(model) as (url, pid):
            rows["at_once"] = await played_at_once(url, pid, template, num_episodes)
    rows["load_average_after"] = os.getloadavg()[0]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--role", choices=("agents", "reader"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "agents":
        asyncio.run(agents(json.load(sys.stdin)))
    elif arguments.role == "reader":
        (url,) = json.load(sys.stdin)
        asyncio.run(reader(url))
    else:
        write_results("proxy", asyncio.run(measure(arguments.episodes, arguments.calls)))


if __name__ == "__main__":
    main()
