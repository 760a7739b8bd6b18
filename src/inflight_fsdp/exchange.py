"""What ranks need to publish while they train: an exchange of messages, and weight changes that wait for readers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from inflight.errors import TrainerError, TransferError

dist: Any = torch.distributed  # its stubs leave out the default store
_MAX_BYTES = 1 << 30
_READ_S = 600.0
"""How long, in seconds, a step may wait for a publish to read the weights."""
_numbers = itertools.count()
"""Numbers the exchanges of this process. Every rank creates the same exchanges in the same order."""


class Readers:
    """The threads that are reading the weights; a change to the weights waits for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._condition:
            self._num_readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_readers -= 1
                self._condition.notify_all()

    def wait(self, what: str) -> None:
        """Return once no thread is reading the weights. Raises `TrainerError` after ten minutes."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_readers == 0, _READ_S):
                raise TrainerError(
                    f"{what} waited {_READ_S:g} s for a publish that is still reading the weights: exhaust or close "
                    "its local_weights()"
                )


class RankExchange:
    """The exchange of messages among all ranks of the default group; collective, and unusable after a failure.

    The first exchange forms a separate group. Training uses other groups, and may communicate at the same time.
    """

    def __init__(self) -> None:
        self._name = f"inflight-exchange-{next(_numbers)}"
        self._group: Any = None
        self._lost: str | None = None

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchange messages as `inflight.contracts.ShardedWeightSource.exchange` requires."""
        if self._lost is not None:
            raise TransferError(
                f"an earlier exchange of the trainer's ranks failed: {self._lost}. Restart the trainer's ranks"
            )
        deadline = time.monotonic() + timeout_s
        if self._group is None:
            self._form(deadline)
        if dist.get_rank():
            self._send(message, 0, deadline)
            return [self._receive(0, deadline)]
        others = range(1, dist.get_world_size())
        messages = [message, *(self._receive(rank, deadline) for rank in others)]
        for rank in others:
            self._send(message, rank, deadline)
        return messages

    def close(self) -> None:
        """Release the group, if one was formed. Later exchanges fail. Idempotent."""
        self._group, self._lost = None, self._lost or "the worker was closed"

    def _form(self, deadline: float) -> None:
        """Wait for each rank, then form the group: torch's own error would not name the rank that is missing.

        The group is not created by ``torch.distributed.new_group``, which numbers its calls: after a call that only
        some ranks made, the next group of all ranks would never form.
        """
        store, rank, num_ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(self._name, store)
        store.set(str(rank), b"here")
        for other in range(num_ranks):
            self._until(deadline, other, partial(store.wait, [str(other)]))
        peer = 0 if rank else 1
        self._group = self._until(
            deadline, peer, lambda left: dist.ProcessGroupGloo(store, rank, num_ranks, timeout=left)
        )

    def _send(self, message: bytes, rank: int, deadline: float) -> None:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        for tensor in (torch.tensor([len(message)]), data):
            self._transfer(self._group.send, tensor, rank, deadline)

    def _receive(self, rank: int, deadline: float) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        self._transfer(self._group.recv, size, rank, deadline)
        if not 0 <= (size_bytes := int(size)) <= _MAX_BYTES:
            raise TransferError(
                f"rank {rank} of the trainer announced a message of {size_bytes} bytes; at most {_MAX_BYTES} are "
                "accepted"
            )
        data = torch.empty(size_bytes, dtype=torch.uint8)
        self._transfer(self._group.recv, data, rank, deadline)
        return data.numpy().tobytes()

    def _transfer(self, operation: Callable[..., Any], tensor: torch.Tensor, rank: int, deadline: float) -> None:
        self._until(deadline, rank, lambda left: operation([tensor], rank, 0).wait(left))

    def _until(self, deadline: float, rank: int, call: Callable[[timedelta], Any]) -> Any:
        """Return the result of ``call``, which receives the time left. Raises a `TransferError` naming ``rank``."""
        try:
            return call(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            is_late = time.monotonic() >= deadline
            fate = "did not answer in time" if is_late else "has ended or lost its connection"
            self._lost = f"rank {rank} of the trainer {fate}"
            raise TransferError(f"{self._lost} ({str(error).splitlines()[0]})") from error
