"""The check of background saves: what they write, and what training and `save_pending` show while they run.

An audit hook holds up the thread that writes, so that training continues before anything is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, skip
from inflight.conformance.worker.adam import create_scheduled
from inflight.conformance.worker.batches import make_batch, take_steps
from inflight.conformance.worker.file_events import listening, path_of
from inflight.conformance.worker.gathering import compare_changes, differing, gathered
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import AdjustableWorker, BackgroundSaver, TrainerWorker
from inflight.errors import CheckpointError

LEVEL = "checkpoint"
_HELD_S, _BEGIN_S, _SHORT_S, _END_S = 10.0, 1.0, 0.1, 30.0
"""The longest time for which a writing thread is held up, how long the check waits for it to begin, a timeout that is
too short for a save that is held up, and one that is long enough for any save."""


@runtime_checkable
class BackgroundSavingWorker(TrainerWorker, BackgroundSaver, Protocol):
    """A worker that is a `BackgroundSaver`."""


class _Hold:
    """A listener that holds up other threads that are about to change files below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._caller = threading.get_ident()
        self._may_continue = threading.Event()
        self._has_held = threading.Event()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = path_of(arguments)
        if threading.get_ident() == self._caller or path is None or not path.is_relative_to(self._directory):
            return
        self._has_held.set()
        if not self._may_continue.wait(_HELD_S):
            self.release()

    def is_holding(self) -> bool:
        """Return whether a thread is held up now."""
        return self._has_held.is_set() and not self._may_continue.is_set()

    def wait(self, worker: BackgroundSaver) -> None:
        """Return once a thread is held up, or after `_BEGIN_S`; after a tenth of that if no save is reported as
        pending."""
        started = time.monotonic()
        while not self._has_held.wait(0.01):
            if time.monotonic() > started + (_BEGIN_S if worker.save_pending else _BEGIN_S / 10):
                return

    def release(self) -> None:
        self._may_continue.set()


@check("W-77", deadline_s=60)
@look_at(
    "tensors that the copy shares with the parameters, moments or counters; collectives of the save among those of "
    "training; what save_pending and finish_save report while the save is still running; whether another save and a "
    "load wait for it"
)
def a_background_save_is_of_its_beginning(subject: WorkerSubject) -> None:
    """Where a worker can save in the background, begin_save() saves the state at the time of the call, while training
    continues as if there were no save: the checkpoint has the weights, version and optimizer that save() would have
    written. save_pending is true until the save has ended, and finish_save() returns once it has ended, or at once if
    none is pending; if its timeout is too short, finish_save() raises CheckpointError and may be called again. A
    begin_save() or load() during a save waits for that save. If a save fails, its begin_save() or finish_save() raises
    CheckpointError, and a later save succeeds."""
    worker = create_scheduled(subject)
    if not isinstance(worker, BackgroundSavingWorker):
        skip("saving in the background is not supported: it is not a BackgroundSaver")
    directory = subject.fresh_path("background")
    if subject.rank == 0:
        (directory / "held").mkdir(parents=True)
    subject.ranks.wait_for_all()
    _require_idle(subject, worker, "before the first save")
    _require_failure_reported(subject, worker, directory / "file" / "checkpoint")
    batches = [make_batch((9, 12), seed=800 + 10 * n + subject.data_rank) for n in range(3)]
    take_steps(worker, batches[:2])
    paths = {"save()": directory / "saved", "begin_save()": directory / "held" / "checkpoint"}
    worker.save(paths["save()"])
    saved = gathered(worker)
    save_while_training(subject, worker, paths["begin_save()"], partial(take_steps, worker, batches[2:]))
    found = {"a step during the save": gathered(worker)}
    for call, path in paths.items():
        resumed = create_scheduled(subject)
        error = error_of(partial(resumed.load, path))
        subject.require_on_all_ranks(error is None, f"what {call} saved does not load: {words_of(error)}")
        changed, version = differing(saved, gathered(resumed)), resumed.version
        words = f"at version 2, {call} saved version {version}; tensors that differ: {shortened(changed)}"
        subject.require_on_all_ranks(version == 2 and not changed, words)
        take_steps(resumed, batches[2:])
        found[f"a step after loading what {call} saved"] = gathered(resumed)
    if subject.rank == 0:
        what, expected = "a step after loading what save() saved", found.pop("a step after loading what save() saved")
        for other, weights in found.items():
            compare_changes(subject, saved, expected, weights, f"{other}, and {what}", by_the_same_worker=True)
    _require_in_turn(subject, worker, directory)


def _require_in_turn(subject: WorkerSubject, worker: BackgroundSavingWorker, directory: Path) -> None:
    """Fail unless a second save and a load that are called during a save wait for it. All ranks call this."""
    saved, version = gathered(worker), worker.version
    first, second, third, fourth = (directory / name for name in ("first", "second", "third", "fourth"))
    calls: dict[str, tuple[Path, Callable[[], None], Path]] = {
        "begin_save() during another save": (first, partial(worker.begin_save, second), second),
        "load() of the checkpoint that is being saved": (third, partial(worker.load, third), first),
    }
    if isinstance(worker, AdjustableWorker) and worker.takes_step_settings:
        load = partial(worker.load, fourth, optimizer=False)
        calls["load(optimizer=False) of the checkpoint that is being saved"] = (fourth, load, first)
    for what, (path, call, loaded) in calls.items():
        hold = _Hold(directory)
        with listening(hold):
            worker.begin_save(path)
            hold.wait(worker)
            threading.Timer(_SHORT_S, hold.release).start()
            error = error_of(call)
        worker.finish_save(_END_S)
        subject.require_on_all_ranks(error is None, f"{what} raises {words_of(error)}")
        error = error_of(partial(worker.load, loaded))
        changed = differing(saved, gathered(worker))
        subject.note(**{f"load after {what}": words_of(error)})
        is_right = error is None and worker.version == version and not changed
        words = f"after {what}, load() of a checkpoint raises {words_of(error)}, or loads other weights"
        subject.require_on_all_ranks(is_right, words)


def _require_failure_reported(subject: WorkerSubject, worker: BackgroundSaver, path: Path) -> None:
    """Fail unless a save to a path below a regular file fails with CheckpointError. All ranks call this."""
    if subject.rank == 0:
        path.parent.touch()
    subject.ranks.wait_for_all()

    def save() -> None:
        worker.begin_save(path)
        worker.finish_save(_END_S)

    error = error_of(save)
    subject.note(save_below_a_file=words_of(error))
    words = f"begin_save() and finish_save() of a checkpoint below a regular file raise {words_of(error)}"
    subject.require_on_all_ranks(isinstance(error, CheckpointError), f"{words}, not CheckpointError")
    _require_idle(subject, worker, "after a save that failed")


def save_while_training(
    subject: WorkerSubject, worker: BackgroundSaver, path: Path, train: Callable[[], object]
) -> None:
    """Train between begin_save() and the first change to a file, provided that another thread of this process makes
    that change. All ranks call this."""
    hold, problem = _Hold(path.parent), ""
    with listening(hold):
        try:
            worker.begin_save(path)
            train()
            hold.wait(worker)
            is_pending = worker.save_pending
            error = error_of(partial(worker.finish_save, _SHORT_S)) if hold.is_holding() else None
            is_still_pending = worker.save_pending
            was_held = hold.is_holding()
        finally:
            hold.release()
        if was_held and not (is_pending and is_still_pending):
            problem = "save_pending is false before the save has written anything"
        elif was_held and not isinstance(error, CheckpointError):
            problem = (
                f"finish_save({_SHORT_S}) raises {words_of(error)}, not CheckpointError, before the save has ended"
            )
        subject.require_on_all_ranks(not problem, problem)
        error = error_of(partial(worker.finish_save, _END_S))
    subject.note(was_held=was_held, finish_save_in_time=words_of(error))
    subject.require_on_all_ranks(error is None, f"finish_save() of a save that succeeds raises {words_of(error)}")
    _require_idle(subject, worker, "after finish_save()")


def _require_idle(subject: WorkerSubject, worker: BackgroundSaver, when: str) -> None:
    """Fail unless no save is pending and finish_save() returns at once. All ranks call this."""
    subject.require_on_all_ranks(not worker.save_pending, f"{when}, save_pending is true")
    started = time.monotonic()
    error = error_of(partial(worker.finish_save, _END_S))
    subject.require_on_all_ranks(error is None, f"{when}, finish_save() raises {words_of(error)}")
    seconds = time.monotonic() - started
    words = f"{when}, finish_save() takes {seconds:.2g} s although no save is pending"
    subject.require_on_all_ranks(seconds < _END_S / 2, words)
