"""Compares HTTP clients: calls per second, and processor time per call of the calling process.

    python benchmarks/http_clients.py [--rounds 5] [--seconds 5] [--in-flight 1 256 10000] [--before WORKTREE]

One server in another process answers each request with the same 1 kB, which costs it almost nothing. The clients take
turns; each turn is a process of its own, and ratios compare the turns of one round, so that other work on the machine
moves both sides.

- ``ours``: `BoundedClient` with `ConnectionPool`, which is what `HttpEndpoint` uses by default.
- ``ours, given a client``: the same with ``client=httpx.AsyncClient(transport=ConnectionPool())``.
- ``httpx``: `BoundedClient`, given a client with httpx's own transport.
- ``before``: the client of the commit that is checked out at WORKTREE (``git worktree add WORKTREE e55b512``).

Run it on an idle machine; it takes about a quarter of an hour. Prints a table and writes ``results/http-clients.json``.
"""

# ruff: noqa: ASYNC110 - it measures the loop from outside

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from results import write_results

ROOT = Path(__file__).parents[1]
CONTENT = json.dumps({"token_ids": list(range(200)), "text": "x"})
ANSWER = (
    f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(CONTENT)}\r\n\r\n{CONTENT}".encode()
)
BODY = json.dumps({"prompt_token_ids": list(range(64))})
HEADERS = {"content-type": "application/json", "authorization": "Bearer token"}
WARM_UP_S = 0.2
CLIENTS = ("ours", "ours, given a client", "httpx", "before")
Exchange = Callable[[], Awaitable[tuple[int, bytes]]]


# ------------------------------------------------------------------------------------------------- the server's process


async def serve(held: int) -> None:
    """Answer requests until standard input ends, so that ``held`` requests are outstanding at any time."""
    waiting: list[asyncio.Transport] = []

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"}"):
                waiting.append(self.transport)
                if len(waiting) > held:
                    waiting.pop(0).write(ANSWER)

    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=20_000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


# ------------------------------------------------------------------------------------------------- a client's process


def exchange_of(kind: str, url: str) -> Exchange:
    """Return a function that makes one call."""
    if kind == "before":
        from inflight.http.connection import HttpConnection  # type: ignore[import-not-found]  # of the other commit

        old = HttpConnection(url)
        return lambda: old.exchange("POST", "/v1/generate", timeout_s=600, content=BODY, headers=HEADERS)
    import httpx

    from inflight.http.bounded_client import BoundedClient
    from inflight.http.connection_pool import ConnectionPool

    client = None
    if kind == "ours, given a client":
        client = httpx.AsyncClient(transport=ConnectionPool())
    elif kind == "httpx":
        client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
    bounded = BoundedClient(url, client=client)
    return lambda: bounded.request("POST", "/v1/generate", timeout_s=600, content=BODY, headers=HEADERS)


def give_up_after(began: float, patience_s: float) -> None:
    """End this process, with figures of zero, if its patience is over; ending the calls in order could take as long."""
    if time.perf_counter() - began > patience_s:
        print(json.dumps({"calls": 0, "calls_per_s": 0.0, "processor_us_per_call": 0.0}), flush=True)
        os._exit(0)


async def measure(kind: str, url: str, in_flight: int, seconds: float, patience_s: float) -> dict[str, float]:
    """Keep ``in_flight`` calls outstanding for so long, and return how many ended and what they took.

    The figures are zero if the calls are not under way after ``patience_s``.
    """
    exchange = exchange_of(kind, url)
    num_done = 0

    async def call_again_and_again() -> None:
        nonlocal num_done
        while True:
            status, content = await exchange()
            assert (status, len(content)) == (200, len(CONTENT))
            num_done += 1

    async with asyncio.TaskGroup() as group:
        tasks = []
        opened = time.perf_counter()
        for i in range(in_flight):
            tasks.append(group.create_task(call_again_and_again()))
            if i % 100 == 99:
                give_up_after(opened, patience_s)
                await asyncio.sleep(0.05)  # connections are opened slower than a listening queue overflows
        while num_done == 0:
            give_up_after(opened, patience_s)
            await asyncio.sleep(0.01)
        await asyncio.sleep(WARM_UP_S)
        before, began, began_processor = num_done, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            await asyncio.sleep(0.05)
        num, wall_s, processor_s = num_done - before, time.perf_counter() - began, time.process_time() - began_processor
        for task in tasks:
            task.cancel()
    return {"calls": num, "calls_per_s": num / wall_s, "processor_us_per_call": 1e6 * processor_s / max(num, 1)}


# ------------------------------------------------------------------------------------------------- rounds


@contextlib.contextmanager
def started_server(held: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.stdin.close()


def take_turn(kind: str, in_flight: int, seconds: float, patience_s: float, before: Path | None) -> dict[str, float]:
    source = (before if kind == "before" and before is not None else ROOT) / "src"
    # All but the last 8 requests are held, so that the server's answers follow the client's calls one by one.
    with started_server(max(0, in_flight - 8)) as url:
        command = [sys.executable, __file__, "--measure", kind, url, str(in_flight), str(seconds), str(patience_s)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(source)},
            check=True,
            stdout=subprocess.PIPE,
            timeout=seconds + 3 * patience_s,
        )
    turn: dict[str, float] = json.loads(done.stdout)
    return turn


def rows_of(turns: list[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """Return medians over the rounds, with the median, least and greatest ratio to ``reference`` in the same round."""
    rows = []
    for in_flight in sorted({turn["in_flight"] for turn in turns}):
        here = [turn for turn in turns if turn["in_flight"] == in_flight]
        base = {turn["round"]: turn for turn in here if turn["client"] == reference and turn["calls"]}
        for kind in dict.fromkeys(turn["client"] for turn in here):
            mine = [turn for turn in here if turn["client"] == kind and turn["calls"] and turn["round"] in base]
            row: dict[str, Any] = {"in_flight": in_flight, "client": kind, "rounds": len(mine)}
            for name in ("calls_per_s", "processor_us_per_call") if mine else ():
                ratios = [turn[name] / base[turn["round"]][name] for turn in mine]
                row[name] = statistics.median(turn[name] for turn in mine)
                row[f"{name}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], reference: str) -> None:
    print(f"\nmedians; in brackets the ratio to {reference!r} in the same round: median (least to greatest)\n")
    print(f"{'in flight':>9}  {'client':22}{'calls/s':>9}{'':24}{'processor us/call':>17}")
    for row in rows:
        cells = [f"{row['in_flight']:9,}  {row['client']:22}"]
        if not row["rounds"]:
            cells.append("abandoned: its calls were not under way within --patience")
        for name, width in (("calls_per_s", 9), ("processor_us_per_call", 9)) if row["rounds"] else ():
            ratio, least, greatest = row[f"{name}_ratio"]
            cells.append(f"{row[name]:{width},.0f}  [{ratio:.2f} ({least:.2f} to {greatest:.2f})]")
        print("   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each turn measures")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="seconds in which the first call has to end; else the client abandons at this number in flight",
    )
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1, 256, 10_000])
    parser.add_argument("--only", nargs="*", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--before", type=Path, help="a worktree of the commit with the former client")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.serve is not None:
        return asyncio.run(serve(arguments.serve))
    if arguments.measure is not None:
        kind, url, in_flight, seconds, patience_s = arguments.measure
        turn = asyncio.run(measure(kind, url, int(in_flight), float(seconds), float(patience_s)))
        return print(json.dumps(turn))
    clients = [it for it in arguments.only if it != "before" or arguments.before is not None]
    reference = "before" if "before" in clients else clients[0]
    turns: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for in_flight in arguments.in_flight:
            for kind in clients if number % 2 == 0 else clients[::-1]:
                if any((it["in_flight"], it["client"], it["calls"]) == (in_flight, kind, 0) for it in turns):
                    continue  # it abandoned in an earlier round
                turn = take_turn(kind, in_flight, arguments.seconds, arguments.patience, arguments.before)
                turns.append({"round": number, "in_flight": in_flight, "client": kind, **turn})
                print(
                    f"round {number + 1} of {arguments.rounds}: {in_flight:,} in flight, {kind}: "
                    f"{turn['calls_per_s']:,.0f} calls/s, {turn['processor_us_per_call']:,.0f} us per call",
                    flush=True,
                )
    rows = rows_of(turns, reference)
    show(rows, reference)
    versions = {package: version(package) for package in ("httpx", "httpcore", "h11")}
    write_results("http-clients", {"versions": versions, "reference": reference, "medians": rows, "turns": turns})


if __name__ == "__main__":
    main()
