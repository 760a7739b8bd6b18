"""The files of a run's events: ``events.jsonl`` and its older parts, and ``metrics.jsonl``, which has the steps.

Lines are only appended. ``events.jsonl`` becomes ``events.1.jsonl``, ``events.2.jsonl`` and so on when it is full, the
highest number being the newest, or ``events.1.jsonl.zst`` where parts are compressed; the oldest parts are removed.
Steps are kept for good. A line that a killed process left incomplete is not read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from inflight.errors import CheckpointError, ConfigError
from inflight.trace.events import SCHEMA_VERSION, Event

PART_BYTES = 32 * 1024 * 1024
NUM_PARTS = 8
"""``events.jsonl`` is renamed at ``PART_BYTES``; ``NUM_PARTS`` files of events are kept, itself included."""
_CHUNK_BYTES = 1 << 20

EVENTS, STEPS = "events.jsonl", "metrics.jsonl"


class EventWriter:
    """Appends events to the files of a run directory. A full disk raises `CheckpointError`."""

    def __init__(self, directory: Path, *, compresses: bool = False) -> None:
        self._directory = directory
        self._compresses = compresses
        self._events, self._steps = ((directory / name).open("a", buffering=1) for name in (EVENTS, STEPS))

    def write(self, event: Event) -> bool:
        """Write an event; return whether the next one is the first of a new file."""
        file = self._steps if event.kind == "step" else self._events
        try:
            file.write(event.model_dump_json() + "\n")
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be written: {error.strerror}; is the disk full?") from error
        if event.kind in ("step", "began") or file.tell() <= PART_BYTES:
            return False
        self._rotate()
        return True

    def close(self) -> None:
        """Close the files. Raises OSError if the end of the last lines is lost."""
        try:
            self._steps.close()
        finally:
            self._events.close()

    def _rotate(self) -> None:
        """Begin a new file of events, and remove the oldest if there are too many."""
        *older, present = event_files(self._directory)
        self._events.close()
        part = present.with_name(f"events.{_number_of(older[-1]) + 1 if older else 1}.jsonl")
        present.rename(part)
        self._events = present.open("a", buffering=1)
        for path in older[: -(NUM_PARTS - 2)]:
            path.unlink(missing_ok=True)
        if self._compresses:
            threading.Thread(target=_compress, args=(part,), name="inflight-compress", daemon=True).start()


def begin_files(directory: Path) -> None:
    """Remove the events of an earlier run in the same directory."""
    for path in (directory / STEPS, *event_files(directory)):
        path.unlink(missing_ok=True)


def resume_files(directory: Path, version: int) -> None:
    """Remove incomplete last lines, and steps after ``version``, which the earlier process has lost."""
    _keep_lines(directory / STEPS, lambda row: row["version"] <= version)
    _keep_lines(directory / EVENTS, lambda _: True)


# ---------------------------------------------------------------------------------------------------------------
# Reading


def read_events(directory: Path, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the events of a run without its steps, oldest first; only those of some ``kinds`` if any are given.

    They are as written, and not validated. Raises `ConfigError` if a newer release of inflight wrote them.
    """
    for path in event_files(directory):
        for event in read_lines(path):
            if event.get("kind") == "began":
                check_schema(event, directory)
            if not kinds or event["kind"] in kinds:
                yield event


def read_steps(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a run, in order."""
    yield from read_lines(directory / STEPS)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without an incomplete last one; none if the file does not exist."""
    if path.exists():
        with _opened(path) as file:
            yield from (from_json(line) for line in _lines_of(file))


def check_schema(began: dict[str, Any], directory: Path) -> None:
    """Raise `ConfigError` if events were written by a release whose fields have another meaning."""
    if (found := began["schema_version"]) > SCHEMA_VERSION:
        raise ConfigError(
            f"{directory} was written by inflight {began['inflight']} with schema {found} of events, and this release "
            f"reads up to {SCHEMA_VERSION}: read it with that release or a newer one"
        )


class EventFollower:
    """Reads what a run adds to its files, call by call, also while it runs in another process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending = [path for path in event_files(directory) if path.name != EVENTS]
        self._number = self._newest() + 1
        """That the present ``events.jsonl`` will have once it is full."""
        self._events, self._steps = _Tail(directory / EVENTS), _Tail(directory / STEPS)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the call before, the steps after all others. Raises `ConfigError` as `read_events`.

        A resumed run replaces its steps; all of them are yielded again then, and before them a `Began`, which says from
        which version on earlier ones do not count.
        """
        yield from self._read_events()
        yield from self.read_steps()

    def read_steps(self) -> Iterator[dict[str, Any]]:
        """Yield the steps since the call before; those that a resumed run replaces again, from the first one."""
        if self._steps.is_replaced():
            self._steps.reopen()
        yield from self._steps.read()

    def _read_events(self) -> Iterator[dict[str, Any]]:
        for path in self._pending:
            yield from self._checked(read_lines(path))
        self._pending = []
        yield from self._checked(self._events.read())
        if self._events.is_replaced():
            yield from self._checked(self._events.read())  # what was written before it was renamed
            for path in event_files(self._directory):
                if path.name != EVENTS and _number_of(path) > self._number:
                    yield from self._checked(read_lines(path))
            self._number = self._newest() + 1
            self._events.reopen()
            yield from self._checked(self._events.read())

    def close(self) -> None:
        self._events.close()
        self._steps.close()

    def _newest(self) -> int:
        return max((_number_of(path) for path in event_files(self._directory) if path.name != EVENTS), default=0)

    def _checked(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.get("kind") == "began":
                check_schema(event, self._directory)
            yield event


class _Tail:
    """Reads the complete lines that a file gains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from (from_json(line) for line in lines)

    def is_replaced(self) -> bool:
        """Return whether the path names another file now, or the file was made shorter."""
        if self._file is None:
            return False
        try:
            found, own = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return False  # between two files
        return found.st_ino != own.st_ino or found.st_size < self._file.tell()

    def reopen(self) -> None:
        self.close()
        self._file, self._rest = None, b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def event_files(directory: Path) -> list[Path]:
    """Return the files of events, oldest first; of a part that is just being compressed, one of its two files."""
    parts = {_number_of(path): path for path in sorted(directory.glob("events.*.jsonl*"))[::-1] if _is_part(path)}
    older = [parts[number] for number in sorted(parts)]
    present = directory / EVENTS
    return [*older, present] if present.exists() else older


def _is_part(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.zst"))


def _number_of(path: Path) -> int:
    return int(path.name.split(".")[1])


def _opened(path: Path) -> IO[bytes]:
    if path.suffix != ".zst":
        return path.open("rb")
    import zstandard

    return zstandard.open(path, "rb")  # type: ignore[no-any-return]


def _lines_of(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with only its complete rows for which ``is_kept`` is true."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as kept:
        if path.exists():
            with path.open("rb") as file:
                kept.writelines(line + b"\n" for line in _lines_of(file) if is_kept(from_json(line)))
    partial.replace(path)


def _compress(path: Path) -> None:
    """Replace a part by its compressed form. A part that was removed meanwhile, or a full disk, leaves it as it is."""
    import zstandard

    target, partial = path.with_suffix(".jsonl.zst"), path.with_suffix(".partial")
    try:
        with path.open("rb") as file, partial.open("wb") as out:
            zstandard.ZstdCompressor().copy_stream(file, out)
        partial.rename(target)
        path.unlink()
    except OSError:
        partial.unlink(missing_ok=True)
