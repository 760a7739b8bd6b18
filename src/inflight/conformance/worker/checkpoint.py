"""Checks of `save` and `load`: what is restored, on any number of ranks, and what is left after a failure."""

from __future__ import annotations

import contextlib
import resource
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.worker.adam import create_scheduled
from inflight.conformance.worker.batches import accumulate, logprobs_of, make_batch, part_of, take_steps
from inflight.conformance.worker.damage import damages_of, large_files
from inflight.conformance.worker.file_events import FullDisk, listening
from inflight.conformance.worker.gathering import Weights, compare_changes, differing, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import AdjustableWorker, TrainerWorker
from inflight.errors import CheckpointError, TrainerError
from inflight.types import StepResult

LEVEL = "checkpoint"
_LENGTHS = (9, 12, 5, 7)
_MOST_FILES = 16
"""Maximum number of files at which W-41 makes a save fail, one at a time."""


@check("W-35", deadline_s=40)
@look_at(
    "weights must be saved in the dtype they are trained in; the version is part of the checkpoint; gathered or cast "
    "copies of parameters that outlive a forward pass without a backward pass"
)
def load_restores_weights_and_version(subject: WorkerSubject) -> None:
    """load() restores the weights, bit for bit, and the version that save() wrote; later forward passes use the loaded
    weights, whether or not the head is tied to the embedding."""
    for tied in (False, True):
        _require_restored(subject, tied=tied)


def _require_restored(subject: WorkerSubject, *, tied: bool) -> None:
    """Fail unless a load restores a worker's state, and forward passes use it. All ranks call this."""
    worker, path = create_scheduled(subject, tied=tied), subject.fresh_path("saved-tied" if tied else "saved")
    _train(worker, subject, 0, 1)
    worker.save(path)
    saved = gathered(worker)
    _train(worker, subject, 2, 3)
    new, twin = create_scheduled(subject, tied=tied), create_scheduled(subject, tied=tied)
    _train(twin, subject, 2, 3)
    others = {"the worker that continued": worker, "another worker at the same version": twin}
    before = {name: _logprobs(other, subject) for name, other in others.items()}
    for name, other in {"a new worker": new, **others}.items():
        other.load(path)
        changed, version = differing(saved, gathered(other)), other.version
        subject.note(**{f"version ({name})": version, f"differing tensors ({name})": len(changed)})
        subject.require_on_all_ranks(version == 2, f"{name} is at version {version} after loading version 2")
        subject.require_on_all_ranks(
            not changed, f"{name} has weights that differ from the saved ones: {shortened(changed)}"
        )
    expected_T = _logprobs(new, subject)
    for name, other in others.items():
        apart, moved = (float((expected_T - it_T).abs().max()) for it_T in (_logprobs(other, subject), before[name]))
        subject.note(**{f"logprobs apart after and before the load ({name})": [apart, moved]})
        subject.require_on_all_ranks(
            apart <= subject.tolerance.logprob,
            f"logprobs of {name}{' (tied)' if tied else ''} differ after the load by up to {apart:.2e} nats from those "
            f"of a new worker that loaded the same checkpoint, and by up to {moved:.2e} nats before it",
        )


@check("W-36", deadline_s=40)
@look_at(
    "the optimizer's moments and its count of steps, the schedule's position, gradients that save() clears or that it "
    "leaves out of the next step"
)
def training_continues_after_a_load(subject: WorkerSubject) -> None:
    """load() restores the optimizer and the schedule: later steps are the same as without a save and a load, even if
    the checkpoint was saved before the first step. A save() between backward() and step() changes nothing: the step
    uses the whole gradient."""
    _require_gradients_kept(subject)
    steady, path = create_scheduled(subject), subject.fresh_path("resumed")
    _train(steady, subject, 0, 1)
    steady.save(path)
    start = gathered(steady)
    expected = _train(steady, subject, 2, 3)
    expected_weights = gathered(steady)
    for name, resumed in {"a new worker": create_scheduled(subject), "the worker that continued": steady}.items():
        resumed.load(path)
        found = _train(resumed, subject, 2, 3)
        weights = gathered(resumed)
        rates = {"without": expected.learning_rate, "with": found.learning_rate}
        subject.note(**{f"learning_rates ({name})": rates, f"versions ({name})": [expected.version, found.version]})
        words = f"{name} is at version {found.version} after loading and two steps, not {expected.version}"
        require(found.version == expected.version, words)
        require(
            rates["with"] == rates["without"],
            f"the learning rate with and without a load in between, for {name}: {rates}",
        )
        if subject.rank == 0:
            what = f"two steps of {name} after a load, and the same steps without it"
            compare_changes(subject, start, expected_weights, weights, what, by_the_same_worker=True)
    _require_first_step_repeated(subject, steady)


def _require_first_step_repeated(subject: WorkerSubject, worker: TrainerWorker) -> None:
    """Fail unless ``worker``, which has taken steps, repeats the first step of a new worker after loading its
    checkpoint. All ranks call this."""
    new, path = create_scheduled(subject), subject.fresh_path("before-any-step")
    new.save(path)
    start = gathered(new)
    worker.load(path)
    for it in (new, worker):
        _train(it, subject, 4)
    expected, found = gathered(new), gathered(worker)
    if subject.rank == 0:
        what = "the first step of a new worker, and that of one that loaded its checkpoint after several steps"
        compare_changes(subject, start, expected, found, what, by_the_same_worker=True)


@check(
    "W-37", look_at="config.json, names of tensors, one copy of tied ones; optimizer files must be in another directory"
)
def a_saved_directory_is_a_checkpoint(subject: WorkerSubject) -> None:
    """A saved directory is a Hugging Face checkpoint: config.json and safetensors files with the same tensor names."""
    for tied in (False, True):
        worker, path = subject.create(tied=tied), subject.fresh_path(f"exported-{tied}")
        _train(worker, subject, 0)
        worker.save(path)
        weights = gathered(worker)
        subject.ranks.wait_for_all()
        if subject.rank == 0:
            kind = "tied" if tied else "untied"
            files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
            lost = sorted(_stored(path).keys() ^ weights.keys())
            subject.note(**{f"files ({kind})": files})
            require(not lost, f"{kind}: the directory and gather_weights() have different tensors: {shortened(lost)}")
            exported, batch = ReferenceModel(path), make_batch((20,), seed=180)
            found = exported.logprobs(batch)
            exported.put(weights)
            apart = float((found - exported.logprobs(batch)).abs().max().detach())
            subject.note(**{f"largest_difference ({kind})": apart})
            words = f"{kind}: its logprobs differ from those of the worker by {apart:.2e}"
            require(apart <= subject.tolerance.logprob, words)
        subject.ranks.wait_for_all()


@check("W-38", deadline_s=30, after=lambda subject: _load_with_weights(subject, "all-ranks"))
@look_at("state that is saved as a rank's shards; seeds, schedules and counters per rank")
def save_on_all_ranks(subject: WorkerSubject) -> None:
    """One rank resumes from a checkpoint that many ranks saved."""
    subject.skip_on_one_rank()
    _save_with_weights(subject, "all-ranks")


@check("W-39", deadline_s=30, before=lambda subject: _save_with_weights(subject, "single-rank"))
@look_at("each rank slices its own shard from full tensors, with rows that do not divide evenly")
def all_ranks_resume(subject: WorkerSubject) -> None:
    """Many ranks resume from a checkpoint that one rank saved."""
    subject.skip_on_one_rank()
    _load_with_weights(subject, "single-rank")


@check("W-40", deadline_s=60)
@look_at(
    "weights, moments or counters that are replaced before everything has been read and validated; errors of the "
    "libraries that read the files; tensors that keep their values because the file has none for them; ranks that do "
    "not notify the others of a failure"
)
def a_broken_checkpoint_changes_nothing(subject: WorkerSubject) -> None:
    """load() of a missing or broken checkpoint raises CheckpointError and loads nothing. A checkpoint is broken if a
    file of tensors is truncated, lacks a tensor, or has a tensor of another shape. If another file is truncated or
    empty, or only some ranks see the checkpoint, load() may instead load exactly what was saved."""
    worker, good = create_scheduled(subject), subject.fresh_path("good")
    _train(worker, subject, 0)
    worker.save(good)
    saved = gathered(worker)
    damages = damages_of(good)
    subject.ranks.wait_for_all()
    _train(worker, subject, 1)
    nowhere = subject.fresh_path("nowhere")
    seen, what = good if subject.rank == 0 else nowhere, "a checkpoint that only rank 0 sees"
    if subject.world_size > 1 and not _is_refused_or_exact(subject, worker, gathered(worker), saved, seen, what):
        _train(worker, subject, 1)
    _require_refused(subject, worker, gathered(worker), nowhere, "a path with nothing at it")
    for damage in sorted(damages, key=lambda damage: damage.must_be_refused):
        path, before = subject.fresh_path("broken"), gathered(worker)
        if subject.rank == 0:
            shutil.copytree(good, path)
            damage.apply(path)
        subject.ranks.wait_for_all()
        if damage.must_be_refused:
            _require_refused(subject, worker, before, path, damage.what)
        elif not _is_refused_or_exact(subject, worker, before, saved, path, damage.what):
            _train(worker, subject, 1)
    require(any(damage.must_be_refused for damage in damages), "save() wrote no file that could be truncated")
    if isinstance(worker, AdjustableWorker) and worker.takes_step_settings:
        what = "a path with nothing at it, without the optimizer"
        _require_refused(subject, worker, gathered(worker), nowhere, what, optimizer=False)
    _require_optimizer_kept(subject, worker)


def _require_optimizer_kept(subject: WorkerSubject, worker: TrainerWorker) -> None:
    """Fail unless a worker at version 2 takes the same step after it has refused loads as without them. All ranks call
    this."""
    steady, before = create_scheduled(subject), gathered(worker)
    _train(steady, subject, 0, 1)
    for it in (steady, worker):
        _train(it, subject, 2)
    expected, found = gathered(steady), gathered(worker)
    if subject.rank == 0:
        what = "a step after loads that raised CheckpointError, and without them"
        compare_changes(subject, before, expected, found, what, by_the_same_worker=True)


@check("W-41", deadline_s=60)
@look_at(
    "write next to the old directory, rename once everything is on disk, notify the other ranks of a failure, also "
    "where small files are written; remove the old directory and what failed saves have left"
)
def a_failed_save_leaves_the_previous_checkpoint(subject: WorkerSubject) -> None:
    """A save() that fails at any file, on any rank, raises CheckpointError on every rank, and the previous checkpoint
    at its path stays complete. A later save() succeeds and leaves nothing else next to its path."""
    # The second save over the first fails because a limit keeps files smaller than the largest one.
    worker, path, earlier = subject.create(), subject.fresh_path("kept"), subject.fresh_path("kept-earlier")
    _train(worker, subject, 0)
    worker.save(path)
    saved, again = gathered(worker), subject.create()
    _train(worker, subject, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = [(path / file).stat().st_size for file in large_files(path)]
    if subject.rank == 0:
        shutil.copytree(path, earlier)
    subject.ranks.wait_for_all()
    if sizes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * max(sizes) // 4, limits[1]))
    try:
        error = error_of(partial(worker.save, path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    subject.ranks.wait_for_all()
    subject.note(error=words_of(error), limit_bytes=3 * max(sizes, default=0) // 4)
    _require_kept(subject, error, again, path, saved, "with a limit on the size of files")
    worker.save(path)
    again.load(path)
    require(again.version == 2, f"a save after the failed one is loaded as version {again.version}, not 2")
    for rank in sorted({0, subject.world_size - 1}):
        _fail_at_each_file(subject, worker, again, earlier, saved, rank)


@check("W-44", deadline_s=30)
@look_at("zero_grad in load(), on the tensors that backward() fills; buffers of a pending reduction")
def load_drops_pending_gradients(subject: WorkerSubject) -> None:
    """load() discards the gradients of every preceding backward(), even if it loads the weights alone."""
    worker, path, reference = subject.create(), subject.fresh_path("pending"), ReferenceModel(subject.model())
    worker.save(path)
    batches = [make_batch((18,), seed=300 + rank) for rank in range(subject.data_size)]
    expected, mine = reference.gradient_norm(batches), batches[subject.data_rank]
    loads = {"load()": partial(worker.load, path)}
    if isinstance(worker, AdjustableWorker) and worker.takes_step_settings:
        loads["load(optimizer=False)"] = partial(worker.load, path, optimizer=False)
    for name, load in loads.items():
        accumulate(worker, [mine])
        load()
        error = error_of(worker.step)
        subject.note(**{f"step after {name}": words_of(error)})
        subject.require_on_all_ranks(
            isinstance(error, TrainerError),
            f"a step after backward() and {name} raises {words_of(error)}, not TrainerError: gradients are left",
        )
        accumulate(worker, [mine], 2.0)
        load()
        accumulate(worker, [mine])
        what = f"the first step after {name}, to which no earlier backward() may contribute"
        subject.compare_norm(worker, expected, what)


def _require_refused(
    subject: WorkerSubject, worker: TrainerWorker, before: Weights, path: Path, what: str, **options: bool
) -> None:
    """Fail unless a load raises CheckpointError on every rank and changes nothing at version 2. All ranks call this."""
    error = error_of(partial(worker.load, path, **options))
    changed, version = differing(before, gathered(worker)), worker.version
    subject.note(**{what: words_of(error)})
    refused = isinstance(error, CheckpointError)
    subject.require_on_all_ranks(refused, f"{what}: load() raises {words_of(error)}, not CheckpointError")
    left = f"{what}: load() raises CheckpointError, but leaves version {version} and changes {shortened(changed)}"
    subject.require_on_all_ranks(version == 2 and not changed, left)


def _is_refused_or_exact(
    subject: WorkerSubject, worker: TrainerWorker, before: Weights, saved: Weights, path: Path, what: str
) -> bool:
    """Return whether a load is refused. Fail unless it is refused as `_require_refused` requires, or loads version 1
    exactly as saved. All ranks call this."""
    error = error_of(partial(worker.load, path))
    subject.note(**{what: words_of(error)})
    others = subject.ranks.exchange(error is None)
    if not any(others):
        changed, version = differing(before, gathered(worker)), worker.version
        refused = isinstance(error, CheckpointError)
        subject.require_on_all_ranks(refused, f"{what}: load() raises {words_of(error)}, not CheckpointError")
        left = f"{what}: load() raises CheckpointError, but leaves version {version} and changes {shortened(changed)}"
        subject.require_on_all_ranks(version == 2 and not changed, left)
        return True
    words = f"{what}: load() raises {words_of(error)}, but nothing on ranks {[r for r, it in enumerate(others) if it]}"
    subject.require_on_all_ranks(error is None, words)
    changed, version = differing(saved, gathered(worker)), worker.version
    words = f"{what}: load() raises no error, but loads version {version}, not 1, or other values: {shortened(changed)}"
    subject.require_on_all_ranks(version == 1 and not changed, words)
    return False


def _fail_at_each_file(
    subject: WorkerSubject, worker: TrainerWorker, again: TrainerWorker, earlier: Path, saved: Weights, failing: int
) -> None:
    """Fail unless a copy of the checkpoint ``earlier``, of version 1, stays complete whichever file of version 2 the
    rank ``failing`` cannot write, and a later save succeeds. All ranks call this."""
    directory, refused = subject.fresh_path(f"full-disk-{failing}"), []
    path = directory / "checkpoint"
    if subject.rank == 0:
        shutil.copytree(earlier, path)
    subject.ranks.wait_for_all()
    for number in range(_MOST_FILES):
        disk = FullDisk(directory, number)
        with listening(disk) if subject.rank == failing else contextlib.nullcontext():
            error = error_of(partial(worker.save, path))
        file = subject.ranks.exchange(disk.refused)[failing]
        if not file:
            subject.require_on_all_ranks(error is None, f"a save after failed ones raises {words_of(error)}")
            break
        refused.append(file)
        _require_kept(subject, error, again, path, saved, f"with no space for {file} on rank {failing}")
    subject.note(**{f"files that rank {failing} could not write": refused})
    worker.save(path)
    again.load(path)
    words = f"a save after failed ones of rank {failing} is loaded as version {again.version}, not 2"
    subject.require_on_all_ranks(again.version == 2, words)
    left = sorted(file.name for file in directory.iterdir() if file != path)
    subject.require_on_all_ranks(not left, f"a save after failed ones of rank {failing} leaves {left} next to its path")


def _require_kept(
    subject: WorkerSubject, error: Exception | None, again: TrainerWorker, path: Path, saved: Weights, when: str
) -> None:
    """Fail unless a save raised CheckpointError on every rank and its path still holds version 1. All ranks call
    this."""
    words = f"{when}, save() raises {words_of(error)}, not CheckpointError"
    subject.require_on_all_ranks(isinstance(error, CheckpointError), words)
    load_error = error_of(partial(again.load, path))
    subject.note(load_error=words_of(load_error), version=again.version)
    words = f"after a save that failed {when}, the previous checkpoint does not load: {words_of(load_error)}"
    subject.require_on_all_ranks(load_error is None, words)
    words = f"after a save of version 2 that failed {when}, version {again.version} is loaded instead of version 1"
    subject.require_on_all_ranks(again.version == 1, words)
    changed = differing(saved, gathered(again))
    words = f"after a save that failed {when}, other weights are loaded: {shortened(changed)}"
    subject.require_on_all_ranks(not changed, words)


def _require_gradients_kept(subject: WorkerSubject) -> None:
    """Fail unless gradients survive a save. All ranks call this."""
    pairs = [
        [make_batch((11, 6), seed=310 + share), make_batch((3, 14), seed=320 + share)]
        for share in range(subject.data_size)
    ]
    expected = ReferenceModel(subject.model()).gradient_norm([batch for pair in pairs for batch in pair])
    mine = pairs[subject.data_rank]
    for num_before, which in ((1, "the first of two calls"), (2, "the last call")):
        worker = create_scheduled(subject)
        accumulate(worker, mine[:num_before])
        worker.save(subject.fresh_path("between"))
        accumulate(worker, mine[num_before:])
        subject.compare_norm(worker, expected, f"a step after a save() that followed {which} of backward()")


def _logprobs(worker: TrainerWorker, subject: WorkerSubject) -> torch.Tensor:
    """Return the logprobs [T] of this rank's micro-batch, computed without gradients."""
    return logprobs_of(worker, make_batch((23,), seed=190 + subject.data_rank))


def _train(worker: TrainerWorker, subject: WorkerSubject, *seeds: int) -> StepResult:
    """Take one step per seed, with the segments divided among the ranks; return the last result."""
    mine = range(subject.data_rank, len(_LENGTHS), subject.data_size)
    return take_steps(worker, [part_of(make_batch(_LENGTHS, seed=200 + seed), mine) for seed in seeds])[-1]


def _save_with_weights(subject: WorkerSubject, name: str) -> None:
    """Store a checkpoint after two steps, its weights, and the weights after two more steps."""
    worker, path = subject.create(), subject.fresh_path(name)
    facts = subject.fresh_path(f"{name}-facts")
    _train(worker, subject, 0, 1)
    worker.save(path)
    saved = gathered(worker)
    _train(worker, subject, 2, 3)
    later = gathered(worker)
    if subject.rank == 0:
        facts.mkdir()
        save_file(saved, facts / "saved.safetensors")
        save_file(later, facts / "later.safetensors")


def _load_with_weights(subject: WorkerSubject, name: str) -> None:
    """Fail unless the saved state is restored and two more steps lead to the weights that were stored for
    comparison."""
    worker, facts = subject.create(), subject.directory / f"{name}-facts"
    worker.load(subject.directory / name)
    version, loaded = worker.version, gathered(worker)
    _train(worker, subject, 2, 3)
    later = gathered(worker)
    subject.note(version=version)
    require(version == 2, f"version 2 was saved, but version {version} was loaded")
    if subject.rank == 0:
        saved = load_file(facts / "saved.safetensors")
        changed = differing(saved, loaded)
        require(not changed, f"the loaded weights differ from the saved ones: {shortened(changed)}")
        compare_changes(subject, saved, load_file(facts / "later.safetensors"), later, "two steps after the load")


def _stored(directory: Path) -> dict[str, object]:
    """Return the tensors in the safetensors files next to config.json, where servers look for them."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
