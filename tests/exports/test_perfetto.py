"""The trace for Perfetto keeps the rules of Chrome's Trace Event Format, and states what the events say."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.observe.exports.perfetto import _Tracks, write_perfetto
from inflight.observe.trace import events, files
from tests.exports.runs import A, B, PaperRun, whole_run

# The fields that the format requires of each phase that we write, as "Trace Event Format" (Google, 2016) names them.


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    pid: int
    tid: int


class Complete(Row):
    ph: Literal["X"]
    ts: Annotated[int, Field(ge=0)]
    dur: Annotated[int, Field(ge=0)]
    cat: str
    args: dict[str, Any]


class Instant(Row):
    ph: Literal["i"]
    ts: Annotated[int, Field(ge=0)]
    s: Literal["g", "p", "t"]
    cat: str
    args: dict[str, Any]


class CounterRow(Row):
    ph: Literal["C"]
    ts: Annotated[int, Field(ge=0)]
    args: dict[str, float]


class Metadata(Row):
    ph: Literal["M"]
    name: Literal["process_name", "process_sort_index", "thread_name"]
    args: dict[str, str | int]


class TraceFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    displayTimeUnit: Literal["ms", "ns"]
    traceEvents: list[Annotated[Complete | Instant | CounterRow | Metadata, Field(discriminator="ph")]]


def checked(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a trace that keeps the rules."""
    text = path.read_text()
    TypeAdapter(TraceFile).validate_json(text)
    rows: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    processes, threads = set(), set()
    slices = defaultdict(list)
    for row in rows:
        if row["ph"] == "M":
            (threads if row["name"] == "thread_name" else processes).add((row["pid"], row["tid"]))
            continue
        assert (row["pid"], 0) in processes
        assert (row["pid"], row["tid"]) in threads, "named before it is used"
        if row["ph"] == "X":
            slices[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
    for spans in slices.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        outer = [(-1, spans[-1][1] + 1)]
        for start, end in spans:
            while outer[-1][1] <= start:
                outer.pop()
            assert end <= outer[-1][1], "slices lie within each other, or apart"
            outer.append((start, end))
    return rows


def named(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Slices and instants by the names of their process and thread."""
    names = {(row["pid"], row["tid"], row["name"]): row["args"].get("name") for row in rows if row["ph"] == "M"}
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["ph"] in "Xi":
            process = names[row["pid"], 0, "process_name"]
            found[process, names[row["pid"], row["tid"], "thread_name"]].append(row)
    return found


def counter(row: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of a counter, as Perfetto shows them."""
    ((series, value),) = row["args"].items()
    return f"{row['name']} {series}", value


def test_a_trace_has_every_request_step_publish_and_failure(tmp_path: Path) -> None:
    whole_run(tmp_path)
    num_rows = write_perfetto(tmp_path, tmp_path / "out.json")
    rows = checked(tmp_path / "out.json")
    assert len(rows) == num_rows
    found = named(rows)
    requests = [row for row in found[A, "requests"] + found[A, "requests 2"] if row["cat"] == "requests"]
    on_a = [(row["name"], row["ts"], row["dur"]) for row in requests]
    assert sorted(on_a) == [
        ("item 0 v4-v5", 2_000_000, 3_000_000),
        ("item 3 v4-v5", 3_000_000, 3_000_000),
        ("item 3 v4-v5", 8_500_000, 500_000),
        ("item 3 v4-v5", 29_000_000, 1_000_000),  # in the second process, which began 20 s after the first
    ]
    assert [row["name"] for row in found[B, "requests"] + found[B, "requests 2"]] == [
        "item 1 v4-v5",
        "item 2 lost",
        "item 4 v4-v5",
        "item 4 v4-v5",
    ]
    assert [row["name"] for row in found[B, "failures"]] == ["ConnectionError: refused"]
    assert [row["name"] for row in found[B, "state"]] == ["healthy to dead"]
    assert [row["name"] for row in found["trainer", "rank 1"]] == ["train v1", "train v2", "train v2"]
    assert [row["name"] for row in found["trainer", "publish"]] == ["publish v0", "publish v1", "publish v2"]
    (pause,) = [row for row in found["trainer", "publish: pause"] if row["args"]["version"] == 1]
    assert (pause["ts"], pause["dur"]) == (8_550_000, 50_000)
    assert [row["dur"] for row in found[A, "updates"]] == [40_000] * 3
    assert [row["name"] for row in found[A, "memory"]] == ["memory_released"]
    assert [row["name"] for row in found["run", "failure"]] == ["a rank was lost"]
    assert [(row["name"], row["args"]["what"]) for row in found["run", "item_dropped"]] == [("failed", "three tries")]
    counters = [counter(row) for row in rows if row["ph"] == "C"]
    assert ("groups running", 2) in counters
    assert [value for name, value in counters if name == "weight version"] == [0, 1, 2, 2]
    assert counters.count(("mean lag", 1.5)) == 2, "the step that was lost is not there"


def test_turns_of_an_episode_lie_within_its_request_and_the_environment_around_them(tmp_path: Path) -> None:
    run = PaperRun(tmp_path)
    run.request(7, 10.0, 20.0, turns=((8.0, 9.5, 5), (9.8, 12.0, 5), (12.5, 14.0, 15), (16.0, 19.0, 5)))
    run.request(8, 10.0, 20.0)
    run.request(9, 20.0, 21.0, error="cancelled")
    run.close()
    write_perfetto(tmp_path, tmp_path / "out.json")
    found = named(checked(tmp_path / "out.json"))
    (episode,) = [rows for rows in found.values() if rows[0]["name"] == "item 7 v4-v5"]
    assert [(row["name"], row["ts"] / 1e6, row["dur"] / 1e6) for row in episode[1:]] == [
        ("turn 2 v4", 10.0, 2.0),  # the first one ended at another server, and this one continued here
        ("environment", 12.0, 0.5),
        ("turn 3 v4-v5", 12.5, 1.5),
        ("environment", 14.0, 2.0),
        ("turn 4 v5", 16.0, 3.0),
        ("environment", 19.0, 1.0),
    ]
    assert episode[1]["args"] == {"item": 7, "tokens": 5, "versions": [4]}
    (others,) = [rows for rows in found.values() if rows[0]["name"] == "item 8 v4-v5"]
    assert [row["name"] for row in others[1:]] == ["item 9 cancelled"], "completions have no turns"


def test_turns_that_overlap_have_a_track_of_their_own_and_no_environment_beside_them(tmp_path: Path) -> None:
    run = PaperRun(tmp_path)
    run.request(7, 10.0, 20.0, turns=((10.0, 12.0, 10), (11.0, 15.0, 10), (13.0, 14.0, 5), (16.0, 20.0, 5)))
    run.close()
    write_perfetto(tmp_path, tmp_path / "out.json")
    found = named(checked(tmp_path / "out.json"))
    assert [(row["name"], row["ts"] / 1e6, row["dur"] / 1e6) for row in found[A, "requests"][1:]] == [
        ("turn 1 v4", 10.0, 2.0),
        ("turn 3 v5", 13.0, 1.0),
        ("environment", 15.0, 1.0),
        ("turn 4 v5", 16.0, 4.0),
    ]
    assert [row["name"] for row in found[A, "overlapping turns"]] == ["turn 2 v4"]


def test_times_of_a_step_are_those_of_the_process_that_made_it(tmp_path: Path) -> None:
    whole_run(tmp_path)
    write_perfetto(tmp_path, tmp_path / "out.json")
    rows = checked(tmp_path / "out.json")
    rewards = [row["ts"] for row in rows if row["ph"] == "C" and counter(row)[0] == "mean reward"]
    assert rewards == [8_700_000, 32_600_000]


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=40)


@given(INTERVALS)
def test_slices_in_the_order_of_their_ends_take_the_fewest_tracks(pairs: list[tuple[int, int]]) -> None:
    spans = sorted(((start, start + length) for start, length in pairs), key=lambda span: span[1])
    tracks = _Tracks()
    placed = [tracks.place(*span) for span in spans]
    most = max((sum(start <= at < end for start, end in spans) for at, _ in spans), default=0)
    assert len(set(placed)) == most
    assert sorted(set(placed)) == list(range(most))


@given(INTERVALS)
def test_slices_in_any_order_never_overlap_on_a_track(pairs: list[tuple[int, int]]) -> None:
    tracks = _Tracks()
    by_track = defaultdict(list)
    for start, length in pairs:
        by_track[tracks.place(start, start + length)].append((start, start + length))
    for spans in by_track.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_values_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    run = PaperRun(tmp_path)
    run.step(1, 1.0, reward=None, utilisation=float("nan"))
    run.close()
    write_perfetto(tmp_path, tmp_path / "out.json")
    assert {counter(row)[0] for row in checked(tmp_path / "out.json") if row["ph"] == "C"} == {
        "mean lag",
        "effective sample size",
    }


def test_a_long_run_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1 << 14)
    run = PaperRun(tmp_path)
    peaks = []
    for number in range(3000):
        run.request(number, number, number + 3.0)
        if number in (10, 1000, 2999):
            tracemalloc.start()
            write_perfetto(tmp_path, tmp_path / "out.json")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    run.close()
    assert peaks[2] < 2 * peaks[1], "of three times the rows; the first one warms up"


def test_a_directory_without_a_run_and_a_file_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="contains no run events: pass a run directory"):
        write_perfetto(tmp_path, tmp_path / "out.json")
    writer = files.EventWriter(tmp_path)
    writer.write(events.RunningGroups(start_s=1.0, end_s=1.0, num_groups=1))
    writer.close()
    with pytest.raises(
        ConfigError,
        match="begin with 'running_groups', so their wall-clock times are unknown",
    ):
        write_perfetto(tmp_path, tmp_path / "out.json")
    run = PaperRun(tmp_path)
    run.add(events.RunningGroups, 1.0, num_groups=1)
    run.close()
    assert main(["trace", str(tmp_path), "--perfetto", str(tmp_path / "no" / "out.json")]) == 1
    assert "out.json' cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--perfetto", str(tmp_path / "out.json")]) == 0
    assert "wrote 4 events to" in capsys.readouterr().out
