"""Checks of the properties that a worker reports."""

from __future__ import annotations

from safetensors import safe_open

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.worker.subject import WorkerSubject

LEVEL = "discovery"


@check("W-01", look_at="rank, world_size and version of the worker; the version of a new one is 0")
def ranks_and_version_are_known(subject: WorkerSubject) -> None:
    """A worker reports its rank, the number of ranks, and the number of optimizer steps that its weights have taken."""
    worker = subject.create()
    said = [worker.rank, worker.world_size, worker.version]
    everyone = subject.ranks.exchange(said)
    subject.note(rank_world_size_and_version=everyone)
    require(
        said == [subject.rank, subject.world_size, 0],
        f"it reports rank {said[0]} of {said[1]} at version {said[2]}, but it is rank {subject.rank} of "
        f"{subject.world_size}, and no step was taken",
    )


@check("W-02", "ranks", deadline_s=10)
@look_at("a collective inside parameter_specs: gathering to learn shapes, a barrier, a broadcast of names")
def specs_do_not_communicate(subject: WorkerSubject) -> None:
    """parameter_specs() never communicates: a single rank may call it."""
    worker = subject.create()
    subject.ranks.wait_for_all()
    num_specs = len(worker.parameter_specs()) if subject.rank == 0 else 0
    subject.ranks.wait_for_all()
    subject.note(num_specs=num_specs)


@check("W-03", look_at="prefixes of wrappers in names, shapes of shards, a head that is tied and stored once")
def specs_are_those_of_the_checkpoint(subject: WorkerSubject) -> None:
    """parameter_specs() returns the checkpoint's names with their full shapes, the same on every rank."""
    for tied in (False, True):
        worker = subject.create(tied=tied)
        specs = [(spec.name, spec.dtype, list(spec.shape)) for spec in worker.parameter_specs()]
        everyone = subject.ranks.exchange(specs)
        with safe_open(subject.model(tied=tied) / "model.safetensors", framework="pt") as stored:
            shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        names = [name for name, _, _ in specs]
        subject.note(**{"num_specs_tied" if tied else "num_specs": len(specs), "dtype": specs[0][1] if specs else ""})
        lost, more = sorted(set(shapes) - set(names)), sorted(set(names) - set(shapes))
        kind = "tied model" if tied else "untied model"
        require(not lost and not more, f"{kind}: missing {shortened(lost)}, not in the checkpoint {shortened(more)}")
        require(len(set(names)) == len(names), f"{kind}: a name occurs more than once")
        other = [f"{name} is {shape}, stored {shapes[name]}" for name, _, shape in specs if shape != shapes[name]]
        require(not other, f"{kind}: shapes are not the full ones: {shortened(other)}")
        strange = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        require(not strange, f"{kind}: the specs of ranks {strange} differ from those of rank 0")
