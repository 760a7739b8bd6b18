"""Runs `make test` or `make test-slow` again and again, and records each run: no test may fail by luck.

    python benchmarks/test_runs.py --runs 10
    python benchmarks/test_runs.py --runs 10 --busy 2
    python benchmarks/test_runs.py --runs 10 --target test-slow

Run it in a clean checkout. With ``--busy N``, N processes keep processors busy meanwhile. Each run is appended to
benchmarks/results/test_runs.json as it ends, with the commit, the seconds of the tests and the tests that failed; the
output of a failed run goes to standard error. Since machines differ, a record also holds the seconds that one of the
machine's processors takes for a loop of ten million additions before the run; and since a machine may have other work,
the number of processors that processes outside the run used on average, such as the busy ones.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from busy import busy_processes
from results import DIRECTORY, read_results, record_of, write_results

ROOT = Path(__file__).parents[1]
_SUMMARY = re.compile(r"^=+ (?P<counts>.*) in (?P<seconds>[0-9.]+)s.*=+$", re.MULTILINE)


def loop_seconds() -> float:
    """Return the processor time of ten million additions."""
    started, total = time.process_time(), 0
    for i in range(10_000_000):
        total += i
    return time.process_time() - started


def machine_seconds() -> float:
    """Return the processor time that all processes of the machine have used since it started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run_seconds() -> float:
    """Return the processor time of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_of(target: str, num_busy: int) -> dict[str, Any]:
    """Run the target of the Makefile once, and return its record."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    loop_s = loop_seconds()
    started, before = time.time(), machine_seconds() - run_seconds()
    with busy_processes(num_busy):
        ran = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True)
        others_s = machine_seconds() - run_seconds() - before
    elapsed_s = time.time() - started
    if ran.returncode:
        print(ran.stdout, ran.stderr, file=sys.stderr)
    summary = _SUMMARY.search(ran.stdout)
    counts = {}
    if summary is not None:
        counts = {word: int(num) for num, word in re.findall(r"(\d+) (\w+)", summary["counts"])}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime(started)),
        "commit": commit.stdout.strip()[:9],
        "target": target,
        "num_busy": num_busy,
        "processors_of_others": round(others_s / elapsed_s, 2),
        "status": ran.returncode,
        "counts": counts,
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE),
        "seconds": None if summary is None else float(summary["seconds"]),
        "loop_seconds": round(loop_s, 3),
        "machine": record_of("test_runs", [])["machine"],
    }


def main() -> None:
    """Run, and append to the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="number of runs")
    parser.add_argument("--target", choices=("test", "test-slow"), default="test", help="target of the Makefile")
    parser.add_argument("--busy", type=int, default=0, help="number of processes that keep processors busy")
    arguments = parser.parse_args()
    for i in range(arguments.runs):
        record = run_of(arguments.target, arguments.busy)
        rows = read_results("test_runs")["rows"] if (DIRECTORY / "test_runs.json").exists() else []
        write_results("test_runs", [*rows, record])
        words = ", ".join(f"{num} {word}" for word, num in record["counts"].items())
        print(f"run {i + 1} of {arguments.runs}: {words} in {record['seconds']} s", *record["failed"], flush=True)


if __name__ == "__main__":
    main()
