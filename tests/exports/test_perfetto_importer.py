"""Perfetto's own importer reads the traces, and finds in them what was written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.observe.exports.perfetto import write_perfetto
from tests.exports.runs import PaperRun, whole_run
from tests.exports.test_perfetto import counter, named
from tests.exports.trace_processor import FOLDER, TraceProcessor
from tests.run.runs import RunProcess
from tests.watch.recorded import browser

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="make installs Perfetto's importer apart"),
    pytest.mark.timeout(300),
]

SLICES = """
select process.name, thread.name, slice.name, slice.category, slice.ts / 1000, slice.dur / 1000
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
COUNTERS = """
select process.name, track.name, ts / 1000, value
from counter join process_counter_track track on counter.track_id = track.id join process using (upid)
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


def imported(chromium: Any, directory: Path) -> tuple[TraceProcessor, list[dict[str, Any]]]:
    """Return Perfetto with the trace of a run, and the rows of the trace."""
    out = directory / "trace.json"
    write_perfetto(directory, out)
    return TraceProcessor(chromium, out.read_bytes()), json.loads(out.read_text())["traceEvents"]


def check_all_is_there(perfetto: TraceProcessor, rows: list[dict[str, Any]]) -> None:
    """Check that each slice and each counter is where it was written, and that nothing was left out."""
    assert perfetto.faults() == []
    written = [
        (process, thread, row["name"], row["cat"], row["ts"], row["dur"])
        for (process, thread), of_thread in named(rows).items()
        for row in of_thread
        if row["ph"] == "X"
    ]
    assert Counter(perfetto.query(f"{SLICES} where slice.dur > 0")) == Counter(
        slice_ for slice_ in written if slice_[5] > 0
    )
    marks = perfetto.query("select name, category, ts / 1000 from slice where dur = 0")
    assert Counter(marks) == Counter(
        (row["name"], row["cat"], row["ts"]) for row in rows if row["ph"] == "i" or row.get("dur") == 0
    )
    counters = perfetto.query(COUNTERS)
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert Counter((*where, round(value, 9)) for *where, value in counters) == Counter(
        (processes[row["pid"]], counter(row)[0], row["ts"], round(counter(row)[1], 9))
        for row in rows
        if row["ph"] == "C"
    )


def test_every_row_of_a_run_is_imported(chromium: Any, tmp_path: Path) -> None:
    whole_run(tmp_path)
    perfetto, rows = imported(chromium, tmp_path)
    check_all_is_there(perfetto, rows)


def test_a_real_run_of_episodes_has_its_turns_and_its_environment_within_their_requests(
    chromium: Any, tmp_path: Path, model_dir: Path
) -> None:
    episodes = ("--task.name", "tests.environments.places:three_turns", "--sampling.max_tokens", "12")
    run = RunProcess(tmp_path, model_dir, *episodes, "--run.num_steps", "2", "--train.tokens_per_worker", "300")
    assert run.wait() == 0, run.output()
    perfetto, rows = imported(chromium, run.directory)
    check_all_is_there(perfetto, rows)
    turns = [turn for request in run.events("request") for part in request["parts"] for turn in part["turns"]]
    assert len(turns) > 20
    within = "from slice one join slice request on one.parent_id = request.id where request.category = 'requests'"
    found = perfetto.query(f"select one.dur / 1000 {within} and one.category = 'turn'")
    assert sorted(dur for (dur,) in found) == pytest.approx(
        sorted((end - start) * 1e6 for start, end, _ in turns), abs=1
    )
    left = perfetto.query(f"select request.dur - sum(one.dur) {within} group by request.id")
    assert len(left) * 3 == len(turns)
    assert all(abs(rest) <= 8_000 for (rest,) in left), "nanoseconds, of times in microseconds"


def test_slices_that_overlap_would_be_found(chromium: Any, tmp_path: Path) -> None:
    run = PaperRun(tmp_path)
    run.train(1, 1.0, 3.0)
    run.train(2, 3.0, 4.0)
    run.close()
    write_perfetto(tmp_path, tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for row in rows:
        if row["name"] == "train v2":
            row["ts"] -= 500_000
    (fault,) = TraceProcessor(chromium, json.dumps({"traceEvents": rows}).encode()).faults()
    assert "overlap" in fault[0]
