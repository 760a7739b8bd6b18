"""What it costs to place a run with Ray, and what a lost host costs.

``python -m benchmarks.scale`` writes ``benchmarks/results/scale.json``; ``--only ray`` or ``--only lost`` does a part.
The rounds of ``ray`` train the same run with launcher ``local`` and with ``ray``, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quickstart import ROOT, quickstart_model
from benchmarks.results import write_results
from tests.launchers.clusters import RayCluster, python_path, ray_cluster

_POLL_S = 0.05
_LIMIT_S = 3600.0


class Run:
    """``inflight train`` of the quickstart in a directory."""

    def __init__(self, directory: Path, model: Path, *overrides: str, ray: RayCluster | None = None) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml")]
        command += ["--model.path", str(model), "--run.directory", str(directory), *overrides]
        if ray is not None:
            command += ["--launcher", "ray"]
        where = {} if ray is None else {"RAY_ADDRESS": ray.address}
        self._log = directory.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **where, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started = time.time()

    def rows(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> float:
        """Return how long it took."""
        began = time.time()
        while not condition():
            if self.process.poll() is not None or time.time() - began > _LIMIT_S:
                raise RuntimeError(f"the run ended or hangs: {self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(_POLL_S)
        return time.time() - began

    def says(self, text: str) -> bool:
        return text in self._log.read_text(errors="replace")

    def finish(self) -> None:
        if self.process.wait(_LIMIT_S) != 0:
            raise RuntimeError(f"the run failed: {self._log.read_text(errors='replace')[-3000:]}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "events.jsonl").read_text().split("\n")[:-1]
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


def launched(directory: Path, model: Path, num_steps: int, ray: RayCluster | None) -> dict[str, float]:
    """Return the seconds until the first publish, and the trained tokens per second between first and last step."""
    run = Run(directory, model, "--run.num_steps", str(num_steps), ray=ray)
    run.finish()
    steps = run.events("train")
    tokens = [row["num_step_tokens"] for row in run.rows()]
    return {
        "start_s": run.events("publish")[0]["end_s"] - run.started,
        "tokens_per_s": sum(tokens[1:]) / (steps[-1]["end_s"] - steps[0]["end_s"]),
    }


def part_ray(folder: Path, model: Path, num_rounds: int, num_steps: int) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with ray_cluster(folder / "cluster.log", host_a=4, host_b=4) as cluster:
        for number in range(num_rounds):
            row: dict[str, Any] = {}
            for name in ("local", "ray") if number % 2 == 0 else ("ray", "local"):
                where = folder / f"{name}-{number}"
                row[name] = launched(where, model, num_steps, cluster if name == "ray" else None)
            rounds.append(row)
            print(row, flush=True)
    return {
        "rounds": rounds,
        "tokens_ratio": statistics.median(it["ray"]["tokens_per_s"] / it["local"]["tokens_per_s"] for it in rounds),
        "start_difference_s": statistics.median(it["ray"]["start_s"] - it["local"]["start_s"] for it in rounds),
    }


def part_lost(folder: Path, model: Path) -> dict[str, Any]:
    """Kill the host of the ranks, and then that of a server; return seconds until the next step, and until it is back.

    Hosts of the same names come up at once, so what is measured is the noticing and the starting.
    """
    with ray_cluster(folder / "lost.log", host_a=4, host_b=2, host_c=2) as cluster:
        fleet = '[{ place = "host_a", max_concurrent = 128 }, { place = "host_b", max_concurrent = 128 }]'
        settings = ("--servers.fleet", fleet, "--train.place", "host_c", "--run.restarts", "3")
        every = ("--run.checkpoint_every_steps", "5", "--run.num_steps", "100000", "--run.stop_at_reward", "2")
        run = Run(folder / "lost", model, *settings, *every, ray=cluster)
        start_s = run.wait_until(lambda: bool(run.rows()))
        run.wait_until(lambda: len(run.rows()) >= 12)
        before = run.rows()[-1]["version"]
        cluster.kill("host_c")
        cluster.add("host_c", 2)
        run.wait_until(lambda: run.says("start again from the last checkpoint"))
        ranks_s = run.wait_until(lambda: run.rows()[-1]["version"] > before)
        cluster.kill("host_b")
        cluster.add("host_b", 2)
        server_s = run.wait_until(lambda: run.says("server-1 was restarted"))
        run.process.send_signal(2)
        run.process.wait(300)
        return {"start_s": start_s, "ranks_s": ranks_s, "server_s": server_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("ray", "lost"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", type=Path, help="a model directory (default: the quickstart's, made if need be)")
    arguments = parser.parse_args()
    model = arguments.model or quickstart_model()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {}
        if arguments.only in (None, "ray"):
            result["ray"] = part_ray(folder, model, arguments.rounds, arguments.steps)
        if arguments.only in (None, "lost"):
            result["lost"] = part_lost(folder, model)
    print(json.dumps(result, indent=2))
    write_results("scale", result)


if __name__ == "__main__":
    main()
