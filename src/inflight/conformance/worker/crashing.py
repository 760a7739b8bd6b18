"""The check of interrupted saves: at every instant, the files on disk must form a checkpoint.

No process is killed. Instead, the directory is copied just before a file is created, renamed or removed, which is the
state in which a crash at that instant would leave it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at
from inflight.conformance.worker.batches import accumulate, make_batch
from inflight.conformance.worker.gathering import differing, distance, gathered
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.errors import CheckpointError

LEVEL = "checkpoint"
_NAME = "checkpoint"
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_WRITES = os.O_WRONLY | os.O_RDWR


class _State(NamedTuple):
    """The weights of a version, and those after one more step; empty on ranks other than 0."""

    now: Mapping[str, torch.Tensor]
    next: Mapping[str, torch.Tensor]


class _Instants:
    """Copies of a directory, one for each state that its checkpoint passes through during a save."""

    def __init__(self, directory: Path, copies: Path) -> None:
        self._directory, self._copies = directory, copies
        self._seen: set[object] = set()
        self._is_copying = False
        self.found: list[Path] = []

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Copy the directory if this audit event announces a change to a file and the directory has changed since the
        last copy."""
        is_change = event.startswith(_CHANGES) or (event == "open" and bool(arguments[2] & _WRITES))
        if not is_change or self._is_copying:
            return
        self._is_copying = True
        try:
            with contextlib.suppress(OSError):  # another rank changes it meanwhile
                self._copy()
        finally:
            self._is_copying = False

    def _copy(self) -> None:
        checkpoint = self._directory / _NAME
        top = checkpoint if checkpoint.exists() else self._directory
        files = [(str(it.relative_to(self._directory)), it.stat()) for it in sorted(top.rglob("*"))]
        state = tuple((name, it.st_ino, it.st_size, it.st_mtime_ns) for name, it in files)
        if state not in self._seen:
            self._seen.add(state)
            copy = self._copies / str(len(self.found))
            shutil.copytree(self._directory, copy, symlinks=True)
            self.found.append(copy)


_watched: list[_Instants] = []
"""The objects that currently receive events. An audit hook cannot be removed from a process."""


@contextlib.contextmanager
def _watching(instants: _Instants) -> Iterator[None]:
    if not hasattr(_watching, "hook"):
        vars(_watching)["hook"] = _note
        sys.addaudithook(_note)
    _watched.append(instants)
    try:
        yield
    finally:
        _watched.clear()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    for instants in _watched:
        instants.note(event, arguments)


@check("W-76", deadline_s=60)
@look_at(
    "what is at the path between removing the old checkpoint and renaming the new one, files that are written one "
    "by one at the final path, and what an interrupted save left behind"
)
def a_save_that_ends_in_the_middle(subject: WorkerSubject) -> None:
    """Whenever a save() ends, even in the middle, its path contains the complete previous or new checkpoint, or the
    complete previous one lies next to it; if there was none, load() raises CheckpointError or loads the new one. A
    later save() succeeds."""
    worker, states = subject.create(), {}
    directory, copies = subject.fresh_path("crash"), subject.fresh_path("crash-copies")
    if subject.rank == 0:
        directory.mkdir()
        copies.mkdir()
    loaded = subject.create()
    for version in (1, 2):
        _step(worker, subject, version)
        instants = _Instants(directory, copies / str(version))
        with _watching(instants) if subject.rank == 0 else contextlib.nullcontext():
            worker.save(directory / _NAME)
        loaded.load(directory / _NAME)
        now = gathered(loaded)
        _step(loaded, subject, 10)
        states[version] = _State(now, gathered(loaded))
        (found, *_) = subject.ranks.exchange([str(copy) for copy in instants.found])
        subject.note(**{f"instants of save {version}": len(found)})
        for number, copy in enumerate(map(Path, found), 1):
            problem = _problem_at(subject, loaded, copy, states)
            words = f"if save() number {version} ends at instant {number} of {len(found)}: {problem}"
            subject.require_on_all_ranks(not problem, words)
        if version == 1:
            unfinished = [copy for copy in map(Path, found) if not (copy / _NAME).exists()]
            for path in [copy / _NAME for copy in unfinished[-1:]]:
                saved, wanted = gathered(loaded), loaded.version
                error = error_of(partial(loaded.save, path)) or error_of(partial(loaded.load, path))
                words = f"a save at the path of one that had ended just before completion raises {words_of(error)}"
                subject.require_on_all_ranks(error is None, words)
                is_right = loaded.version == wanted and not differing(saved, gathered(loaded))
                words = "a save at the path of one that had ended just before completion is loaded as something else"
                subject.require_on_all_ranks(is_right, words)


def _problem_at(subject: WorkerSubject, worker: TrainerWorker, copy: Path, states: Mapping[int, _State]) -> str:
    """Return what is wrong with a copy, or an empty string if nothing is. All ranks call this."""
    path = copy / _NAME
    problem = _problem_of(subject, worker, path, states)
    if not problem or (len(states) == 1 and not path.exists()):
        return ""
    if not path.exists():
        others = sorted(it for it in copy.iterdir() if it.is_dir())
        if any(not _problem_of(subject, worker, other, states) for other in others):
            return ""
        problem = f"{problem}, nor does one of {[it.name for it in others]} next to it"
    return problem


def _problem_of(subject: WorkerSubject, worker: TrainerWorker, path: Path, states: Mapping[int, _State]) -> str:
    """Return why ``path`` does not hold one of these states completely, or an empty string if it does.

    All ranks call this.
    """
    error = error_of(partial(worker.load, path))
    errors = subject.ranks.exchange(words_of(error))
    if isinstance(error, CheckpointError) and len(states) == 1:
        return ""
    if any(error != words_of(None) for error in errors):
        return f"load() raises {errors}"
    version, now = worker.version, gathered(worker)
    _step(worker, subject, 10)
    later = gathered(worker)
    if version not in states:
        return f"version {version} is loaded, not one of {list(states)}"
    problem = ""
    if subject.rank == 0:
        state = states[version]
        if changed := differing(state.now, now):
            problem = f"version {version} is loaded with weights that differ from its own: {shortened(changed, 3)}"
        elif distance(later, state.next) > subject.tolerance.change * distance(state.next, state.now):
            problem = (
                f"version {version} is loaded, but with the optimizer of another one: a step leads to other weights"
            )
    return str(subject.ranks.exchange(problem)[0])


def _step(worker: TrainerWorker, subject: WorkerSubject, seed: int) -> None:
    accumulate(worker, [make_batch((9, 12), seed=760 + 10 * seed + subject.data_rank)])
    worker.step()
