"""The command ``inflight plan``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight.base.json_files import check_writable, write_json
from inflight.commands.shared import add_json_argument, print_progress
from inflight.errors import ConfigError

_LINE_EVERY_S = 10.0
"""Interval, in seconds, between progress reports if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Simulate configurations of a run and print the best trade-offs between speed and token age. Costs come "
        "from PLAN.toml, from the events of earlier runs (--from), or from both: --from fills in what the plan "
        "omits."
    )
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN.toml", help="costs and configurations to compare")
    parser.add_argument(
        "--from", type=Path, action="append", default=[], dest="runs", metavar="RUN_DIR",
        help="measure costs from the events of this run; may be repeated; the first run is the baseline",
    )  # fmt: skip
    parser.add_argument(
        "--measure", type=Path, metavar="RUN.toml",
        help="make a short run of each configuration on this machine instead of simulating it",
    )  # fmt: skip
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of each run of --measure (default: %(default)g)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens per second against token age")
    add_json_argument(parser, "every configuration and its figures")
    parser.add_argument("--all", action="store_true", help="print every configuration, not only the best trade-offs")
    parser.add_argument(
        "--apply", type=Path, metavar="RUN.toml", help="write a copy of this file with the chosen configuration"
    )
    parser.add_argument(
        "--choose", type=int, default=1, metavar="NUMBER", help="row of the table to apply (default: 1, the fastest)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where --apply writes the copy (default: RUN.planned.toml)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate or measure the configurations and print a table of them."""
    from inflight.planning.calibration import calibrate
    from inflight.planning.candidates import candidate_of
    from inflight.planning.plan import SearchPlan, load_plan
    from inflight.planning.search import candidates, costs_of, pareto, search
    from inflight.planning.showing import as_json, draw, table

    if arguments.plan is None and not arguments.runs and arguments.measure is None:
        raise ConfigError("inflight plan needs PLAN.toml, --from RUN_DIR, or --measure RUN.toml")
    check_writable({"json": arguments.json, "plot": arguments.plot})
    plan = SearchPlan() if arguments.plan is None else load_plan(arguments.plan)
    if arguments.measure is not None:
        found, costs = _measure(arguments, plan), None
    else:
        measured = calibrate(arguments.runs) if arguments.runs else None
        if measured is not None and measured.is_of_one_load and plan.generation is None:
            print_progress(
                "the runs in --from measured endpoints at about the same load, so token times at other loads are "
                "extrapolated: add another run with --from, such as one with the other mode and another scheduler"
            )
        costs = costs_of(plan, measured)
        wanted = [*candidates(plan, candidate_of(arguments.runs[0]) if arguments.runs else None)]
        found = search(costs, _require_any(wanted), plan.search.num_steps, _progress_of(len(wanted)))
    best = pareto(found)
    shown = sorted(found, key=lambda it: -it.steady.tokens_per_time) if arguments.all else best
    print(
        f"{len(found)} configurations; {len(best)} of them are best trade-offs between tokens per second and token "
        "age\n"
    )
    print(table(shown, [best.index(it) + 1 if it in best else 0 for it in shown]))
    if costs is not None:
        _print_parts(costs, best, found, plan.search.num_steps)
    write_json(arguments.json, [as_json(it) for it in found])
    if arguments.plot is not None:
        draw(found, best, arguments.plot)
        print(f"\nplot: {arguments.plot}")
    if arguments.apply is not None:
        _apply(arguments, best)
    return 0


def _measure(arguments: argparse.Namespace, plan: Any) -> Any:
    from inflight.planning.measuring import base_of, measure
    from inflight.planning.search import candidates

    if arguments.runs or plan.hardware is not None or plan.prompts is not None:
        raise ConfigError("--measure runs on this machine: omit --from, [hardware] and [prompts]")
    wanted = _require_any([*candidates(plan, base_of(arguments.measure), knows_lengths=False)])
    return measure(arguments.measure, wanted, plan, arguments.limit, _progress_of(len(wanted)))


def _require_any(wanted: list[Any]) -> list[Any]:
    if not wanted:
        raise ConfigError("the plan has no configuration to try: set search.mode, and at least one value in each list")
    return wanted


def _progress_of(num: int) -> Callable[[int], None]:
    """Return a callback that shows progress, in place on a terminal and otherwise as occasional lines."""
    reported_at = time.monotonic()

    def report_progress(done: int) -> None:
        nonlocal reported_at
        if not sys.stderr.isatty() and time.monotonic() - reported_at > _LINE_EVERY_S:
            reported_at = time.monotonic()
            print_progress(f"{done} of {num} configurations")
        if sys.stderr.isatty():
            text = f"{done} of {num} configurations" if done < num else " " * 40
            print(f"\r{text}\r", end="", file=sys.stderr, flush=True)

    return report_progress


def _print_parts(costs: Any, best: Sequence[Any], found: Sequence[Any], num_steps: int) -> None:
    """Print the factors of the fastest pipeline's speed-up over the fastest conventional run with G = 1."""
    from inflight.planning.parts import parts_of

    pipelines = [it for it in best if not it.candidate.conventional_steps]
    plain = [it for it in found if it.candidate.conventional_steps == 1]
    if not pipelines or not plain:
        return
    first, base = pipelines[0], max(plain, key=lambda it: it.steady.tokens_per_time)
    parts = parts_of(costs, base.candidate, first.candidate, num_steps)
    print(
        f"\npipeline {best.index(first) + 1} is {parts.product:.2f} times as fast as conventional G=1 with "
        f"{base.candidate.scheduler}: memory {parts.memory:.2f} x stragglers {parts.stragglers:.2f} x bubbles "
        f"{parts.bubbles:.2f} x drafts {parts.drafts:.2f}"
    )


def _apply(arguments: argparse.Namespace, best: Sequence[Any]) -> None:
    from inflight.planning.applying import apply
    from inflight.run.config import load_config

    if not 1 <= arguments.choose <= len(best):
        raise ConfigError(f"--choose must be a row of the table, from 1 to {len(best)}, not {arguments.choose}")
    source = arguments.apply
    target = arguments.output or source.with_name(f"{source.stem}.planned{source.suffix}")
    settings = apply(best[arguments.choose - 1].candidate, source, target)
    load_config(target)
    print(f"\n{target}: " + ", ".join(f"{key} = {value}" for key, value in settings.items()))
