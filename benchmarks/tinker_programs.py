"""Reward curves of Tinker programs against ``inflight tinker`` on a real model, two recipes of tinker-cookbook among
them.

    inflight pretrained-model models/smollm2
    python -m benchmarks.tinker_programs --client CLIENT/bin/python     # with tinker and tinker-cookbook

Each program has a server of its own, one after the other. Programs that are measured again replace their rows in
``results/tinker_programs.json``; the plot shows all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from benchmarks.results import DIRECTORY, read_results, write_results

from inflight.dialects.tinker.checkpoints import CheckpointStore

ROOT = Path(__file__).parents[1]
TOKEN = "benchmark"
START_S = 300.0
COOKBOOK = "renderer_name=qwen3_instruct eval_every=0 save_every=0 behavior_if_log_dir_exists=delete"


def _recipe_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return reward and seconds of a step from a line of tinker-cookbook's metrics; its sampling clients are
    snapshots."""
    if "env/all/reward/total" not in row:
        return None
    num_tokens = row["env/all/total_ac_tokens"]
    return {"reward": row["env/all/reward/total"], "seconds": row["time/total"], "num_sampled_tokens": num_tokens}


@dataclass(frozen=True, slots=True)
class Program:
    """A program, its command line, and how a line of its log is read."""

    command: str
    """``{model}`` and ``{log}`` are filled in."""
    metrics: str
    """The file of its metrics in the log directory."""
    row_of: Callable[[dict[str, Any]], dict[str, Any] | None]
    kind: str
    colour: str
    is_warmed_up: bool = False
    """Whether the model first learns the format of the answers: see ``tinker_warmup.py``."""


PROGRAMS = {
    "arithmetic": Program(
        "-m tinker_cookbook.recipes.math_rl.train env=arithmetic model_name={model} log_path={log} "
        "loss_fn=importance_sampling group_size=16 groups_per_batch=6 learning_rate=4e-4 max_steps=40 max_tokens=16 "
        + COOKBOOK,
        "metrics.jsonl",
        _recipe_row,
        "snapshot",
        "#0969da",
    ),
    "guess_number": Program(
        "-m tinker_cookbook.recipes.multiplayer_rl.guess_number.train model_name={model} log_path={log} "
        "group_size=8 batch_size=2 learning_rate=4e-4 max_steps=15 max_tokens=12 " + COOKBOOK,
        "metrics.jsonl",
        _recipe_row,
        "snapshot",
        "#8250df",
        is_warmed_up=True,
    ),
    "sums": Program(
        "examples/tinker_program.py {model} sums --rank 32 --learning-rate 4e-4 --steps 30 --log {log}/log.jsonl",
        "log.jsonl",
        lambda row: row,
        "inflight",
        "#bc4c00",
    ),
}


@contextmanager
def serving(model: Path, directory: Path, arguments: Sequence[str]) -> Iterator[dict[str, str]]:
    """Serve a model; yield the environment of a client."""
    directory.mkdir()
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "inflight", "tinker", str(model), "--port", "0", "--dtype", "bfloat16"]
    command += ["--directory", str(directory), "--ready-file", str(ready), "--exit-with-stdin", *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**environment, "INFLIGHT_TOKEN": TOKEN}) as server:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        url = json.loads(ready.read_text())["url"]
        yield environment | {"TINKER_BASE_URL": url, "TINKER_API_KEY": f"tml-{TOKEN}"}
        assert server.stdin is not None
        server.stdin.close()


def call(client: Path, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program of the client and return what it printed."""
    ended = subprocess.run(
        [client, *words], env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode:
        raise SystemExit(ended.stdout[-4000:])
    return ended.stdout


def warmed_up(client: Path, model: Path, directory: Path) -> Path:
    """Teach the model the format of guess_number; return the directory of the trained model."""
    with serving(model, directory, ()) as environment:
        words = [str(ROOT / "benchmarks" / "tinker_warmup.py"), str(model), str(model)]
        path = call(client, words, environment).splitlines()[-1]
    return CheckpointStore(directory / "checkpoints").find(path).path


def run_program(program: Program, client: Path, model: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run a program against a server of its own; return its steps."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        log.mkdir()
        if program.is_warmed_up:
            model = warmed_up(client, model, Path(directory) / "warmup")
        with serving(model, Path(directory) / "server", arguments) as environment:
            call(client, shlex.split(program.command.format(model=model, log=log)), environment)
        rows = [program.row_of(json.loads(line)) for line in (log / program.metrics).read_text().splitlines()]
        return [row for row in rows if row is not None]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the reward of each program against its steps."""
    names = [name for name in PROGRAMS if any(row["program"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.6), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for row in rows:
            if row["program"] == name:
                rewards = [step["reward"] for step in row["steps"]]
                axis.plot(range(len(rewards)), rewards, color=PROGRAMS[name].colour, alpha=0.35)
                smoothed = [statistics.fmean(rewards[max(0, i - 2) : i + 1]) for i in range(len(rewards))]
                axis.plot(range(len(rewards)), smoothed, color=PROGRAMS[name].colour)
        axis.set(title=name, xlabel="optimizer steps")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean reward (bold: of three steps)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the programs, write the results and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--client", type=Path, required=True, help="interpreter with the SDK and tinker-cookbook")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("server", nargs="*", help="further arguments of `inflight tinker`, after --")
    arguments = parser.parse_args()
    rows = read_results("tinker_programs")["rows"] if (DIRECTORY / "tinker_programs.json").exists() else []
    for name in arguments.only:
        program = PROGRAMS[name]
        steps = run_program(program, arguments.client.absolute(), arguments.model.absolute(), arguments.server)
        rows = [row for row in rows if row["program"] != name]
        rows.append({"program": name, "kind": program.kind, "server": arguments.server, "steps": steps})
        rewards = [step["reward"] for step in steps]
        print(f"{name}: reward {statistics.fmean(rewards[:3]):.3f}, {statistics.fmean(rewards[-3:]):.3f}", flush=True)
        write_results("tinker_programs", rows)
        plot(rows, ROOT / "docs" / "images" / "tinker.png")


if __name__ == "__main__":
    main()
