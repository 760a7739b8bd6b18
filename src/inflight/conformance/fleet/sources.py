"""Sources of the weights that a campaign's trainer publishes: gathered on one rank, or sent by two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from inflight.contracts import PartialWeightSource, ShardedWeightSource
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.send.module import tensor_spec
from inflight.wire import Box, BucketSpec, Sharding, TensorSpec


class ShadeSource(PartialWeightSource):
    """A trainer's only rank, with the tensors of one shade; ``frozen`` tensors are left out."""

    rank = 0
    world_size = 1
    version = 0

    def __init__(self, frozen: tuple[str, ...]) -> None:
        self._frozen = frozen
        self._tensors: list[torch.Tensor] = []
        self._specs: list[TensorSpec] = []

    def hold(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the held tensors with those of a new shade, as an optimizer step would."""
        named = {name: tensor for name, tensor in tensors.items() if name not in self._frozen}
        self.version = version
        self._tensors = list(named.values())
        self._specs = [tensor_spec(name, tensor, None) for name, tensor in named.items()]

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def frozen_names(self) -> Sequence[str]:
        return self._frozen

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            part = slice(bucket.start, bucket.stop)
            yield WeightBucket(bucket.index, tuple(self._specs[part]), tuple(self._tensors[part]))


class ShardedShadeSource(ShadeSource, ShardedWeightSource):
    """One of two ranks. Each rank sends some of the rows of most tensors; every other tensor is sent whole by one of
    the ranks.

    ``reach`` is called before each part and each message, with the kind of step and the bucket's index. While
    `is_sharded` is False, publishes gather the weights on rank 0, which also has the whole tensors.
    """

    world_size = 2
    is_sharded = True

    def __init__(self, rank: int, frozen: tuple[str, ...], link: RankLink, reach: Callable[[str, int], None]) -> None:
        super().__init__(frozen)
        self.rank = rank
        self.link = link
        self._reach = reach
        self._unanswered: int | None = None
        self._is_sending_last = False

    def shardings(self) -> Sequence[Sharding]:
        return [sharding(i, spec.shape) for i, spec in enumerate(self._specs)] if self.is_sharded else []

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        shardings = self.shardings()
        for bucket in buckets:
            self._reach("encode", bucket.index)
            self._unanswered, self._is_sending_last = bucket.index, bucket is buckets[-1]
            parts = [
                self._tensors[i][tuple(slice(*edges) for edges in box)]
                for i in range(bucket.start, bucket.stop)
                for box in shardings[i].senders[self.rank]
            ]
            yield WeightBucket(bucket.index, (), tuple(parts))

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        index, self._unanswered = self._unanswered, None
        if index is not None:
            self._reach("answer", index)
        elif self._is_sending_last:
            self._is_sending_last = False
            self._reach("last", 0)
        return self.link.exchange(self.rank, message, timeout_s)


def sharding(index: int, shape: tuple[int, ...]) -> Sharding:
    """Return the boxes of tensor number ``index`` that each of the two ranks sends."""
    whole: Box = tuple((0, size) for size in shape)
    num_rows = shape[0] if shape else 1
    kind = index % 5 if num_rows > 2 else index % 2 + 3
    if kind > 2:
        return Sharding(senders=((whole,), ()) if kind == 3 else ((), (whole,)))
    cut = num_rows // 2 if kind == 0 else num_rows // 3
    halves = (((0, cut), *whole[1:]),), (((cut, num_rows), *whole[1:]),)
    return Sharding(senders=halves if kind < 2 else halves[::-1])


class RankLink:
    """One rank's end of the connection between two ranks, for short messages. A failure makes it unusable."""

    def __init__(self, connection: Connection, other: int) -> None:
        self._connection = connection
        self._other = other
        self.lost: str | None = None
        """Why the ranks have lost their connection to each other, if they have."""

    def exchange(self, rank: int, message: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchange messages as `ShardedWeightSource.exchange` requires."""
        if self.lost is not None:
            raise TransferError(f"the trainer's ranks have lost their connection: {self.lost}")
        deadline = time.monotonic() + timeout_s
        try:
            if rank:
                self._connection.send_bytes(message)
                return [self._receive(deadline)]
            messages = [message, self._receive(deadline)]
            self._connection.send_bytes(message)
            return messages
        except (OSError, EOFError) as error:
            is_late = isinstance(error, TimeoutError)
            self.lose(f"rank {self._other} {'did not answer in time' if is_late else 'is gone'}")
            raise TransferError(f"{self.lost} ({error or type(error).__name__})") from error

    def lose(self, why: str) -> None:
        """Cut the connection."""
        self.lost = self.lost or why
        self._connection.close()

    def _receive(self, deadline: float) -> bytes:
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the deadline passed")
        return self._connection.recv_bytes()
