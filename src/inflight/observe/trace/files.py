"""The event files of a run: ``events.jsonl`` and its older parts, and ``metrics.jsonl``, which has the steps.

Lines are only appended. When ``events.jsonl`` is full, it is renamed to ``events.1.jsonl``, ``events.2.jsonl`` and so
on, or to ``events.1.jsonl.zst`` and so on if parts are compressed. The highest number is the newest part, and the
oldest parts are removed. Steps are never removed. A line that a killed process left incomplete is not read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from io import BytesIO, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic_core import from_json

from inflight.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from inflight.observe.trace.events import Event

PART_BYTES = 32 * 1024 * 1024
NUM_PARTS = 8
"""``events.jsonl`` is renamed when it has ``PART_BYTES``; ``NUM_PARTS`` files are kept, including ``events.jsonl``."""
_CHUNK_BYTES = 1 << 17
_MAX_LINE_BYTES = 64 << 20
"""Size limit of one event, and of the contents of a compressed part; twice ``PART_BYTES``."""
_PART = re.compile(r"events\.(\d{1,9})\.jsonl(?:\.zst)?", re.ASCII)
_COMPRESS_S = 10.0
"""How long, in seconds, compressing the last file may take once the run has ended."""

EVENTS, STEPS = "events.jsonl", "metrics.jsonl"


class EventWriter:
    """Appends events to the files of a run directory. A full disk raises `CheckpointError`; no partial line is left."""

    def __init__(self, directory: Path, *, compresses: bool = False) -> None:
        self._directory = directory
        self._compresses = compresses
        self._compressing: threading.Thread | None = None
        self._events, self._steps = ((directory / name).open("ab", buffering=0) for name in (EVENTS, STEPS))

    def write(self, event: Event) -> bool:
        """Write an event; return whether the next event will be the first of a new file."""
        file = self._steps if event.kind == "step" else self._events
        try:
            _append(file, event.model_dump_json().encode() + b"\n")
            if event.kind in ("step", "run_started") or file.tell() <= PART_BYTES:
                return False
            self._rotate()
        except OSError as error:
            raise CheckpointError(
                f"{file.name} cannot be written: {error.strerror}; check that the disk has free space"
            ) from error
        return True

    def close(self) -> None:
        """Close the files, and wait briefly for a file that is being compressed."""
        self._steps.close()
        self._events.close()
        if self._compressing is not None:
            self._compressing.join(_COMPRESS_S)

    def _rotate(self) -> None:
        """Begin a new event file, and remove the oldest one if there are too many."""
        parts = _parts(self._directory)
        number = max(parts, default=0) + 1
        parts[number] = self._directory / f"events.{number}.jsonl"
        self._events.close()
        (self._directory / EVENTS).rename(parts[number])
        self._events = (self._directory / EVENTS).open("ab", buffering=0)
        kept = sorted(parts)[-(NUM_PARTS - 1) :]
        for removed in parts.keys() - set(kept):
            parts[removed].unlink(missing_ok=True)
        if self._compresses and (self._compressing is None or not self._compressing.is_alive()):
            plain = [parts[it] for it in kept if parts[it].suffix == ".jsonl"]
            self._compressing = threading.Thread(target=_compress, args=(plain,), name="inflight-compress", daemon=True)
            self._compressing.start()


def _append(file: FileIO, line: bytes) -> None:
    """Write the complete line or nothing."""
    begin = os.fstat(file.fileno()).st_size
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        file.truncate(begin)
        raise


def begin_files(directory: Path) -> None:
    """Remove the events of an earlier run in the same directory."""
    for path in (directory / STEPS, *event_files(directory), *_unfinished(directory)):
        path.unlink(missing_ok=True)


def resume_files(directory: Path, version: int) -> None:
    """Remove incomplete data that a killed process left behind, and the steps after ``version``.

    The weights that those steps produced are lost.
    """
    for path in _unfinished(directory):
        path.unlink()
    _keep_lines(directory / STEPS, lambda row: row["version"] <= version)
    if (directory / EVENTS).exists():
        _cut_torn_line(directory / EVENTS)  # in place, so that followers keep reading the same file


# ---------------------------------------------------------------------------------------------------------------
# Reading


def read_events(directory: Path, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the events of a run without its steps, oldest first; only those of ``kinds`` if any are given.

    Events are not validated. Raises `ConfigError` if a newer release of inflight wrote them, or if another run replaces
    them while they are read.
    """
    reader = _EventReader(directory)
    try:
        for event in reader.read():
            if event.get("is_new_run"):
                raise ConfigError(f"another run began in {directory} while its events were being read: try again")
            if not kinds or event["kind"] in kinds:
                yield event
    finally:
        reader.close()


def read_steps(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a run, in order."""
    yield from read_lines(directory / STEPS)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; none if the file does not exist."""
    if path.exists():
        with _open_file(path) as file:
            yield from (_row_of(line, path) for line in _lines_of(file))


def check_schema(began: dict[str, Any], directory: Path) -> None:
    """Raise `ConfigError` if the events have a newer schema than this release reads."""
    from inflight.observe.trace.events import SCHEMA_VERSION

    if (found := began["schema_version"]) > SCHEMA_VERSION:
        raise ConfigError(
            f"{directory} was written by inflight {began['inflight']} with event schema {found}, but this release "
            f"reads only up to {SCHEMA_VERSION}: use that release or a newer one"
        )


class EventFollower:
    """Reads the events that a run appends to its files. The run may be active in another process."""

    def __init__(self, directory: Path) -> None:
        self._events, self._steps = _EventReader(directory), _Tail(directory / STEPS)
        self._incarnation_of_steps: float | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the previous call, steps last. Raises `ConfigError` in the same cases as
        `read_events`.

        A run that is resumed replaces its steps. In that case a ``run_started`` event is yielded, which invalidates the
        steps after its version, and then all steps are yielded again. Events that the run removed before this call are
        omitted. If another run has replaced the one that was read, the ``run_started`` event of the new run has
        ``is_new_run`` set, and nothing that was yielded before belongs to the new run.
        """
        for event in self._events.read():
            if event["kind"] == "run_started":
                # Steps that were read before any event may belong to a run that has since been replaced.
                if self._incarnation_of_steps is None and self._steps.is_replaced():
                    event["is_new_run"] = True
                if event.get("is_new_run"):
                    self._steps.reopen()
            yield event
        yield from self.read_steps()

    def read_steps(self) -> Iterator[dict[str, Any]]:
        """Yield the steps since the previous call, or all steps if a resumed run has replaced them."""
        if self._steps.is_replaced():
            if self._events.incarnation == self._incarnation_of_steps:
                return  # the process that replaced them is about to write its ``run_started``
            self._steps.reopen()
        self._incarnation_of_steps = self._events.incarnation
        yield from self._steps.read()

    def close(self) -> None:
        self._events.close()
        self._steps.close()


class _EventReader:
    """Reads event files one by one, even while they are renamed, compressed and removed.

    Files are identified by the number that they have once they are full. ``events.jsonl`` will get the next number
    after the newest part.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        """Number of the file that is being read or will be read next; 0 means the oldest file."""
        self._tail: _Tail | None = None
        self._is_lost = False
        """Whether the last file has disappeared, because a new run began or because reading was too slow."""
        self.incarnation: float | None = None
        """When the process that wrote the last events began."""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all new events. Raises `ConfigError` if a newer release wrote them."""
        while self._tail is not None or self._open():
            assert self._tail is not None
            # Checked first: if the file was complete, the following read returns all of it.
            is_complete = self._tail.is_complete() or self._newest() >= self._number
            for event in self._tail.read():
                if event.get("kind") == "run_started":
                    check_schema(event, self._directory)
                    if self._is_lost and event["began_at"] != self.incarnation:
                        event["is_new_run"] = True
                    self._is_lost, self.incarnation = False, event["began_at"]
                yield event
            if not is_complete:
                return
            if self._is_kept():
                self._number += 1
            else:
                self._lose()
            self.close()

    def _is_kept(self) -> bool:
        """Return whether the directory still contains the current file under its number."""
        assert self._tail is not None
        plain = self._directory / f"events.{self._number}.jsonl"
        return self._tail.is_at(plain) or self._tail.begins_like(plain.with_suffix(".jsonl.zst"))

    def _lose(self) -> None:
        """Continue with the oldest existing file."""
        self._is_lost, self._number = True, 0

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _open(self) -> bool:
        """Open the next file; return whether there is one."""
        while True:
            if numbers := [number for number in sorted(_parts(self._directory)) if number >= self._number]:
                self._number = numbers[0]
                plain = self._directory / f"events.{self._number}.jsonl"
                for tail in (_Tail(plain), _Tail(plain.with_suffix(".jsonl.zst"))):
                    if tail.open():
                        self._tail = tail
                        return True
                continue  # it has been removed meanwhile
            tail = _Tail(self._directory / EVENTS)
            is_there, number = tail.open(), self._newest() + 1
            self._number = self._number or 1
            if self._number == number:
                self._tail = tail if is_there else None
                return is_there
            tail.close()  # a new file has replaced the full one
            if self._number > number:
                self._lose()

    def _newest(self) -> int:
        return max(_parts(self._directory), default=0)


class _Tail:
    """Reads the complete lines that are appended to a file. An incomplete last line may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0
        """Offset of the end of the last line that was yielded."""

    def open(self) -> bool:
        """Open the file; return whether it exists."""
        try:
            self._file = _open_file(self._path)
        except FileNotFoundError:
            return False
        if self._path.suffix == ".zst":
            with self._file as compressed:
                self._file = BytesIO(_read(compressed, _MAX_LINE_BYTES))
        return True

    def read(self) -> Iterator[dict[str, Any]]:
        if self._file is None and not self.open():
            return
        assert self._file is not None
        self._file.seek(self._offset)
        for line in _lines_of(self._file):
            self._offset += len(line) + 1
            yield _row_of(line, self._path)

    def is_replaced(self) -> bool:
        """Return whether the path now refers to another file; False if the path does not exist."""
        return self._file is not None and self._path.exists() and not self.is_at(self._path)

    def is_at(self, path: Path) -> bool:
        """Return whether a path refers to the open file."""
        assert self._file is not None
        try:
            return not isinstance(self._file, BytesIO) and path.stat().st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def is_complete(self) -> bool:
        """Return whether no more lines will be appended, because the file is compressed or was removed."""
        assert self._file is not None
        return isinstance(self._file, BytesIO) or os.fstat(self._file.fileno()).st_nlink == 0

    def begins_like(self, path: Path) -> bool:
        """Return whether the file at a path has the same first line, as a compressed copy does."""
        assert self._file is not None
        self._file.seek(0)
        try:
            with _open_file(path) as other:
                return next(_lines_of(other), None) == next(_lines_of(self._file), None)
        except FileNotFoundError:
            return False

    def reopen(self) -> None:
        self.close()
        self._file, self._offset = None, 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


# ---------------------------------------------------------------------------------------------------------------
# Files


def event_files(directory: Path) -> list[Path]:
    """Return the event files, oldest first, with only one of the two files of a part that is being compressed."""
    parts = _parts(directory)
    older = [parts[number] for number in sorted(parts)]
    present = directory / EVENTS
    return [*older, present] if present.exists() else older


def _parts(directory: Path) -> dict[int, Path]:
    """Return the full event files by number."""
    found = sorted(directory.glob("events.*.jsonl*"))[::-1]
    named = [(_PART.fullmatch(path.name), path) for path in found]
    return {int(name[1]): path for name, path in named if name is not None}


def _unfinished(directory: Path) -> list[Path]:
    """Return the files left by a process that was killed during compression."""
    return list(directory.glob("events.*.partial"))


def _open_file(path: Path) -> IO[bytes]:
    if path.suffix != ".zst":
        return path.open("rb")
    import zstandard

    return zstandard.open(path, "rb")  # type: ignore[no-any-return]


def _lines_of(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := _read(file, _CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > _MAX_LINE_BYTES:
            raise ConfigError(f"{_name_of(file)} has a line of more than {_MAX_LINE_BYTES >> 20} MB: it is damaged")


def _row_of(line: bytes, path: Path) -> dict[str, Any]:
    """Return the object in a line. Raises `ConfigError` if it is damaged."""
    try:
        row = from_json(line)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error} in the line {line[:80]!r}; remove the line") from error
    if not isinstance(row, dict) or ("version" if path.name == STEPS else "kind") not in row:
        raise ConfigError(f"{path} is damaged: the line {line[:80]!r} is not an event; remove the line")
    return row


def _read(file: IO[bytes], size_bytes: int) -> bytes:
    """Return the next bytes of a file. Raises `ConfigError` if they cannot be read or decompressed."""
    try:
        return file.read(size_bytes)
    except Exception as error:  # zstandard is imported only for compressed files
        raise ConfigError(f"{_name_of(file)} cannot be read: {type(error).__name__}: {error}") from error


def _name_of(file: IO[bytes]) -> str:
    return str(getattr(file, "name", "an event file"))


def _keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with only its complete rows for which ``is_kept`` is true."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as kept:
        if path.exists():
            with path.open("rb") as file:
                kept.writelines(line + b"\n" for line in _lines_of(file) if is_kept(_row_of(line, path)))
    partial.replace(path)


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(sum(len(line) + 1 for line in _lines_of(file)))


def _compress(paths: Sequence[Path]) -> None:
    """Replace parts with compressed files.

    A part is left unchanged if the disk is full, and skipped if it was removed.
    """
    import zstandard

    for path in paths:
        target, partial = path.with_suffix(".jsonl.zst"), path.with_suffix(".partial")
        try:
            with path.open("rb") as file, partial.open("wb") as out:
                zstandard.ZstdCompressor().copy_stream(file, out)
            partial.rename(target)
            path.unlink()
        except OSError:
            partial.unlink(missing_ok=True)
