"""What it costs to place a run with Ray, and what a lost host costs.

``python -m benchmarks.research.scale`` writes ``benchmarks/results/scale.json``; ``--only`` does a part and keeps the
others. The rounds of ``ray`` train the same run with launcher ``local`` and with ``ray``, in turns. ``curve`` learns
on two hosts, undisturbed and with a host killed that has the trainer rank and one of two servers; it also plots
``docs/images/scale.png``. ``senders`` learns in network namespaces, with two trainer hosts that both send weights, of
which one is killed and comes back, and two server hosts; it needs root and is not part of a run without ``--only``.
"""

from __future__ import annotations

import argparse
import contextlib
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

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from benchmarks.quickstart import ROOT, quickstart_model
from benchmarks.results import read_results, write_results
from tests.launchers.clusters import RayCluster, python_path, ray_cluster
from tests.launchers.namespaced import NamespacedCluster, namespaced_cluster

from inflight.run.record.plots import smoothed

_POLL_S = 0.05
_LIMIT_S = 3600.0


class Run:
    """``inflight train`` of the quickstart in a directory."""

    def __init__(
        self, directory: Path, model: Path, *overrides: str, ray: RayCluster | NamespacedCluster | None = None
    ) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml")]
        command += ["--model.path", str(model), "--run.directory", str(directory), *overrides]
        if ray is not None:
            command += ["--launcher", "ray"]
        if isinstance(ray, NamespacedCluster):
            command = ["ip", "netns", "exec", ray.head.name, *command]
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
        run.wait_until(lambda: run.says("restart from the last checkpoint"))
        ranks_s = run.wait_until(lambda: run.rows()[-1]["version"] > before)
        cluster.kill("host_b")
        cluster.add("host_b", 2)
        server_s = run.wait_until(lambda: run.says("server-1 was restarted"))
        run.process.send_signal(2)
        run.process.wait(300)
        return {"start_s": start_s, "ranks_s": ranks_s, "server_s": server_s}


def part_curve(folder: Path, model: Path, num_steps: int) -> dict[str, Any]:
    """Learn on two hosts; in the second run one of them is killed after a third of the steps, and another one comes."""
    fleet = '[{ place = "host_a", max_concurrent = 128 }, { place = "host_b", max_concurrent = 128 }]'
    settings = ("--servers.fleet", fleet, "--train.place", "host_b", "--run.num_steps", str(num_steps))
    settings += ("--run.restarts", "1", "--run.checkpoint_every_steps", "10")
    result: dict[str, Any] = {}
    with ray_cluster(folder / "curve.log", host_a=4, host_b=4) as cluster:
        for name in ("undisturbed", "killed"):
            run = Run(folder / name, model, *settings, ray=cluster)
            killed_at = None
            if name == "killed":
                run.wait_until(lambda run=run: len(run.rows()) > num_steps // 3)  # type: ignore[misc]
                killed_at = run.rows()[-1]["version"]
                cluster.kill("host_b")
                cluster.add("host_b", 4)
            run.finish()
            rows = run.rows()
            restored = run.events("fleet_changed")
            result[name] = {
                "killed_at": killed_at,
                "rewards": [row["reward"] for row in rows],
                "versions": [row["version"] for row in rows],
                "endpoints": len({group["endpoint"] for group in run.events("group")}),
                "num_fleet_events": len(restored),
                "run_s": time.time() - run.started,
            }
            print(name, rows[-1]["version"], rows[-1]["reward"], flush=True)
    return result


def part_senders(folder: Path, model: Path, num_steps: int) -> dict[str, Any]:
    """Learn with two trainer hosts that send their parts of the weights, one of which is killed and comes back."""
    with namespaced_cluster(folder, "trainer_1", "trainer_2", "server_1", "server_2") as cluster:
        settings = ("--servers.count", "2", "--servers.place", "server", "--servers.max_concurrent", "128")
        settings += ("--train.place", "trainer", "--train.num_ranks", "2")
        settings += ("--updates.sharded", "true", "--updates.transport", "http")
        settings += ("--run.restarts", "1", "--run.checkpoint_every_steps", "10", "--run.num_steps", str(num_steps))
        run = Run(folder / "senders", model, *settings, ray=cluster)
        run.wait_until(lambda: len(run.rows()) > num_steps // 3)
        killed_at = run.rows()[-1]["version"]
        cluster.kill("trainer_2")
        cluster.start("trainer_2")
        back_s = run.wait_until(lambda: run.rows()[-1]["version"] > killed_at)
        run.finish()
        rows = run.rows()
    outcomes = [outcome for row in rows for outcome in row["publish"]["outcomes"].values()]
    return {
        "killed_at": killed_at,
        "back_s": back_s,
        "rewards": [row["reward"] for row in rows],
        "versions": [row["version"] for row in rows],
        "num_applied": outcomes.count("applied"),
        "num_outcomes": len(outcomes),
        "run_s": time.time() - run.started,
    }


def plot_curve(result: dict[str, Any]) -> None:
    """Reward of both runs over the optimizer steps, and where the host was killed."""
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, style in (("undisturbed", {"color": "#8c959f"}), ("killed", {"color": "#8250df"})):
        run = result[name]
        known = [(v, r) for v, r in zip(run["versions"], run["rewards"], strict=True) if r is not None]
        axis.plot([v for v, _ in known], smoothed([r for _, r in known]), label=name, **style)
    axis.axvline(result["killed"]["killed_at"], color="#cf222e", linestyle=":", label="a host is killed")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("mean reward (ten steps)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(ROOT / "docs" / "images" / "scale.png", dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("ray", "lost", "curve", "senders"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", type=Path, help="a model directory (default: the quickstart's, made if need be)")
    arguments = parser.parse_args()
    model = arguments.model or quickstart_model()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            result = read_results("scale")["rows"]
        if arguments.only in (None, "ray"):
            result["ray"] = part_ray(folder, model, arguments.rounds, arguments.steps)
        if arguments.only in (None, "lost"):
            result["lost"] = part_lost(folder, model)
        if arguments.only in (None, "curve"):
            result["curve"] = part_curve(folder, model, 2 * arguments.steps)
            plot_curve(result["curve"])
        if arguments.only == "senders":
            result["senders"] = part_senders(folder, model, arguments.steps)
    write_results("scale", result)


if __name__ == "__main__":
    main()
