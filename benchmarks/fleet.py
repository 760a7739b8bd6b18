"""The quickstart with an undisturbed fleet, and with servers that join, are killed and come back.

``python -m benchmarks.fleet`` writes ``benchmarks/results/fleet.json`` and ``docs/images/fleet.png``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.quickstart import ROOT, mean_reward, quickstart_model
from benchmarks.results import read_results, write_results

_LIMIT_S = 3600.0
_POLL_S = 0.1


class Servers:
    """Server processes, and the file that lists them."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.listed = directory / "servers.txt"
        self.token = secrets.token_urlsafe(24)
        self._directory = directory
        self._model = model
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, port: int = 0) -> str:
        """Start a server and wait until it answers; returns its URL."""
        ready = self._directory / f"{name}.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "inflight", "serve", str(self._model), "--port", str(port), "--threads", "1"]
        command += ["--max-concurrent", "128", "--ready-file", str(ready), "--exit-with-stdin"]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "INFLIGHT_TOKEN": self.token, "OMP_NUM_THREADS": "1"},
            )
        process = self._processes[name]
        _wait(lambda: ready.exists() or process.poll() is not None, f"{name} to start", 600.0)
        if not ready.exists():
            raise RuntimeError(f"{name} did not start: {(self._directory / f'{name}.log').read_text()}")
        return str(json.loads(ready.read_text())["url"])

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        """Kill all that are left."""
        for name in list(self._processes):
            self.kill(name)


def run_fleet(num_steps: int, *, disturbed: bool) -> dict[str, Any]:
    """Run the quickstart on three servers of a file; return how its reward went, and what happened to the fleet.

    Disturbed: it begins with two, and at fixed steps the third joins and two are killed and come back.
    """
    model = quickstart_model()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        servers = Servers(directory, model)
        try:
            urls = [servers.start(f"server-{i}") for i in range(3)]
            servers.listed.write_text("".join(f"{url}\n" for url in urls[: 2 if disturbed else 3]))
            told: list[list[Any]] = []
            started = time.monotonic()
            run = _start_run(directory, servers, model, num_steps)
            try:
                if disturbed:
                    _disturb(directory / "run", servers, urls, num_steps, run, told)
                _wait(lambda: run.poll() is not None, "the run to end", _LIMIT_S)
            finally:
                run.kill()
                run.wait(10)
            seconds = time.monotonic() - started
            if run.returncode != 0:
                raise RuntimeError(f"the run ended with status {run.returncode}: {(directory / 'run.log').read_text()}")
            return _facts(directory / "run", urls, told, seconds)
        finally:
            servers.stop()


def _start_run(directory: Path, servers: Servers, model: Path, num_steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml")]
    command += ["--run.directory", str(directory / "run"), "--run.num_steps", str(num_steps)]
    command += ["--model.path", str(model), "--servers.attach.urls_file", str(servers.listed)]
    environment = {**os.environ, "INFLIGHT_TOKEN": servers.token}
    with (directory / "run.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _disturb(
    run: Path,
    servers: Servers,
    urls: list[str],
    num_steps: int,
    process: subprocess.Popen[bytes],
    told: list[list[Any]],
) -> None:
    """Kill and start servers at fixed steps; ``told`` gets (step, server, what)."""

    def after(num_steps: int, index: int, what: str) -> None:
        _wait(lambda: len(_rows(run)) >= num_steps or process.poll() is not None, f"step {num_steps}", _LIMIT_S)
        told.append([len(_rows(run)), index, what])
        print(f"step {told[-1][0]}: server {index} {what}", flush=True)

    def is_back(url: str) -> bool:
        return process.poll() is not None or any(url in event["restored"] for event in _events(run, "fleet_changed"))

    after(int(0.15 * num_steps), 2, "is listed")
    servers.listed.write_text("".join(f"{url}\n" for url in urls))
    next_step = int(0.3 * num_steps)
    for index in (1, 0):
        after(next_step, index, "is killed")
        servers.kill(f"server-{index}")
        after(told[-1][0] + num_steps // 20, index, "is restarted")
        servers.start(f"server-{index}", urlsplit(urls[index]).port or 0)
        _wait(functools.partial(is_back, urls[index]), f"server {index} to be back", _LIMIT_S)
        next_step = len(_rows(run)) + num_steps // 10


def _facts(run: Path, urls: Sequence[str], told: Sequence[Sequence[Any]], seconds: float) -> dict[str, Any]:
    """What came of one run; servers are named by their index."""
    names = {url: f"server {index}" for index, url in enumerate(urls)}
    rows = _rows(run)
    fleet = _events(run, "fleet_changed")
    ledger = json.loads((run / "checkpoints" / f"version-{rows[-1]['version']:06d}.json").read_text())["ledger"]
    num_settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    groups = _events(run, "group")
    return {
        "steps": len(rows),
        "seconds": seconds,
        "reward_first": mean_reward(rows[:10]),
        "reward_last": mean_reward(rows[-10:]),
        "version": rows[-1]["version"],
        "versions_published": sorted({row["publish"]["version"] for row in rows if row["publish"]})[-1],
        "groups_issued": ledger["next_new"],
        "groups_trained": ledger["num_trained"],
        "groups_dropped": ledger["num_dropped"],
        "groups_under_way_at_the_end": len(ledger["unsettled"]),
        "groups_reissued": ledger["num_requeued"],
        "groups_lost": ledger["next_new"] - num_settled - len(ledger["unsettled"]),
        "groups_by_server": {name: sum(g["endpoint"] == url for g in groups) for url, name in names.items()},
        "lag_max": max(row["lag_max"] for row in rows),
        "done_to_servers": [list(what) for what in told],
        "changes": [
            [event["version"], names[name], before, after]
            for event in fleet
            for name, before, after in event["changes"]
        ],
        "curve": [[row["version"], row["time_s"], row["reward"]] for row in rows],
    }


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def _rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_POLL_S)


def plot_fleet(rows: dict[str, Any], path: Path) -> None:
    """Draw both reward curves, and what was done to the servers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from inflight.run.record.plots import smoothed

    figure, axis = plt.subplots(figsize=(10, 4.5), layout="constrained")
    for name, colour in (("undisturbed", "#1f6feb"), ("disturbed", "#cf222e")):
        curve = [(version, reward) for version, _, reward in rows[name]["curve"] if reward is not None]
        versions, rewards = [version for version, _ in curve], [reward for _, reward in curve]
        axis.plot(versions, rewards, ".", color=colour, alpha=0.2)
        axis.plot(versions, smoothed(rewards), color=colour, label=f"{name}: mean of ten steps")
    for step, index, what in rows["disturbed"]["done_to_servers"]:
        axis.axvline(step, color="#57606a", linestyle=":", linewidth=1)
        label = f"server {index} {what}"
        axis.annotate(
            label, (step, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, ha="right", va="bottom"
        )
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("mean reward")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--plot-only", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    if not arguments.plot_only:
        rows: dict[str, Any] = {}
        for name in ("disturbed", "undisturbed"):
            rows[name] = run_fleet(arguments.steps, disturbed=name == "disturbed")
            facts = {key: value for key, value in rows[name].items() if key not in ("curve", "changes")}
            print(json.dumps({name: facts}), flush=True)
        write_results("fleet", rows)
    plot_fleet(read_results("fleet")["rows"], ROOT / "docs" / "images" / "fleet.png")


if __name__ == "__main__":
    main()
