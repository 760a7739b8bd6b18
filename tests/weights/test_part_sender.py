"""A rank other than 0 sends nothing of an update that it divides in another way, or whose base it does not hold."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from inflight.contracts import ShardedWeightSource
from inflight.types import WeightBucket
from inflight.weights.send.ranks import (
    Answer,
    AnswerOrder,
    BeginOrder,
    EndOrder,
    JoinOrder,
    OpenOrder,
    Order,
    PartOrder,
    PartSender,
    _digest,
)
from inflight.weights.transports import make_sender
from inflight.wire import BucketSpec, Manifest, Sharding, TensorSpec, UpdateRef

SPEC = TensorSpec(name="weight", dtype="float32", shape=(4, 2))
HALVES = Sharding(senders=((((0, 2), (0, 2)),), (((2, 4), (0, 2)),)))
MANIFEST = Manifest(tensors=(SPEC,), shardings=(HALVES,), sharding_of=(0,))


class OrderedSource(ShardedWeightSource):
    """Rank 1 of two, which gets one order after another and records its answers."""

    rank, world_size, version = 1, 2, 0

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = iter(orders)
        self.answers: list[Answer] = []

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return [SPEC]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        raise NotImplementedError

    def shardings(self) -> Sequence[Sharding]:
        return [HALVES]

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        yield WeightBucket(0, (SPEC,), (torch.arange(4.0).view(2, 2),))

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        self.answers.append(Answer.model_validate_json(message))
        return [next(self._orders).model_dump_json().encode()]


def begin(version: int, manifest: Manifest = MANIFEST, base: UpdateRef | None = None) -> BeginOrder:
    fields: dict[str, Any] = {"run_id": "run", "incarnation": 0, "bucket_bytes": 64, "deadline_s": 5.0}
    encodings = ("delta",) if base else ()
    return BeginOrder(
        version=version, manifest=_digest(manifest), base=base, encodings=encodings, is_delta=True, **fields
    )


def parts(version: int, *, is_applied: bool, base: UpdateRef | None = None) -> list[Order]:
    part = PartOrder(timeout_s=5.0)
    return [begin(version, base=base), part, AnswerOrder(), EndOrder(is_applied=is_applied, leaves=False)]


def errors_after(tmp_path: Path, *publishes: Sequence[Order]) -> list[str | None]:
    """Return the errors in the answers to the orders of some publishes, the last order of each publish apart."""
    group = [OpenOrder(run_id="run", num_ranks=(1,), timeout_s=5.0), JoinOrder()]
    found = []
    source = OrderedSource([*group, *(order for publish in publishes for order in publish)])
    with PartSender(source, make_sender("file", directory=tmp_path)) as sender:
        for _ in publishes:
            source.answers.clear()
            sender.send(5.0)
            found.append(next((answer.error for answer in source.answers if answer.error), None))
    return found


def test_a_rank_that_divides_tensors_in_another_way_refuses_to_begin(tmp_path: Path) -> None:
    swapped = Manifest(tensors=(SPEC,), shardings=(Sharding(senders=HALVES.senders[::-1]),), sharding_of=(0,))
    other = [begin(1, swapped), AnswerOrder(), EndOrder(is_applied=False, leaves=True)]
    (error,) = errors_after(tmp_path, other)
    assert error == "its tensors, or the boxes that each rank sends of them, differ from those of rank 0"


def test_only_an_applied_update_becomes_the_base_of_a_delta(tmp_path: Path) -> None:
    base = UpdateRef(run_id="run", version=1)
    for is_applied, wanted in ((True, None), (False, "it does not hold version 1, the base of the delta")):
        second = parts(2, is_applied=True, base=base)
        assert errors_after(tmp_path / str(is_applied), parts(1, is_applied=is_applied), second) == [None, wanted]
