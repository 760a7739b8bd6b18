"""Disturbed runs: ``python -m tests.campaigns --runs 300 --seed 0 --jobs 4 --json FILE``.

With a real engine: ``python -m tests.campaigns --engine vllm --python ENVIRONMENT/bin/python --runs 100 --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import combine, play_all, results
from tests.campaigns.engine import EngineChoice


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="disturbed runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the next has the next number")
    parser.add_argument("--only", type=int, metavar="SEED", help="play this one, tell everything, and keep its files")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: two for each core, or one with an engine)")
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="let a server of this engine take part")
    parser.add_argument("--python", type=Path, help="the interpreter of the engine's environment")
    parser.add_argument("--model", type=Path, help="a checkpoint, for runs with an engine (default: a tiny one)")
    parser.add_argument("--long", type=int, default=0, help="runs of 100 steps besides (default: %(default)s)")
    parser.add_argument("--plain-share", type=float, default=0.05, help="share that is started without the zygote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--combine", type=Path, nargs="+", metavar="FILE", help="play none: join these results")
    parser.add_argument("--directory", type=Path, help="where runs are written (default: a temporary directory)")
    arguments = parser.parse_args()
    if arguments.combine:
        joined = combine([json.loads(path.read_text()) for path in arguments.combine])
        arguments.json.write_text(json.dumps(joined, indent=1) + "\n")
        return 0
    engine = None
    if arguments.engine is not None:
        if arguments.python is None or arguments.long or (arguments.jobs or 1) > 1:
            parser.error("--engine needs --python, one job at a time, and no --long")
        engine = EngineChoice(arguments.engine, arguments.python.absolute(), arguments.model)
    num_jobs = arguments.jobs or (2 * (os.cpu_count() or 1) if engine is None else 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clears away what it started, as Ctrl-C does
    parent = arguments.directory or Path(tempfile.mkdtemp(prefix="inflight-campaign-"))
    seeds = [arguments.only] if arguments.only is not None else range(arguments.seed, arguments.seed + arguments.runs)
    started = time.monotonic()

    def note(entries: Sequence[dict[str, Any]]) -> None:
        if arguments.json is not None:
            found = results(entries, time.monotonic() - started, num_jobs)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    played = play_all(
        seeds,
        parent.resolve(),
        num_jobs=num_jobs,
        engine=engine,
        num_long=arguments.long,
        plain_share=arguments.plain_share,
        keeps=arguments.only is not None,
        tell=lambda line: print(line, flush=True),
        note=note,
    )
    failed = [one for one in played if one["problems"]]
    if arguments.only is not None:
        print(json.dumps(played, indent=2))
        print(f"files: {parent}")
    print(f"campaign: {len(played)} runs, {len(failed)} failed: {[one['seed'] for one in failed]}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
