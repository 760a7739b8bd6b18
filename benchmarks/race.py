"""How long until the sampled reward reaches a goal: inflight's pipeline, its conventional mode, and TRL's GRPOTrainer.

    inflight pretrained-model models/smollm2
    python -m benchmarks.race models/smollm2

The entrants run in turns, each in processes of its own, with the settings of race.toml and the same seed in
each round. No entrant evaluates or saves before it ends. The goal is reached with the first step at which the mean
reward of the last three steps is at least the goal. The reward of a step is the mean over the completions that finished
since the step before; a step without any does not count. An entrant is stopped two steps later.

TRL's asynchronous trainers need CUDA, so this is the synchronous one, with generation by transformers, bfloat16
autocast and two threads; benchmarks/race_trl.py has other settings to try.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from benchmarks.results import DIRECTORY, read_results, write_results
from benchmarks.tables.race_table import race_ratios, race_table

from inflight.observe.trace.files import read_events

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "benchmarks" / "race.toml")
ENTRANTS = {
    "pipeline": ["-m", "inflight", "train", CONFIG],
    "conventional": ["-m", "inflight", "train", CONFIG, "--run.mode", "conventional", "--run.conventional_steps", "1"],
    "trl": ["-m", "benchmarks.race_trl", CONFIG, "--precision", "autocast", "--threads", "2"],
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""Of all entrants. glibc keeps large blocks that were freed instead of returning them to the system."""
WINDOW = 3
"""Steps over which the reward is averaged."""
NUM_STEPS_AFTER = 2
NUM_FIRST_STEPS = 3
"""Steps that do not count for the seconds per step."""
MAX_OTHERS = 0.1
"""Processors that other processes may use."""
_POLL_S = 0.1
_STEP_S = 600.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step when its row was written."""

    seconds: float
    """Since the entrant was started."""
    cpu_s: float
    """Of its processes so far."""
    row: Mapping[str, Any]


def cpu_seconds(root: psutil.Process) -> float:
    """Return the processor time of a process and all of its descendants, ended ones included."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # its own, and that of children that it has waited for
    return total


def machine_seconds() -> float:
    """Return the processor time of all processes since the machine was started."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))


def follow_steps(process: subprocess.Popen[bytes], path: Path, started: float) -> Iterator[Step]:
    """Yield each step as soon as its row is written, until the process has ended.

    Raises ``TimeoutError`` if a step takes longer than `_STEP_S`.
    """
    root, num_read, has_ended = psutil.Process(process.pid), 0, False
    deadline = time.monotonic() + _STEP_S
    while not has_ended:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step was made within {_STEP_S:g} s of step {num_read}; see the log of the entrant")
        time.sleep(_POLL_S)
        has_ended = root.status() == psutil.STATUS_ZOMBIE
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in lines[num_read:]:
            yield Step(time.time() - started, cpu_seconds(root), json.loads(line))
        if len(lines) > num_read:
            num_read, deadline = len(lines), time.monotonic() + _STEP_S


def known_rewards(steps: Sequence[Step]) -> list[float]:
    """Return the rewards of the steps before which completions finished."""
    return [step.row["reward"] for step in steps if step.row["reward"] is not None]


def has_reached(goal: float, steps: Sequence[Step]) -> bool:
    """Return whether the last steps have reached the goal."""
    rewards = known_rewards(steps)
    return len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= goal


def stop_entrant(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants at once."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a run of inflight ends at once after two signals
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        for descendant in (*psutil.Process(process.pid).children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.wait()


def sampling_seconds(directory: Path, started: float) -> float:
    """Return how long after ``started`` sampling began, when all models were loaded."""
    (began, *_) = read_events(directory, ["run_started"])
    first_s: float = min(event["start_s"] for event in read_events(directory, ["request"]))
    return float(began["began_at"]) + first_s - started


def run_entrant(name: str, seed: int, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run an entrant until shortly after it has reached the goal, or for all steps; return its figures."""
    command = [sys.executable, *ENTRANTS[name], "--run.directory", str(directory), "--run.seed", str(seed)]
    command += ["--run.num_steps", str(arguments.num_steps), "--model.path", str(arguments.model.absolute())]
    command += ["--sampling.max_tokens", str(arguments.max_tokens), "--evaluation.num_items", "0"]
    log, steps, num_to_goal, others_s = directory.with_suffix(".log"), list[Step](), None, 0.0
    machine_before_s, started = machine_seconds(), time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        for step in follow_steps(process, directory / "metrics.jsonl", started):
            steps.append(step)
            others_s = machine_seconds() - machine_before_s - step.cpu_s
            reward = "-" if step.row["reward"] is None else f"{step.row['reward']:.3f}"
            print(f"round {seed + 1} {name}  step {len(steps)}  reward {reward}  {step.seconds:.1f} s", flush=True)
            if num_to_goal is None and has_reached(arguments.goal, steps):
                num_to_goal = len(steps)
            if len(steps) == arguments.num_steps or (num_to_goal and len(steps) >= num_to_goal + NUM_STEPS_AFTER):
                break
    finally:
        if process.poll() is None:
            stop_entrant(process)
    if len(steps) < NUM_FIRST_STEPS + NUM_STEPS_AFTER:
        sys.exit(f"{name} ended with status {process.returncode} after {len(steps)} steps:\n{log.read_text()}")
    found = {"entrant": name, "round": seed, "max_tokens": arguments.max_tokens, "goal": arguments.goal}
    found |= {"trl": version("trl"), "is_reached": num_to_goal is not None}
    if (num_processors := others_s / steps[-1].seconds) > MAX_OTHERS:
        print(f"warning: other processes used {num_processors:.2f} processors meanwhile; the times are too long")
    found |= {"processors_of_others": num_processors}
    return found | figures_of(steps, num_to_goal or len(steps), sampling_seconds(directory, started))


def figures_of(steps: Sequence[Step], num_to_goal: int, sampling_s: float) -> dict[str, Any]:
    """Return the figures of a run whose sampling began after ``sampling_s``, up to the goal and per step."""
    last, pairs = steps[num_to_goal - 1], list(itertools.pairwise(steps[NUM_FIRST_STEPS - 1 :]))
    return {
        "num_steps": num_to_goal,
        "reward": statistics.fmean(known_rewards(steps[:num_to_goal])[-WINDOW:]),
        "wall_s": last.seconds,
        "sampling_and_training_s": last.seconds - sampling_s,
        "cpu_s": last.cpu_s,
        "step_s": statistics.median(after.seconds - before.seconds for before, after in pairs),
        "step_cpu_s": statistics.median(after.cpu_s - before.cpu_s for before, after in pairs),
        "samples_per_step": last.row["num_samples"] / num_to_goal,
        "trained_per_step": statistics.fmean(step.row["num_step_sequences"] for step in steps[:num_to_goal]),
        "steps": [[step.seconds, step.cpu_s, step.row["reward"]] for step in steps],
    }


def main() -> None:
    """Race, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--goal", type=float, default=0.5, help="mean reward of three steps")
    parser.add_argument("--only", nargs="+", choices=ENTRANTS, default=list(ENTRANTS), metavar="NAME")
    parser.add_argument("--num-steps", type=int, default=40, help="after which an entrant ends without the goal")
    parser.add_argument("--trl-prompts", type=int, default=3, help="groups of a step of TRL")
    arguments = parser.parse_args()
    ENTRANTS["trl"] += ["--prompts", str(arguments.trl_prompts)]
    rows: list[dict[str, Any]] = []
    earlier = read_results("race")["rows"] if (DIRECTORY / "race.json").exists() else []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(arguments.rounds):
            for name in arguments.only:
                rows.append(run_entrant(name, seed, Path(directory) / f"{name}-{seed}", arguments))
                save(earlier, rows)
    print(race_table(rows), race_ratios(rows), sep="\n\n")


def save(earlier: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Write the results so far; rows of an earlier race stay if their entrant has not run with this token limit."""
    measured = {(row["max_tokens"], row["entrant"]) for row in rows}
    others = [row for row in earlier if (row["max_tokens"], row["entrant"]) not in measured]
    every = sorted([*others, *rows], key=lambda row: (row["max_tokens"], list(ENTRANTS).index(row["entrant"])))
    write_results("race", every)


if __name__ == "__main__":
    main()
