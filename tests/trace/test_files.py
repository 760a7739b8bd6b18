"""Whatever happens to the files of a run's events, a reader sees each event once and in order."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import CheckpointError, ConfigError
from inflight.observe.trace import events, files
from inflight.observe.trace.files import EventFollower, EventWriter, begin_files, read_events, read_steps, resume_files
from tests.gates import wait_until
from tests.zygote import python

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 8)),
        st.just(("step", 1)),
        st.tuples(st.just("kill"), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.integers(0, 30)),
        st.just(("follow", 0)),
        st.just(("read", 0)),
    ),
    max_size=25,
)


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", 600)
        patch.setattr(files, "NUM_PARTS", 1000)  # nothing is removed
        yield


class Run:
    """Writes as a run's journal does, and remembers what it wrote."""

    def __init__(self, directory: Path, *, compresses: bool = False, incarnation: int = 0) -> None:
        self.directory = directory
        self.compresses = compresses
        self.written: list[int] = []
        self.incarnation = incarnation
        self.version = 0
        self.steps: list[tuple[int, int]] = []
        """Version, and the incarnation that made it."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do while it resumes."""
        begin_files(directory)
        self._begin()

    def _begin(self) -> None:
        self.incarnation += 1
        self.files = EventWriter(self.directory, compresses=self.compresses)
        self._began()

    def _began(self) -> None:
        self.files.write(
            events.RunStarted(
                start_s=0, end_s=0, began_at=float(self.incarnation), version=self.version, inflight="test"
            )
        )

    def write(self, num_events: int) -> None:
        for _ in range(num_events):
            self.written.append(len(self.written))
            if self.files.write(events.RunningGroups(start_s=0, end_s=0, num_groups=self.written[-1])):
                self._began()

    def step(self, _: int) -> None:
        self.version += 1
        self.steps.append((self.version, self.incarnation))
        row = {
            "start_s": 0,
            "end_s": 0,
            "version": self.version,
            "time_s": 0,
            "reward": 0.5,
            "incarnation": self.incarnation,
        }
        self.files.write(events.StepCompleted.model_validate(row))

    def kill(self, num_bytes: int) -> None:
        """Die in the middle of a line of each file, and resume from a step before the last one."""
        self.files.close()
        for name in ("events.jsonl", "metrics.jsonl"):
            with (self.directory / name).open("ab") as file:
                file.write(b'{"kind": "running_groups", "num_groups": 12345678}'[:num_bytes])
        self.version = max(0, self.version - 1)
        self.steps = self.steps[: self.version]
        resume_files(self.directory, self.version)
        self.meanwhile()
        self._begin()

    def restart(self, num_events: int) -> None:
        """Begin another run in the directory, which is some files further when readers look again."""
        self.files.close()
        begin_files(self.directory)
        self.written, self.steps, self.version = [], [], 0
        self.meanwhile()
        self._begin()
        self.write(num_events)


class Reader:
    """Reads as a page does, which knows of a run what the follower tells it."""

    def __init__(self, directory: Path) -> None:
        self.follower = EventFollower(directory)
        self.numbers: list[int] = []
        self.steps: dict[int, int] = {}
        self.incarnation = 0.0
        self.last = 0
        self.may_restart = False

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()

    def read(self) -> None:
        for event in self.follower.read():
            if event["kind"] == "running_groups":
                self.numbers.append(event["num_groups"])
            elif event.get("is_new_run"):
                assert event["began_at"] != self.incarnation
                self.numbers, self.steps, self.incarnation, self.last = [], {}, event["began_at"], 0
            elif event["kind"] == "run_started" and event["began_at"] != self.incarnation:
                self.incarnation, self.may_restart = event["began_at"], True
                self.steps = {
                    version: incarnation for version, incarnation in self.steps.items() if version <= event["version"]
                }
            elif event["kind"] == "step":
                is_again = self.may_restart and event["version"] == 1
                assert is_again or event["version"] == self.last + 1, "steps come again only after a Began"
                self.may_restart = self.may_restart and not is_again
                self.last = event["version"]
                self.steps[event["version"]] = event["incarnation"]


@settings(max_examples=150)
@given(actions=ACTIONS, compresses=st.booleans())
def test_a_follower_sees_each_event_once_and_in_order(actions: list[tuple[str, int]], compresses: bool) -> None:
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), compresses=compresses)
        readers = [Reader(run.directory)]
        run.meanwhile = lambda: [reader.read() for reader in readers[::2]] and None
        for action, number in (*actions, ("read", 0)):
            if action == "follow":
                readers.append(Reader(run.directory))
            elif action == "read":
                for reader in readers:
                    reader.read()
                    assert reader.numbers == run.written
                    assert sorted(reader.steps.items()) == run.steps
            else:
                getattr(run, action)(number)
        run.files.close()
        assert [event["num_groups"] for event in read_events(run.directory, ["running_groups"])] == run.written
        assert [(step["version"], step["incarnation"]) for step in read_steps(run.directory)] == run.steps
        for reader in readers:
            reader.follower.close()


@pytest.mark.parametrize("compresses", [False, True])
def test_readers_beside_a_running_writer_miss_nothing(tmp_path: Path, compresses: bool) -> None:
    run = Run(tmp_path, compresses=compresses)
    is_over = threading.Event()
    seen: dict[str, list[int]] = {"followed": [], "read": []}

    def follow() -> None:
        with Reader(tmp_path) as reader:
            while not is_over.is_set():
                reader.read()
            reader.read()
            seen["followed"] = reader.numbers

    def read_again_and_again() -> None:
        while not is_over.is_set():
            numbers = [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])]
            seen["read"].append(len(numbers))
            assert numbers == list(range(len(numbers)))

    threads = [threading.Thread(target=call) for call in (follow, read_again_and_again)]
    for thread in threads:
        thread.start()
    try:
        for num_reads in range(1, 7):  # few enough for the parts that are kept, however slow readers are
            for _ in range(50):
                run.write(5)
            wait_until(lambda num=num_reads: len(seen["read"]) >= num, "the events were not read again")
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    run.files.close()
    assert seen["followed"] == run.written
    assert len(seen["read"]) > 1
    assert seen["read"] == sorted(seen["read"])


def test_a_follower_that_is_late_goes_on_with_the_oldest_file_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "NUM_PARTS", 3)
    run = Run(tmp_path)
    run.write(2)
    with Reader(tmp_path) as reader:
        reader.read()
        run.write(200)
        reader.read()
    run.files.close()
    gaps = [(a, b) for a, b in zip(reader.numbers, reader.numbers[1:], strict=False) if b != a + 1]
    assert len(gaps) == 1, "it read the end of the file that it had open, and then the oldest that is left"
    assert gaps[0][1] - gaps[0][0] > 100
    assert (reader.numbers[0], reader.numbers[-1]) == (0, 201)


@pytest.mark.parametrize("compresses", [False, True])
def test_a_follower_reads_a_new_run_in_the_directory_from_its_beginning(tmp_path: Path, compresses: bool) -> None:
    run = Run(tmp_path, compresses=compresses)
    run.write(5)  # its first file is not full: that of the new run is, and has the same number
    run.step(1)
    with Reader(tmp_path) as reader:
        reader.read()
        run.restart(50)
        reader.read()
        assert reader.numbers == run.written
        assert reader.steps == {}
        run.step(1)
        reader.read()
        assert reader.steps == {1: run.incarnation}
    run.files.close()


def test_steps_of_a_run_that_was_replaced_before_its_events_were_read_do_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1)
    follower = EventFollower(tmp_path)
    assert [step["version"] for step in follower.read_steps()] == [1]
    run.restart(50)
    began, *others = follower.read()
    assert (began["kind"], began["is_new_run"]) == ("run_started", True)
    assert not any("is_new_run" in event for event in others), "they belong to the new run"
    follower.close()
    run.files.close()


@pytest.mark.parametrize("compresses", [False, True])
def test_events_of_two_runs_are_never_read_as_one(tmp_path: Path, compresses: bool) -> None:
    run = Run(tmp_path, compresses=compresses)
    run.write(50)
    reading = read_events(tmp_path, ["running_groups"])
    next(reading)
    run.restart(50)
    with pytest.raises(ConfigError, match="another run began in"):
        list(reading)
    run.files.close()


def test_a_compressed_run_reads_like_a_plain_one_and_leaves_no_other_files(tmp_path: Path) -> None:
    run = Run(tmp_path, compresses=True)
    run.write(100)
    run.files.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "events.1.jsonl.zst" in names
    assert "events.1.jsonl" not in names
    assert not [name for name in names if name.endswith(".partial")]
    assert [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])] == run.written


def test_what_a_killed_process_left_half_compressed_is_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(100)
    (tmp_path / "events.1.partial").write_bytes(b"half")
    run.kill(3)
    run.files.close()
    assert not list(tmp_path.glob("*.partial"))
    assert [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])] == run.written


def test_a_full_disk_leaves_whole_lines_and_what_follows_is_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(1)
    real = run.files._events

    class Full:
        """A file on a disk that takes ten bytes more."""

        name = real.name

        def write(self, line: bytes) -> int:
            if len(line) <= 10:
                raise OSError(28, "No space left on device")
            return real.write(line[:-10])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    run.files._events = Full()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"events\.jsonl cannot be written: No space left"):
        run.write(1)
    run.written.pop()
    run.files._events = real
    run.write(1)
    run.files.close()
    assert [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])] == run.written


def test_readers_ignore_fields_and_kinds_that_they_do_not_know(tmp_path: Path) -> None:
    began = events.RunStarted(start_s=0, end_s=0, began_at=1.0, version=0, inflight="0.1.0").model_dump()
    lines = [
        {**began, "colour": "red"},
        {"kind": "rain", "start_s": 1, "end_s": 2, "mm": 3},
        {"kind": "running_groups", "start_s": 1, "end_s": 2, "num_groups": 4, "colour": "blue"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [event["kind"] for event in read_events(tmp_path)] == ["run_started", "rain", "running_groups"]
    assert events.ANY_EVENT.validate_python(lines[2]) == events.RunningGroups(start_s=1, end_s=2, num_groups=4)


def test_events_of_a_newer_schema_are_refused(tmp_path: Path) -> None:
    began = events.RunStarted(start_s=0, end_s=0, began_at=1.0, version=0, inflight="9.9.0").model_dump()
    newer = {**began, "schema_version": events.SCHEMA_VERSION + 1}
    (tmp_path / "events.jsonl").write_text(json.dumps(newer) + "\n")
    with Reader(tmp_path) as reader:
        for read in (reader.read, lambda: list(read_events(tmp_path))):
            with pytest.raises(ConfigError, match=r"inflight 9\.9\.0 with event schema 2, .* reads only up to 1"):
                read()


def test_the_example_of_docs_prints_the_steps_and_publishes_of_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    times = {"start_s": 0.0, "end_s": 0.0, "version": 1}
    run.files.write(events.StepCompleted.model_validate({**times, "time_s": 0.0, "reward": 0.5, "lag_mean": 1.25}))
    parts = dict.fromkeys(("gather_s", "wire_s", "load_s", "first_token_s"), 0.0)
    publish = {**times, **parts, "pause_s": 0.01, "total_s": 2, "size_bytes": 8, "sent_bytes": 8}
    run.files.write(events.WeightsPublished.model_validate({**publish, "paused_s": {}, "outcomes": {}}))
    run.files.close()
    example = Path(__file__).parents[2] / "examples" / "read_events.py"
    printed = subprocess.run([python(), example, tmp_path], capture_output=True, text=True, timeout=60, check=True)
    assert printed.stdout.splitlines() == [
        "step 1: reward 0.50, mean lag 1.25",
        "publish of version 1: 2.00 s, servers paused for 0.010 s",
    ]
