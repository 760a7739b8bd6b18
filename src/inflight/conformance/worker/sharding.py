"""Checks of workers whose ranks each send the boxes of tensors that they hold."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from inflight.base.shortened import shortened
from inflight.base.threads import start_in_thread
from inflight.conformance.checks import check, look_at, skip
from inflight.conformance.worker.batches import accumulate, make_batch, take_steps
from inflight.conformance.worker.gathering import gathered
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import AdjustableWorker, ShardedWeightSource, TrainerWorker
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import checksum, pack
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import DTYPE_SIZES, Box, Sharding, box_size

LEVEL = "sharded"
_SILENT_S, _SLACK_S = 1.0, 3.0
"""How long a rank waits for a silent rank, and how much later it may raise its error."""
_FORMING = timedelta(seconds=5)
_LARGEST_SHARE = 2.0
_STEP_S = 0.3
"""Longer than a step or a load of the kit's model takes if it does not have to wait."""


@runtime_checkable
class ShardedWorker(TrainerWorker, ShardedWeightSource, Protocol):
    """A worker that is a `ShardedWeightSource`."""


@check("W-68", "ranks", deadline_s=10)
@look_at("a collective inside shardings: what each rank holds follows from the layout alone")
def shardings_do_not_communicate(subject: WorkerSubject) -> None:
    """Where the ranks of a worker send what they hold, shardings() never communicates and returns the same on every
    rank."""
    worker = _create(subject)
    found = [[sharding.model_dump() for sharding in worker.shardings()]] if subject.rank == 0 else []
    subject.ranks.wait_for_all()
    found = found or [[sharding.model_dump() for sharding in worker.shardings()]]
    everyone = subject.ranks.exchange(found)
    strange = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    subject.note(num_shardings=len(found[0]))
    subject.require_on_all_ranks(not strange, f"the shardings of ranks {strange} differ from those of rank 0")
    if not found[0]:
        skip(_GATHERED)


@check("W-69", "ranks")
@look_at("copies of the same part on several ranks, parameters that are not divided, and short or empty last shards")
def elements_are_sent_once(subject: WorkerSubject) -> None:
    """The boxes of all ranks together contain every element of every tensor exactly once, and no rank sends more than
    twice the average."""
    for tied in (False, True):
        worker, shardings = _create_sharded(subject, tied=tied)
        specs = worker.parameter_specs()
        num_bytes, problems = [0] * subject.world_size, []
        for spec, sharding in zip(specs, shardings, strict=True):
            counts = torch.zeros(spec.shape, dtype=torch.int32)
            for rank, boxes in enumerate(sharding.senders):
                num_bytes[rank] += sum(map(box_size, boxes)) * DTYPE_SIZES[spec.dtype]
                for box in boxes:
                    counts[_slices(box)] += 1
            fewest, most = int(counts.min()), int(counts.max())
            if (fewest, most) != (1, 1):
                problems.append(f"elements of {spec.name} are sent from {fewest} to {most} times")
        share = max(num_bytes) * len(num_bytes) / sum(num_bytes)
        if share > _LARGEST_SHARE:
            problems.append(f"a rank sends {share:.3g} times the mean: {num_bytes} bytes")
        subject.note(**{f"bytes by rank{' (tied)' if tied else ''}": num_bytes})
        subject.require_on_all_ranks(not problems, f"{len(problems)} problems: {shortened(problems, 3)}")


@check("W-70", "ranks", deadline_s=30)
@look_at(
    "the order of ranks and boxes, cuts of other dimensions than the first, the wire dtype, memory that boxes share"
)
def boxes_equal_gathered_weights(subject: WorkerSubject) -> None:
    """local_weights() yields, bucket by bucket, the boxes of the tensors that gather_weights() yields, bit for bit."""
    for tied in (False, True):
        worker, shardings = _create_sharded(subject, tied=tied)
        take_steps(worker, [make_batch((14, 8), seed=680 + 10 * n + subject.data_rank) for n in range(2)])
        _require_equal(subject, worker, shardings, "tied model" if tied else "untied model")


@check("W-71", "ranks", deadline_s=15)
@look_at("a collective inside local_weights: a rank that fails must not hold up the others")
def one_rank_alone_yields_its_boxes(subject: WorkerSubject) -> None:
    """local_weights() never communicates: a single rank may exhaust it."""
    worker, _ = _create_sharded(subject)
    num_tensors = 0
    for rank in range(subject.world_size):
        subject.ranks.wait_for_all()
        if rank == subject.rank:
            plan = plan_buckets(worker.parameter_specs(), 4096)
            num_tensors = sum(len(bucket.tensors) for bucket in worker.local_weights(plan))
    subject.ranks.wait_for_all()
    subject.note(num_tensors=num_tensors)


@check("W-72", "ranks", deadline_s=40)
@look_at("copies that are kept from an earlier call, and whether steps and loads wait for readers to finish")
def boxes_are_of_the_present_step(subject: WorkerSubject) -> None:
    """local_weights() yields the weights of the current step, even if the next step or a load is requested before every
    such iterator is exhausted or closed: that step or load waits, and changes neither the weights nor the version
    until then."""
    worker, shardings = _create_sharded(subject)
    path = subject.fresh_path("read")
    worker.save(path)
    for num_steps in range(2):
        _require_equal(subject, worker, shardings, f"after {num_steps} steps")
        with contextlib.closing(worker.local_weights(plan_buckets(worker.parameter_specs(), 4096))) as local:
            next(local)
        take_steps(worker, [make_batch((14, 8), seed=720 + 10 * num_steps + subject.data_rank)])
    accumulate(worker, [make_batch((14, 8), seed=740 + subject.data_rank)])
    other = worker.local_weights(plan_buckets(worker.parameter_specs(), 4096))
    next(other)

    def step() -> None:
        other.close()  # the weights are still read through the iterator that was opened later
        worker.step()

    _require_equal(subject, worker, shardings, "while the next step waits", change=step)
    _require_equal(subject, worker, shardings, "while a load waits", change=partial(worker.load, path))
    if isinstance(worker, AdjustableWorker) and worker.takes_step_settings:
        take_steps(worker, [make_batch((14, 8), seed=750 + subject.data_rank)])
        load = partial(worker.load, path, optimizer=False)
        _require_equal(subject, worker, shardings, "while a load without the optimizer waits", change=load)


@check("W-73", "ranks", deadline_s=25)
@look_at(
    "the deadline of every wait in exchange, including its first call, what its error states, and calls of "
    "torch.distributed.new_group that not every rank makes"
)
def a_silent_rank_is_named(subject: WorkerSubject) -> None:
    """exchange() returns the messages of all ranks on rank 0, and that of rank 0 on the others, whatever their lengths;
    if a rank is silent, exchange() and every later call raise a TransferError that names the rank, within the timeout;
    torch can still form groups."""
    last = subject.world_size - 1
    for is_first_call in (False, True):
        worker, _ = _create_sharded(subject)
        if not is_first_call:
            _require_messages(subject, worker)
        when = "in the first exchange" if is_first_call else "in a later exchange"
        problem = _problem_of_silence(worker, last, when) if subject.rank == 0 else ""
        if 0 < subject.rank < last:
            error_of(partial(worker.exchange, b"not silent", _SILENT_S))
        subject.require_on_all_ranks(not problem, problem)
        problem = _problem_of_silence(worker, 0, f"{when}, which rank 0 has left") if subject.rank == last else ""
        subject.require_on_all_ranks(not problem, problem)
        if dist.is_initialized():
            _require_a_group(subject, f"after a rank was silent {when}")
    subject.note(silent_rank=last, timeout_s=_SILENT_S)


def _require_messages(subject: WorkerSubject, worker: ShardedWeightSource) -> None:
    """Fail unless messages of different lengths arrive as they were sent. All ranks call this."""
    longer = [f"from {rank}".encode() + b"\x00\xff" * 50 * rank for rank in range(subject.world_size)]
    cases = {
        "longer from each rank to the next": longer,
        "shorter from each rank to the next": longer[::-1],
        "empty from rank 0": [b"", *longer[1:]],
        "empty from the last rank": [*longer[:-1], b""],
        "long": [it * 10_000 for it in longer],
    }
    for name, messages in cases.items():
        found = [bytes(it) for it in worker.exchange(messages[subject.rank], 20.0)]
        wanted = messages if subject.rank == 0 else messages[:1]
        sizes, wanted_sizes = [len(it) for it in found], [len(it) for it in wanted]
        words = f"messages of {sizes} bytes, not of {wanted_sizes} bytes" if sizes != wanted_sizes else "other messages"
        subject.require_on_all_ranks(found == wanted, f"with messages that are {name}, the exchange returned {words}")


def _require_a_group(subject: WorkerSubject, when: str) -> None:
    """Require that torch forms a group of all ranks, and end it once all have formed it."""
    formed: list[dist.ProcessGroup] = []
    error = error_of(lambda: formed.append(dist.new_group(timeout=_FORMING)))
    subject.require_on_all_ranks(error is None, f"{when}, torch.distributed.new_group raises {words_of(error)}")
    dist.destroy_process_group(formed[0])


def _problem_of_silence(worker: ShardedWeightSource, silent: int, when: str) -> str:
    """Return what is wrong with the errors of two exchanges in which a rank is silent, or an empty string."""
    for call in ("the call", "the next call"):
        started = time.monotonic()
        error = error_of(lambda: worker.exchange(b"anybody there?", _SILENT_S))
        seconds = time.monotonic() - started
        words = f"rank {silent} was silent {when}: {call} raised {words_of(error)} after {seconds:.2g} s"
        if not isinstance(error, TransferError) or not re.search(rf"\brank {silent}\b", str(error)):
            return f"{words}, not a TransferError that names the rank"
        if seconds > _SILENT_S + _SLACK_S:
            return f"{words}, although its timeout is {_SILENT_S:g} s"
    return ""


_GATHERED = "its tensors have to be gathered: shardings() is empty"


def _create(subject: WorkerSubject, *, tied: bool = False) -> ShardedWorker:
    worker = subject.create(tied=tied)
    if not isinstance(worker, ShardedWorker):
        skip("rank 0 gathers its weights: it is not a ShardedWeightSource")
    return worker


def _create_sharded(subject: WorkerSubject, *, tied: bool = False) -> tuple[ShardedWorker, Sequence[Sharding]]:
    """Return a new worker and its shardings; skip the check if it has none. All ranks call this."""
    worker = _create(subject, tied=tied)
    shardings = worker.shardings()
    if not shardings:
        skip(_GATHERED)
    num_tensors, num_senders = len(worker.parameter_specs()), {len(sharding.senders) for sharding in shardings}
    subject.require_on_all_ranks(
        len(shardings) == num_tensors and num_senders == {subject.world_size},
        f"there are {len(shardings)} shardings of {sorted(num_senders)} ranks for {num_tensors} tensors",
    )
    return worker, shardings


def _require_equal(
    subject: WorkerSubject,
    worker: ShardedWorker,
    shardings: Sequence[Sharding],
    when: str,
    *,
    change: Callable[[], object] | None = None,
) -> None:
    """Require that the boxes of all ranks match the gathered weights. All ranks call this.

    If ``change`` is given, all but the first bucket are read while this thread calls it.
    """
    specs, full = worker.parameter_specs(), gathered(worker)
    names = [spec.name for spec in specs]
    wanted = [
        [[_described(full[name][_slices(box)]) for box in boxes] for boxes in sharding.senders] if full else []
        for name, sharding in zip(names, shardings, strict=True)
    ]
    (wanted, *_) = subject.ranks.exchange(wanted)
    plan = plan_buckets(specs, 4096)
    local = worker.local_weights(plan)
    versions, problems = [worker.version], []
    if change is None:
        indexes, descriptions = _read(local)
    else:
        indexes, descriptions = _read_during(change, worker, local, versions)
    if len(set(versions)) > 1:
        problems.append(
            f"the version changed from {versions[0]} to {versions[1]} while the weights were still being read"
        )
    if indexes != list(range(len(plan))):
        problems.append(f"{len(plan)} buckets were requested, but these were yielded: {indexes}")
    for bucket, found in zip(plan, descriptions, strict=False):
        boxes = [(names[i], it) for i in range(bucket.start, bucket.stop) for it in wanted[i][subject.rank]]
        if len(found) != len(boxes):
            problems.append(f"bucket {bucket.index} has {len(found)} boxes instead of {len(boxes)}")
        problems += [f"{name}: {one}, not {it}" for (name, it), one in zip(boxes, found, strict=False) if one != it]
    subject.note(**{f"boxes by rank, {when}": subject.ranks.exchange(sum(map(len, descriptions)))})
    subject.require_on_all_ranks(
        not problems,
        f"{when}, what was read differs from the gathered weights in {len(problems)} ways: {shortened(problems, 3)}",
    )


def _read(local: Iterable[WeightBucket]) -> tuple[list[int], list[list[str]]]:
    """Return the index of each bucket and descriptions of its boxes, made before the next bucket is requested."""
    found = [(bucket.index, list(map(_described, bucket.tensors))) for bucket in local]
    return [index for index, _ in found], [boxes for _, boxes in found]


def _read_during(
    change: Callable[[], object], worker: ShardedWorker, local: Generator[WeightBucket, None, None], versions: list[int]
) -> tuple[list[int], list[list[str]]]:
    """Return what `_read` returns while this thread calls ``change``, which changes the weights.

    Appends the worker's version at that time to ``versions``.
    """
    first = next(local)

    def read() -> tuple[list[int], list[list[str]]]:
        time.sleep(_STEP_S)
        versions.append(worker.version)
        with contextlib.closing(local):
            return _read(itertools.chain([first], local))

    reading = start_in_thread(read, "check-read")
    change()
    return reading.result()


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} with XXH3-128 {checksum(pack([tensor.detach().contiguous()]))}"


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
