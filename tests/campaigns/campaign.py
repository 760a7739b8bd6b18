"""Many schedules, several at a time, and what came of them as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.campaigns.engine import EngineChoice, live_engine
from tests.campaigns.engine_schedule import draw_with_engine
from tests.campaigns.judge import RULES, judge, logs
from tests.campaigns.runner import ROOT, Disturbed, Incarnation, Record
from tests.campaigns.schedule import Schedule, draw
from tests.zygote import zygote

_LONG_STEPS = 100
_LONG_FROM = 1_000_000
"""Seeds of long runs begin here."""
_TAIL = 30
_PATH = re.compile(r"(?<![:/\w])(?:/[\w.+-]+){2,}")
"""An absolute path in a message; URLs are none."""


def play_all(
    seeds: Sequence[int] | range,
    parent: Path,
    *,
    num_jobs: int,
    num_long: int = 0,
    plain_share: float = 0.0,
    keeps: bool = False,
    engine: EngineChoice | None = None,
    tell: Callable[[str], None],
    note: Callable[[Sequence[dict[str, Any]]], None] = len,
) -> list[dict[str, Any]]:
    """Play the schedules of these seeds below ``parent``; returns one entry for each, in order of the seeds.

    ``note`` gets all entries so far whenever there is one more; ``keeps``: what runs write is not removed.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    from tests.models import make_model

    parent.mkdir(parents=True, exist_ok=True)
    if engine is None:
        model = make_model(parent / "model")
    elif engine.model is None:
        model = make_model(parent / "model", hidden_size=64, num_heads=2, num_kv_heads=1)  # engines need heads of 32
    else:
        model = engine.model.resolve()
    release = None if engine is None else engine.version()
    long_seeds = range(_LONG_FROM, _LONG_FROM + num_long)
    schedules = [draw(seed, num_steps=_LONG_STEPS) for seed in long_seeds]
    schedules += [_draw(seed, engine, plain_share) for seed in seeds]
    entries = []
    started, lock, stopping = time.monotonic(), threading.Lock(), threading.Event()
    with (
        live_engine(engine, model, parent / "engine") as live,
        zygote(parent) as shim,
        ThreadPoolExecutor(num_jobs) as pool,
    ):

        def one(schedule: Schedule) -> dict[str, Any]:
            python = sys.executable if schedule.is_plain else shim
            if live is not None:
                live.wait_until_up()
            engine_python = None if engine is None else engine.python
            disturbed = Disturbed(schedule, parent, model, python, stopping, live, engine_python)
            try:
                record = disturbed.play()
                if live is not None:
                    record.engine_problem = live.wait_until_up()
                entry = entry_of(record, {} if record.skipped else judge(record), release)
                if live is not None and "engine" in entry["problems"]:
                    live.replace()
            finally:
                if not keeps:
                    disturbed.close()
            with lock:
                entries.append(entry)
                bad = sum(bool(one["problems"]) for one in entries)
                took = time.monotonic() - started
                left_s = took / len(entries) * (len(schedules) - len(entries))
                what = "; ".join(entry["strikes"])
                tell(
                    f"campaign: {len(entries)}/{len(schedules)} seed {schedule.seed}: "
                    f"{'FAILED' if entry['problems'] else entry['skipped'] or 'held'} in {record.seconds:.0f} s, "
                    f"{len(record.incarnations)} incarnations [{what}]; {bad} failed, {left_s / 60:.0f} min left"
                )
                for rule, problems in entry["problems"].items():
                    for problem in problems:
                        tell(f"campaign:     {rule}: {problem}")
                note(entries)
            return entry

        try:
            for future in as_completed([pool.submit(one, schedule) for schedule in schedules]):
                future.result()
        except BaseException:
            stopping.set()
            if live is not None:
                live.close()
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(entries, key=lambda entry: entry["seed"])


def _draw(seed: int, engine: EngineChoice | None, plain_share: float) -> Schedule:
    if engine is None:
        return draw(seed, num_steps=_LONG_STEPS if seed >= _LONG_FROM else None, plain_share=plain_share)
    is_large = engine.model is not None
    return draw_with_engine(seed, engine.name, model=engine.model_name, is_large=is_large, plain_share=plain_share)


def entry_of(record: Record, problems: dict[str, list[str]], release: str | None = None) -> dict[str, Any]:
    """Return what is kept of one run; of one that failed, its logs, too."""
    schedule = record.schedule
    entry: dict[str, Any] = {
        "seed": schedule.seed,
        **_engine_of(schedule, release),
        "num_steps": schedule.num_steps,
        "overrides": schedule.overrides,
        "long_every": schedule.long_every,
        "resumes_at_once": schedule.resumes_at_once,
        "is_plain": schedule.is_plain,
        "strikes": [str(strike) for strike in schedule.strikes],
        "skipped": record.skipped,
        "seconds": round(record.seconds, 1),
        "incarnations": [
            {
                "struck": [[strike.label, strike.struck] for strike in incarnation.strikes],
                "exit": incarnation.exit,
                "from": incarnation.resumed_version,
                "to": incarnation.version,
                "seconds": round(incarnation.seconds, 1),
                "said": incarnation.last_line[:160] if incarnation.exit else "",
                **({} if schedule.engine is None else _taking_part(incarnation)),
            }
            for incarnation in record.incarnations
        ],
        "problems": problems,
    }
    if problems:
        entry["outputs"] = [incarnation.said.splitlines()[-_TAIL:] for incarnation in record.incarnations]
        entry["logs"] = logs(record.directory)
    return entry


def _engine_of(schedule: Schedule, release: str | None) -> dict[str, Any]:
    """Return the engine of a run, its release, and the model; nothing for a run of embedded servers."""
    use = schedule.engine
    if use is None:
        return {}
    form = "attached" if use.is_attached else "started"
    return {"engine": use.name, "engine_version": release, "engine_form": form, "model": use.model}


def _taking_part(incarnation: Incarnation) -> dict[str, Any]:
    """Return how the engine took part in an incarnation."""
    return {
        "engine_groups": incarnation.num_engine_groups,
        "engine_groups_since": incarnation.num_groups_since,
        "engine_was_down": incarnation.was_engine_down,
    }


def results(entries: Sequence[dict[str, Any]], wall_s: float, num_jobs: int) -> dict[str, Any]:
    """Return entries with the machine and the versions beside them, as benchmarks/results keeps them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from results import record_of  # type: ignore[import-not-found]

    runs = sorted(entries, key=lambda entry: entry["seed"])
    rules = [name for name in RULES if name != "engine" or any("engine" in run for run in runs)]
    rows = {"rules": rules, "wall_s": round(wall_s), "num_jobs": num_jobs, "runs": runs}
    record: dict[str, Any] = record_of("campaign", rows)
    return record


def combine(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of several campaigns as one, without what the runs printed and without paths."""
    runs = [
        {name: value for name, value in run.items() if name not in ("outputs", "logs")}
        for record in records
        for run in record["rows"]["runs"]
    ]
    rows = {
        "rules": records[0]["rows"]["rules"],
        "wall_s": sum(record["rows"]["wall_s"] for record in records),
        "num_jobs": max(record["rows"]["num_jobs"] for record in records),
        "runs": runs,
    }
    shown: dict[str, Any] = json.loads(_PATH.sub("...", json.dumps({**records[-1], "rows": rows})))
    return shown
