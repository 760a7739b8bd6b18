"""The check of interrupted saves: at every instant, the files on disk must form a checkpoint.

No process is killed. Instead, the directory is copied just before a file is created, renamed or removed, which is the
state in which a crash at that instant would leave it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at
from inflight.conformance.worker.batches import accumulate, make_batch
from inflight.conformance.worker.file_events import listening
from inflight.conformance.worker.gathering import differing, distance, gathered
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import TrainerWorker
from inflight.errors import CheckpointError

LEVEL = "checkpoint"
_NAME = "checkpoint"


class _State(NamedTuple):
    """The weights of a version, and those after one more step; empty on ranks other than 0."""

    now: Mapping[str, torch.Tensor]
    next: Mapping[str, torch.Tensor]


class _Instants:
    """Copies of a directory, one for each state that its checkpoint passes through during a save."""

    def __init__(self, directory: Path, copies: Path) -> None:
        self._directory, self._copies = directory, copies
        self._previous = {it.stat().st_ino for it in (directory / _NAME).rglob("*") if it.is_file()}
        """Inode numbers of the previous checkpoint's files, which a save may remove one by one."""
        self._seen: set[object] = set()
        self._is_copying = False
        self.found: list[Path] = []

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Copy the directory if it has changed since the last copy."""
        if self._is_copying:
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
        state = (
            tuple((name, it.st_ino, it.st_size, it.st_mtime_ns) for name, it in files),
            sum(it.stat().st_ino in self._previous for it in self._directory.rglob("*")),
        )
        if state not in self._seen:
            self._seen.add(state)
            copy = self._copies / str(len(self.found))
            shutil.copytree(self._directory, copy, symlinks=True)
            self.found.append(copy)


@check("W-76", deadline_s=60)
@look_at(
    "what is at the path between removing the old checkpoint and renaming the new one, files that are written one "
    "by one at the final path, and what an interrupted save left behind"
)
def a_save_that_ends_in_the_middle(subject: WorkerSubject) -> None:
    """Whenever a save() ends, even in the middle, its path contains the complete previous or new checkpoint, or the
    complete previous one lies next to it; if there was none, load() raises CheckpointError or loads the new one. A
    later save() of any version succeeds and leaves nothing else next to the path; the same holds if that save ends in
    the middle."""
    worker, states = subject.create(), {}
    directory, copies = subject.fresh_path("crash"), subject.fresh_path("crash-copies")
    if subject.rank == 0:
        directory.mkdir()
        copies.mkdir()
    loaded = subject.create()
    for version in (1, 2):
        _step(worker, subject, version)
        found = _save_observed(subject, worker, directory, copies / str(version))
        loaded.load(directory / _NAME)
        now = gathered(loaded)
        _step(loaded, subject, 10)
        states[version] = _State(now, gathered(loaded))
        subject.note(**{f"instants of save {version}": len(found)})
        _require_complete(subject, loaded, found, states, f"save() number {version}")
        unfinished = [copy for copy in found if not (copy / _NAME).exists()][-1:]
        for copy in unfinished:
            if version == 1:
                _require_a_later_save(subject, loaded, copy / _NAME)
            else:
                _save_again(subject, worker, loaded, copy, copies / "again", states)


def _save_observed(subject: WorkerSubject, worker: TrainerWorker, directory: Path, copies: Path) -> list[Path]:
    """Save a checkpoint below ``directory``; return a copy of the directory for each instant of rank 0. All ranks call
    this."""
    instants = _Instants(directory, copies)
    with listening(instants.note) if subject.rank == 0 else contextlib.nullcontext():
        worker.save(directory / _NAME)
    (found, *_) = subject.ranks.exchange([str(copy) for copy in instants.found])
    return [Path(copy) for copy in found]


def _require_complete(
    subject: WorkerSubject, worker: TrainerWorker, found: Sequence[Path], states: Mapping[int, _State], what: str
) -> None:
    """Fail unless W-76 holds at each of these instants. All ranks call this."""
    for number, copy in enumerate(found, 1):
        problem = _problem_at(subject, worker, copy, states)
        words = f"if {what} ends at instant {number} of {len(found)}: {problem}"
        subject.require_on_all_ranks(not problem, words)


def _require_a_later_save(subject: WorkerSubject, worker: TrainerWorker, path: Path) -> None:
    """Fail unless a save succeeds at a path where an interrupted save left nothing. All ranks call this."""
    saved, wanted = gathered(worker), worker.version
    with _as_another_process():
        error = error_of(partial(worker.save, path))
    what = "a save at the path of one that had ended just before completion"
    _require_loaded(subject, worker, path, error, wanted, saved, what)


@contextlib.contextmanager
def _as_another_process() -> Iterator[None]:
    """Give this process another id in the context: the save after a killed one comes from another process."""
    own, other_id = os.getpid, os.getpid() + (1 << 24)
    os.getpid = lambda: other_id
    try:
        yield
    finally:
        os.getpid = own


def _save_again(
    subject: WorkerSubject,
    worker: TrainerWorker,
    loaded: TrainerWorker,
    directory: Path,
    copies: Path,
    states: Mapping[int, _State],
) -> None:
    """Save the latest version at a path where an interrupted save left no checkpoint, and require W-76 at every instant
    of this save too. All ranks call this."""
    found = _save_observed(subject, worker, directory, copies)
    subject.note(**{"instants of a save after an interrupted one": len(found)})
    what = "a save at the path of one that had ended with no checkpoint there"
    _require_complete(subject, loaded, found, states, what)
    _require_loaded(subject, loaded, directory / _NAME, None, worker.version, states[worker.version].now, what)


def _require_loaded(
    subject: WorkerSubject,
    worker: TrainerWorker,
    path: Path,
    error: Exception | None,
    version: int,
    weights: Mapping[str, torch.Tensor],
    what: str,
) -> None:
    """Fail unless the save that ``what`` names raised no error and left nothing else next to its path, and its weights
    and version are loaded."""
    error = error or error_of(partial(worker.load, path))
    subject.require_on_all_ranks(error is None, f"{what} raises {words_of(error)}")
    left = sorted(it.name for it in path.parent.iterdir() if it != path)
    subject.require_on_all_ranks(not left, f"{what} leaves {shortened(left)} next to its path")
    is_right = worker.version == version and not differing(weights, gathered(worker))
    subject.require_on_all_ranks(is_right, f"{what} is loaded as something else")


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
