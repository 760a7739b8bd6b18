"""A campaign: many schedules, in several processes, and what came of them in figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from inflight.conformance.chaos.plan import TRANSPORTS, Transport, sites

_SCHEDULE_LIMIT_S = 600.0
"""A process that ends no schedule for so long hangs: the campaign fails."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Which schedules to run: ``num_schedules`` from ``seed`` on; ``transport`` None has each seed take its own."""

    num_schedules: int
    seed: int = 0
    transport: Transport | None = None
    num_processes: int = 1


def row_of(seed: int, ground: Any, transport: Transport | None) -> dict[str, Any]:
    """Run one schedule; return what is kept of it, as JSON takes it."""
    from inflight.conformance.chaos.schedule import run_schedule

    result = run_schedule(seed, ground, transport)
    return {
        "seed": seed,
        "transport": result.plan.transport,
        "plan": str(result.plan),
        "manner": str(result.manner),
        "struck": [[fault.step.value, fault.kind.value] for fault in result.struck],
        "outcomes": list(result.outcomes),
        "problems": list(result.problems),
        "slowest_publish_s": round(result.slowest_publish_s, 3),
        "wall_s": round(result.wall_s, 3),
        "num_tokens": result.num_tokens,
    }


def rows(campaign: Campaign) -> Iterator[dict[str, Any]]:
    """Yield a row per schedule as it ends, in whichever process; one that dies fails the schedule that it was at.

    Raises ``TimeoutError`` if one hangs.
    """
    lines: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    num_processes = campaign.num_processes
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / f"{number}.log" for number in range(num_processes)]
        processes = [_process(campaign, number, log) for number, log in enumerate(logs)]
        readers = [
            threading.Thread(target=_read, args=(number, process.stdout, lines), daemon=True)
            for number, process in enumerate(processes)
        ]
        for reader in readers:
            reader.start()
        num_open = num_processes
        seeds = [campaign.seed + number for number in range(num_processes)]
        last = time.monotonic()
        try:
            while num_open:
                if time.monotonic() - last > _SCHEDULE_LIMIT_S:
                    raise TimeoutError(f"no schedule ended within {_SCHEDULE_LIMIT_S:g} s")
                if lines.empty():
                    time.sleep(0.05)
                    continue
                number, line = lines.get()
                last = time.monotonic()
                if line is not None:
                    row = json.loads(line)
                    seeds[number] = row["seed"] + num_processes
                    yield row
                    continue
                num_open -= 1
                if (status := processes[number].wait(_SCHEDULE_LIMIT_S)) != 0:
                    said = logs[number].read_text(errors="replace")[-2000:]
                    died = f"the process of this schedule ended with status {status}: {said}"
                    yield {**_nothing(seeds[number], campaign), "problems": [died]}
        finally:
            for process, reader in zip(processes, readers, strict=True):
                process.kill()
                process.wait()
                reader.join(_SCHEDULE_LIMIT_S)
                if process.stdout is not None:
                    process.stdout.close()


def summary(found: Sequence[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """Return the figures of a campaign."""
    struck = Counter((row["transport"], *where) for row in found for where in map(tuple, row["struck"]))
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in found:
        outcomes[row["transport"]].update(outcome.split(":")[0] for outcome in row["outcomes"])
    every = [(t, step.value, kind.value) for t in TRANSPORTS for step, kind in sites(t)]
    slowest = sorted(found, key=lambda row: -row["wall_s"])[:5]
    return {
        "num_schedules": len(found),
        "num_faults": sum(struck.values()),
        "num_publishes": sum(len(row["outcomes"]) for row in found),
        "num_tokens": sum(row["num_tokens"] for row in found),
        "schedules": dict(Counter(row["transport"] for row in found)),
        "struck": {" ".join(key): num for key, num in sorted(struck.items())},
        "never_struck": [" ".join(site) for site in every if site not in struck],
        "outcomes": {transport: dict(counts) for transport, counts in sorted(outcomes.items())},
        "failed": [
            {key: row[key] for key in ("seed", "transport", "plan", "manner", "problems")}
            for row in found
            if row["problems"]
        ],
        "slowest": [{key: row[key] for key in ("seed", "transport", "plan", "wall_s")} for row in slowest],
        "slowest_publish_s": max((row["slowest_publish_s"] for row in found), default=0.0),
        "wall_s": round(wall_s, 1),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: version(package) for package in ("inflight", "torch", "transformers")},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if every schedule held."""
    parser = argparse.ArgumentParser(prog="python -m inflight.conformance.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--transport", choices=TRANSPORTS, default=None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=None, help="stop after so long, with what was run until then")
    parser.add_argument("--json", type=Path, default=None, help="where the figures are written")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    campaign = Campaign(options.schedules, options.seed, options.transport, options.processes)
    if options.worker is not None:
        return _work(campaign, options.worker)
    started = time.monotonic()
    found = []
    for row in _with_progress(rows(campaign), campaign.num_schedules):
        found.append(row)
        if options.limit_s is not None and time.monotonic() - started > options.limit_s:
            break
    figures = summary(found, time.monotonic() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    for row in figures["failed"]:
        print(f"FAILED {row['plan']}\n  {row['manner']}")
        for problem in row["problems"][:5]:
            print(f"  - {problem}")
    print(
        f"{figures['num_schedules']} schedules, {figures['num_faults']} faults, {figures['num_publishes']} publishes, "
        f"{figures['num_tokens']} tokens in {figures['wall_s']} s: {len(figures['failed'])} failed; "
        f"{len(figures['never_struck'])} sites were never struck"
    )
    is_complete = len(found) == campaign.num_schedules or options.limit_s is not None
    return 0 if is_complete and not figures["failed"] else 1


def _work(campaign: Campaign, number: int) -> int:
    """Run every ``num_processes``-th schedule; print a row of each."""
    import torch

    from inflight.conformance.chaos.schedule import Ground

    torch.set_num_threads(1)
    with Ground() as ground:
        for seed in range(campaign.seed + number, campaign.seed + campaign.num_schedules, campaign.num_processes):
            try:
                row = row_of(seed, ground, campaign.transport)
            except Exception:  # a schedule that could not be judged has failed
                row = {**_nothing(seed, campaign), "problems": [traceback.format_exc()]}
            print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads that a fault left behind must not keep the process


def _nothing(seed: int, campaign: Campaign) -> dict[str, Any]:
    """Return the row of a schedule of which nothing is known."""
    transport = campaign.transport or TRANSPORTS[seed % len(TRANSPORTS)]
    lists: dict[str, Any] = {"struck": [], "outcomes": []}
    figures = {"slowest_publish_s": 0.0, "wall_s": 0.0, "num_tokens": 0}
    return {"seed": seed, "transport": transport, "plan": f"seed {seed}", "manner": "", **lists, **figures}


def _process(campaign: Campaign, number: int, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inflight.conformance.chaos", "--worker", str(number)]
    command += ["--schedules", str(campaign.num_schedules), "--seed", str(campaign.seed)]
    command += ["--processes", str(campaign.num_processes)]
    if campaign.transport is not None:
        command += ["--transport", campaign.transport]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    # What torch and uvicorn say of connections that are cut is of no interest, unless the process dies.
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)


def _read(number: int, stream: IO[str] | None, lines: SimpleQueue[tuple[int, str | None]]) -> None:
    assert stream is not None
    for line in stream:
        if line.startswith("{"):
            lines.put((number, line))
    lines.put((number, None))


def _with_progress(found: Iterable[dict[str, Any]], num_schedules: int) -> Iterator[dict[str, Any]]:
    started, num_failed = time.monotonic(), 0
    for number, row in enumerate(found, 1):
        num_failed += bool(row["problems"])
        elapsed_s = time.monotonic() - started
        if number % 10 == 0 or row["problems"] or number == num_schedules:
            line = f"{number}/{num_schedules} schedules, {num_failed} failed, {elapsed_s / number:.2f} s each"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        yield row
    print(file=sys.stderr)
