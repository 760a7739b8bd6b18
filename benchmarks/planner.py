"""The planner against real runs: it is calibrated on two short runs of the quickstart, and predicts others.

    python benchmarks/planner.py models/tiny --runs runs/planner --rounds 2

makes the runs in turns and compares; ``--compare`` compares runs that are there. Writes ``results/planner.json``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.observe.trace.files import read_steps
from inflight.planning import Endpoint, PublishCost, Setup, TokenTime, TrainerCost, simulate
from inflight.planning.calibration import calibrate
from inflight.planning.candidates import candidate_of, predict
from inflight.planning.plan import PromptsSection
from inflight.planning.traces import measurements_of
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.schedulers import SCHEDULERS
from results import write_results

ROOT = Path(__file__).parents[1]
NUM_SKIPPED = 5
"""Steps at the beginning of a run that are not compared: processes warm up, and the pipeline fills."""


@dataclass(frozen=True)
class Kind:
    """A run of the quickstart with other settings."""

    name: str
    num_steps: int
    overrides: tuple[str, ...]


PIPELINE, CONVENTIONAL = "--run.mode=pipeline", "--run.mode=conventional"
CALIBRATION = (
    # They differ in mode, endpoints, slots, and whether a request has one completion or a whole group.
    Kind(
        "1 endpoint of 64, conventional, shortest_first",
        40,
        (CONVENTIONAL, "--servers.max_concurrent=64", "--rollouts.scheduler=shortest_first"),
    ),
    Kind("2 endpoints, pipeline", 60, (PIPELINE, "--servers.count=2")),
)
PREDICTED = (
    Kind("1 endpoint, conventional", 40, (CONVENTIONAL,)),
    Kind("1 endpoint, pipeline", 60, (PIPELINE,)),
    Kind(
        "1 endpoint, pipeline, shortest_first, lag 2",
        60,
        (PIPELINE, "--rollouts.scheduler=shortest_first", "--rollouts.max_lag=2"),
    ),
    Kind(
        "1 endpoint, conventional G=2, over_provision",
        40,
        (CONVENTIONAL, "--run.conventional_steps=2", "--rollouts.scheduler=over_provision"),
    ),
    Kind("2 endpoints, conventional G=2", 40, (CONVENTIONAL, "--run.conventional_steps=2", "--servers.count=2")),
    Kind(
        "2 endpoints, pipeline, probe_first, lag 4",
        60,
        (PIPELINE, "--servers.count=2", "--rollouts.scheduler=probe_first", "--rollouts.max_lag=4"),
    ),
    Kind(
        "2 endpoints of 64, pipeline, lag 1",
        60,
        (PIPELINE, "--servers.count=2", "--servers.max_concurrent=64", "--rollouts.max_lag=1"),
    ),
)


def directory_of(runs: Path, kind: Kind, number: int) -> Path:
    return runs / f"{kind.name.replace(',', '').replace(' ', '-').replace('=', '')}-{number}"


def make_run(model: Path, directory: Path, kind: Kind) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    command = [
        sys.executable, "-c", "from inflight.cli import main; raise SystemExit(main())", "train",
        str(ROOT / "examples" / "quickstart.toml"), f"--run.directory={directory}", f"--model.path={model}",
        f"--run.num_steps={kind.num_steps}", "--run.checkpoint_every_steps=1000", *kind.overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)


def compared(runs: Path, num_rounds: int) -> dict[str, Any]:
    """Compare the runs that are long enough. Raises `ConfigError` if none of a kind to calibrate with is."""
    made = {
        kind: [it for i in range(num_rounds) if is_long_enough(it := directory_of(runs, kind, i))]
        for kind in (*CALIBRATION, *PREDICTED)
    }
    costs = calibrate([directory for kind in CALIBRATION for directory in made[kind]], NUM_SKIPPED)
    rows = []
    for kind, directories in made.items():
        if not directories:
            continue
        found = [measurements_of(directory, NUM_SKIPPED) for directory in directories]
        num_steps = len([*read_steps(directories[0])])
        predicted = predict(costs, candidate_of(directories[0]), num_steps, NUM_SKIPPED)
        row: dict[str, Any] = {"name": kind.name, "is_calibration": kind in CALIBRATION, "steps": num_steps}
        for field in ("tokens_per_s", "age", "lag", "steps_per_s"):
            values = [getattr(it, field) for it in found]
            row[field] = {
                "measured": statistics.fmean(values),
                "all": values,
                "predicted": getattr(predicted, field),
            }
        rows.append(row)
    return {"runs": rows, "costs": costs.as_json()}


def is_long_enough(directory: Path) -> bool:
    return len([*read_steps(directory)]) >= 2 * NUM_SKIPPED


SCALE_ENDPOINTS, SCALE_TRAINING_GPUS, SCALE_COMPLETIONS = 80, 360, 1_000_000


def scale(num_completions: int) -> dict[str, Any]:
    """Simulate 80 endpoints of 8 GPUs and 360 training GPUs, in CPU seconds."""
    prompts = PromptsSection(median_tokens=1500, max_tokens=16384, prompt_tokens=200)
    groups_per_step, history = 256, HistoryStore()
    setup = Setup(
        SCHEDULERS["least_loaded"](group_size=8, history=history),
        history,
        [Endpoint(f"endpoint-{i}", 256, TokenTime.roofline(0.02, 128)) for i in range(SCALE_ENDPOINTS)],
        lambda item, _: prompts.prompted(8, 0, item),
        groups_per_step * 8 * 1730,  # the mean of such lengths, and their prompts
        max(1, num_completions // (groups_per_step * 8)),
        staleness=MaxLag(8),
        trainer=TrainerCost(5.0, 3.6e-4 / SCALE_TRAINING_GPUS),
        publish=PublishCost(2.0, 0.5, 0.5),
        whole_requests=True,
        score_time=0.1,
    )
    began = time.process_time()
    outcome = simulate(setup)
    return {
        "gpus": 8 * SCALE_ENDPOINTS + SCALE_TRAINING_GPUS,
        "completions": outcome.num_completions,
        "steps": len(outcome.steps),
        "tokens": outcome.num_tokens,
        "cpu_s": time.process_time() - began,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("models/tiny"))
    parser.add_argument("--runs", type=Path, default=Path("runs/planner"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", help="make only runs whose names contain this, and compare nothing")
    parser.add_argument("--shared-machine", action="store_true", help="note that other work shared the machine")
    parser.add_argument("--scale", action="store_true", help="only simulate a million completions")
    arguments = parser.parse_args()
    if arguments.scale:
        found = scale(SCALE_COMPLETIONS)
        print(found)
        write_results("planner-scale", found)
        return
    load = None if arguments.compare else os.getloadavg()[0]
    if not arguments.compare:
        for i in range(arguments.rounds):
            for kind in (*CALIBRATION, *PREDICTED):
                if arguments.only is None or arguments.only in kind.name:
                    print(i, kind.name, flush=True)
                    make_run(arguments.model, directory_of(arguments.runs, kind, i), kind)
    if arguments.only is not None:
        return
    result = compared(arguments.runs, arguments.rounds)
    result |= {"rounds": arguments.rounds, "load_before": load, "shared_machine": arguments.shared_machine}
    for row in result["runs"]:
        print(
            row["name"],
            {k: (round(v["measured"], 2), round(v["predicted"], 2)) for k, v in row.items() if isinstance(v, dict)},
        )
    write_results("planner", result)


if __name__ == "__main__":
    main()
