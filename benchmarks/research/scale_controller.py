"""What one controller can do: 64 endpoints, 10,000 running requests, a million tokens per step.

    python -m benchmarks.research.scale_controller [--name after] [--requests 10000] [--tokens-per-s 50000] ...

Runs `inflight train` as users do. Its servers are simulated (`simulated.py`), in a few processes, and speak the
contract over HTTP; its trainer rank takes batches and publishes a small weight to all of them. What is measured is the
controller's process: CPU seconds and resident memory from /proc between two steps, and how long a slot that an answer
freed waited for the next request, as the servers saw it. Adds a row to ``results/scale-controller.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import DIRECTORY, read_results, write_results
from benchmarks.simulated import SIGMA

from inflight.engines.embedded.tiny import VOCAB_SIZE, TinyShape, create_tiny_model, save_tiny_model

ROOT = Path(__file__).parents[2]
RESULTS = "scale-controller"
CONFIG = """
[run]
directory = "{directory}"
num_steps = {num_steps}
checkpoint_every_steps = 1000000
step_timeout_s = 3600

[model]
path = "{model}"

[task]
name = "benchmarks.simulated:Parity"
params = {{ work = {work} }}
{processes_of_rewards}

[sampling]
group_size = {group_size}
max_tokens = {max_tokens}

[servers]
max_concurrent = {max_concurrent}
attach = {{ urls = {urls} }}

[updates]
transport = "shm"

[rollouts]
max_lag = {max_lag}

[train]
trainer = "benchmarks.simulated:KIND"
tokens_per_worker = {tokens_per_step}
max_tokens_per_micro_batch = 65536
train_on_equal_rewards = true
device = "cpu"
{more}
"""


@contextlib.contextmanager
def servers(settings: argparse.Namespace, directory: Path, token_s: float) -> Iterator[tuple[list[str], list[Any]]]:
    """Start the processes of the simulated endpoints; yield the URLs of these and the processes."""
    per_process = settings.endpoints // settings.processes
    processes = []
    try:
        for i in range(settings.processes):
            arguments = {
                "count": per_process,
                "first": i * per_process,
                "vocab-size": VOCAB_SIZE,
                "median-tokens": median_tokens(settings.mean_tokens),
                "max-tokens": settings.max_tokens,
                "base-s": token_s,
                "knee": settings.requests * settings.group_size / settings.endpoints,
                "report": directory / f"waits-{i}.json",
            }
            process = subprocess.Popen(
                [
                    sys.executable,
                    ROOT / "benchmarks" / "simulated.py",
                    *(f"--{name}={value}" for name, value in arguments.items()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        yield [url for process in processes for url in json.loads(process.stdout.readline())], processes
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def median_tokens(mean_tokens: float) -> float:
    return mean_tokens / math.exp(SIGMA**2 / 2)


def token_seconds(settings: argparse.Namespace) -> float:
    """Return how long a token must take so that all requests together make ``tokens_per_s``."""
    draw = random.Random(0)
    longest, median = [], math.log(median_tokens(settings.mean_tokens))
    for _ in range(4000):
        lengths = [draw.lognormvariate(median, SIGMA) for _ in range(settings.group_size)]
        longest.append(min(settings.max_tokens, max(lengths)))
    tokens = settings.requests * settings.group_size * settings.mean_tokens
    return tokens / settings.tokens_per_s / statistics.fmean(longest)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    line = next(it for it in Path(f"/proc/{pid}/status").read_text().splitlines() if it.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def followed(settings: argparse.Namespace, run: subprocess.Popen[Any], rows: Path, on_begin: Any) -> list[Any]:
    """Return what was read of the controller after each step: version, time, CPU, memory, completions and tokens."""
    points: list[Any] = []
    offset, deadline = 0, time.monotonic() + settings.limit_s
    while run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if not rows.exists():
            continue
        with rows.open() as file:
            file.seek(offset)
            lines = [line for line in file if line.endswith("\n")]
            offset += sum(map(len, lines))
        for line in lines:
            row = json.loads(line)
            num_tokens = round(row["completion_tokens_per_s"] * row["time_s"])
            at = {"version": row["version"], "at_s": time.monotonic(), "cpu_s": cpu_s(run.pid)}
            points.append({**at, "rss_mib": rss_mib(run.pid), "tokens": num_tokens, "samples": row["num_samples"]})
            points[-1]["groups_running"] = row["groups_running"]
            if row["version"] == settings.warm_steps:
                on_begin()
            if settings.verbose:
                print(json.dumps(points[-1]), flush=True)
        if points and points[-1]["version"] >= settings.warm_steps + settings.steps:
            break
    return points


def measured(settings: argparse.Namespace) -> dict[str, Any]:
    os.environ["INFLIGHT_TOKEN"] = secrets.token_urlsafe(16)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    token_s = token_seconds(settings)
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        directory = Path(name)
        save_tiny_model(create_tiny_model(TinyShape(max_model_len=1 << 16), 0), directory / "model")
        with servers(settings, directory, token_s) as (urls, processes):
            config = directory / "run.toml"
            config.write_text(
                CONFIG.format(
                    **vars(settings),
                    processes_of_rewards=f"reward_processes = {n}" if (n := settings.reward_processes) else "",
                    num_steps=settings.warm_steps + settings.steps + 1000,
                    directory=directory / "run",
                    model=directory / "model",
                    urls=json.dumps(urls),
                    max_concurrent=math.ceil(settings.requests / settings.endpoints) * settings.group_size,
                )
            )

            def begin() -> None:
                for process in processes:
                    process.stdin.write("begin\n")
                    process.stdin.flush()
                if settings.profile:
                    sampler = ["py-spy", "record", "-p", str(run.pid), "-d", str(settings.profile_s), "-r", "200"]
                    subprocess.Popen([*sampler, "-f", "raw", "-o", settings.profile, *settings.profile_more])

            with (directory / "output.log").open("w") as log:
                run = subprocess.Popen(
                    [sys.executable, "-m", "inflight", "train", config],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            try:
                points = followed(settings, run, directory / "run" / "metrics.jsonl", begin)
            finally:
                run.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(60)
                run.kill()
        if points[-1:] == [] or points[-1]["version"] <= settings.warm_steps:
            raise SystemExit((directory / "output.log").read_text()[-4000:])
        waits = [wait for path in directory.glob("waits-*.json") for wait in json.loads(path.read_text())]
    return row_of(settings, points, sorted(waits))


def row_of(settings: argparse.Namespace, points: list[Any], waits: list[float]) -> dict[str, Any]:
    first, last = points[settings.warm_steps - 1], points[-1]
    spent_s, elapsed_s = last["cpu_s"] - first["cpu_s"], last["at_s"] - first["at_s"]
    tokens, samples = last["tokens"] - first["tokens"], last["samples"] - first["samples"]
    requests = samples / settings.group_size
    few = points[:: max(1, len(points) // 50)]
    return {
        "command": "python -m benchmarks.research.scale_controller " + " ".join(sys.argv[1:]),
        "settings": {
            k: v for k, v in vars(settings).items() if isinstance(v, int | float) and not k.startswith("prof")
        },
        "steps": last["version"] - first["version"],
        "tokens": tokens,
        "requests": requests,
        "elapsed_s": elapsed_s,
        "cpu_s": spent_s,
        "cpu_us_per_token": 1e6 * spent_s / tokens,
        "cpu_us_per_request": 1e6 * spent_s / requests,
        "tokens_per_cpu_s": tokens / spent_s,
        "tokens_per_s": tokens / elapsed_s,
        "core_share": spent_s / elapsed_s,
        "requests_running": statistics.fmean(point["groups_running"] for point in points[settings.warm_steps :]),
        "slot_wait_ms": {p: 1000 * waits[int(len(waits) * float(p) / 100)] for p in ("50", "90", "99")}
        if waits
        else {},
        "num_waits": len(waits),
        "rss_mib": {"first": first["rss_mib"], "last": last["rss_mib"], "most": max(p["rss_mib"] for p in points)},
        "rss_by_step": [[point["version"], round(point["rss_mib"])] for point in few],
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="row of the results to write; none: print only")
    parser.add_argument("--endpoints", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--mean-tokens", type=float, default=225)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--tokens-per-s", type=float, default=50_000)
    parser.add_argument("--tokens-per-step", type=int, default=1_000_000)
    parser.add_argument("--max-lag", type=int, default=32)
    parser.add_argument("--work", type=int, default=0, help="repeats that make scoring slow")
    parser.add_argument("--reward-processes", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=540)
    parser.add_argument("--more", default="", help="more lines of the configuration")
    parser.add_argument("--profile", help="write a profile of py-spy to this file")
    parser.add_argument("--profile-s", type=int, default=30)
    parser.add_argument("--profile-more", nargs="*", default=[])
    parser.add_argument("--verbose", action="store_true")
    settings = parser.parse_args()
    row = measured(settings)
    print(json.dumps(row, indent=2))
    if settings.name:
        rows = read_results(RESULTS)["rows"] if (DIRECTORY / f"{RESULTS}.json").exists() else {}
        write_results(RESULTS, rows | {settings.name: row})


if __name__ == "__main__":
    main()
