"""Slices of weights from ranks that hold them to ranks that need them, point to point over a private gloo group.

All slices of one round that go from one rank to another travel as one message of bytes. While a round travels, the next
one is packed. Every wait has a deadline. A rank that fails closes its connections, which ends every rank that waits for
it, and so on: none waits for one that gave up. Bytes travel through host memory, wherever the tensors lie.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed

from inflight.errors import ConfigError, TransferError, UnsupportedError
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.layouts import Box
from inflight.weights.resharding import Plan, Transfer
from inflight.weights.session import transfer_failed
from inflight.weights.threads import run_all, run_unless
from inflight.weights.transports.joining import GRACE_S, address_towards, host_store, join_group, meet, timeout_of
from inflight.wire import ProcessGroupSpec

Shards = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]
"""What one rank holds or needs: of each tensor, boxes and the tensors of their elements, views or not."""

_GIVEN_UP = "the resharding group was given up"
_ALIGNMENT_BYTES = 8
_CLOSING_TAG = 0  # no round's: those count from 1


class HostedGroup:
    """A group that is about to form, hosted here: ``spec`` is what all of its ranks join by, whichever theirs is.

    The store ends with this object: keep it until every rank has joined.
    """

    def __init__(self, run_id: str, world_size: int, timeout_s: float, address: str = "127.0.0.1") -> None:
        self._store, port = host_store(address, timeout_s)
        self.spec = ProcessGroupSpec(
            run_id=run_id,
            backend="gloo",
            group_name=f"inflight-reshard-{uuid.uuid4().hex[:12]}",
            master_address=address,
            master_port=port,
            rank=1,
            world_size=world_size,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank handed to the group and took from it, by peer, and those that it copied within itself."""

    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]
    copied_bytes: int


@dataclass(frozen=True)
class _Message:
    """What one round moves to or from ``peer``, in the buffer at ``start``, widest dtypes first so that all align."""

    peer: int
    start: int
    size_bytes: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class _Round:
    """One rank's part of a round; ``index`` counts the rounds of all ranks, from 1."""

    index: int
    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


class Resharder:
    """One rank's end of a plan. Every rank makes the same calls: `join`, then `reshard` once per weight version.

    A round sends at most ``round_bytes`` from one rank and as many to one rank. Two rounds are in memory at a time, for
    either direction, in buffers that are kept from one version to the next.
    """

    def __init__(self, plan: Plan, spec: ProcessGroupSpec, rank: int, round_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if spec.backend != "gloo":
            raise UnsupportedError(f"resharding goes over gloo, not {spec.backend}")
        ranks = {end for t in plan.transfers for end in (t.source, t.target)}
        if outside := sorted(ranks - set(range(spec.world_size))):
            raise ConfigError(f"the plan moves weights over ranks {outside[:5]}, the group has {spec.world_size} ranks")
        self._spec = spec
        self._rank = rank
        self._agreed = f"{plan.digest} in rounds of {round_bytes} bytes"
        self._dtypes = {s.name: getattr(torch, s.dtype) for s in plan.specs}
        self._local = [t for t in plan.transfers if t.is_local and t.source == rank]
        self._rounds = [r for i, t in enumerate(plan.rounds(round_bytes), 1) if (r := self._part(i, t)) is not None]
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._given_up: Future[str] = Future()
        self._group: Any = None

    def join(self) -> None:
        """Join the group; blocks until every rank has joined.

        Raises `ConfigError` on every rank if plans or sizes of rounds differ, `TransferError` after the spec's timeout.
        """
        where = f"{self._spec.master_address}:{self._spec.master_port}"
        what = f"joining the resharding group through its store at {where}"
        run_unless(self._given_up, self._form, what, self._spec.timeout_s + GRACE_S)

    def reshard(self, held: Shards, needed: Shards, timeout_s: float) -> Traffic:
        """Move one version of the weights; returns once this rank sent all that it has to and ``needed`` is filled.

        ``held`` and ``needed`` have the boxes of this rank's layouts; dtypes are converted to the wire's and from it. A
        rank that only sends or only receives gives an empty mapping. Raises `TransferError` if a rank fails, is gone or
        is late, and `ConfigError` if a tensor is missing here or misshapen: the group is unusable then, on every rank,
        and what ``needed`` holds is undefined. Nothing is written to it after this call has returned or raised.
        """
        group = self._group
        if group is None:
            raise TransferError("no resharding group is formed")
        try:
            return self._exchange(group, held, needed, time.monotonic() + timeout_s)
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            given_up = self._given_up.done()
            self.abort()
            if given_up:
                raise TransferError(_GIVEN_UP) from error
            if isinstance(error, RuntimeError):
                raise transfer_failed(error, f"rank {self._rank} resharding") from error
            raise

    def abort(self) -> None:
        """End any pending call from another thread and give the group up. Idempotent."""
        with self._lock:
            group, self._group = self._group, None
            self._buffers = {}  # a pending operation keeps its own hold of the memory
            if not self._given_up.done():
                self._given_up.set_result(_GIVEN_UP)
        if group is not None:
            _close(group)

    def _form(self) -> None:
        spec, rank = self._spec, self._rank
        try:
            address = address_towards(spec.master_address, spec.master_port)
        except OSError as error:
            raise transfer_failed(error, f"finding the way to {spec.master_address}") from error
        store = meet(spec, [rank])
        try:
            store.set(f"plan/{rank}", self._agreed)
            agreed = [store.get(f"plan/{other}").decode() for other in range(spec.world_size)]
        except RuntimeError as error:
            raise transfer_failed(error, f"rank {rank} comparing plans") from error
        if differing := [other for other, theirs in enumerate(agreed) if theirs != agreed[0]]:
            raise ConfigError(
                f"ranks do not follow the same plan: rank 0 has {agreed[0]}, rank {differing[0]} has "
                f"{agreed[differing[0]]}, ranks that differ from rank 0: {differing[:5]}"
            )
        group = join_group(spec, rank, address)
        with self._lock:
            if not self._given_up.done():
                self._group = group
                return
        _close(group)
        raise TransferError(_GIVEN_UP)

    def _part(self, index: int, transfers: Sequence[Transfer]) -> _Round | None:
        """Return this rank's part of a round, None if it has none."""
        sends: defaultdict[int, list[Transfer]] = defaultdict(list)
        receives: defaultdict[int, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.source == self._rank:
                sends[transfer.target].append(transfer)
            elif transfer.target == self._rank:
                receives[transfer.source].append(transfer)
        if not sends and not receives:
            return None
        return _Round(index, self._messages(sends), self._messages(receives))

    def _messages(self, transfers: Mapping[int, list[Transfer]]) -> tuple[_Message, ...]:
        messages, start = [], 0
        for peer, theirs in sorted(transfers.items()):
            ordered = sorted(theirs, key=lambda t: -self._dtypes[t.name].itemsize)
            size_bytes = sum(t.size_bytes for t in ordered)
            messages.append(_Message(peer, start, size_bytes, tuple(ordered)))
            start += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return tuple(messages)

    def _exchange(self, group: Any, held: Shards, needed: Shards, deadline: float) -> Traffic:
        for transfer in self._local:
            view = _view(held, transfer, "held").to(self._dtypes[transfer.name])
            _view(needed, transfer, "needed").copy_(view)
        sent: defaultdict[int, int] = defaultdict(int)
        received: defaultdict[int, int] = defaultdict(int)
        travelling: tuple[_Round, list[torch.Tensor], list[Any]] | None = None
        for turn, part in enumerate(self._rounds):
            works, arriving = [], self._flats("receive", turn, part.receives)
            for message, flat in zip(part.receives, arriving, strict=True):
                works.append(group.recv([flat], message.peer, part.index))
                received[message.peer] += flat.numel()
            for message, flat in zip(part.sends, self._flats("send", turn, part.sends), strict=True):
                for transfer, slot in self._slots(message, flat):
                    slot.copy_(_view(held, transfer, "held"))
                works.append(group.send([flat], message.peer, part.index))
                sent[message.peer] += flat.numel()
            if travelling is not None:
                self._finish(*travelling, needed, deadline)
            travelling = part, arriving, works
        if travelling is not None:
            self._finish(*travelling, needed, deadline)
        return Traffic(dict(sent), dict(received), sum(t.size_bytes for t in self._local))

    def _finish(
        self, part: _Round, arrived: list[torch.Tensor], works: list[Any], needed: Shards, deadline: float
    ) -> None:
        """Wait for a round and put what arrived where it is needed."""
        peers = sorted({message.peer for message in (*part.sends, *part.receives)})
        what = f"round {part.index} of rank {self._rank} with ranks {peers}"
        try:
            remaining_s = deadline - time.monotonic()
            # Side by side: one that failed must not wait for another that is late.
            run_all([partial(work.wait, timeout_of(remaining_s)) for work in works], what, remaining_s + GRACE_S)
        except RuntimeError as error:
            raise transfer_failed(error, what) from error
        for message, flat in zip(part.receives, arrived, strict=True):
            for transfer, slot in self._slots(message, flat):
                _view(needed, transfer, "needed").copy_(slot)

    def _flats(self, side: str, turn: int, messages: Sequence[_Message]) -> list[torch.Tensor]:
        """Return the memory of each message: two buffers in turn, kept from one version to the next."""
        if not messages:
            return []
        size_bytes = messages[-1].start + messages[-1].size_bytes
        buffer = self._buffers.get((side, turn % 2))
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self._buffers[side, turn % 2] = torch.empty(size_bytes, dtype=torch.uint8)
        return [buffer[message.start : message.start + message.size_bytes] for message in messages]

    def _slots(self, message: _Message, flat: torch.Tensor) -> Iterable[tuple[Transfer, torch.Tensor]]:
        offset = 0
        for transfer in message.transfers:
            part = flat[offset : offset + transfer.size_bytes].view(self._dtypes[transfer.name])
            yield transfer, part.view(transfer.box.shape)
            offset += transfer.size_bytes


def _view(shards: Shards, transfer: Transfer, side: str) -> torch.Tensor:
    """Return the elements of a transfer as a view of the tensor that has them."""
    for box, tensor in shards.get(transfer.name, ()):
        if box.intersection(transfer.box) == transfer.box:
            if tuple(tensor.shape) != box.shape:
                raise ConfigError(f"{transfer.name} at {box} is {side} as a tensor of shape {tuple(tensor.shape)}")
            view = tensor.detach()
            for d, (start, size) in enumerate(zip(transfer.box.starts, transfer.box.shape, strict=True)):
                view = view.narrow(d, start - box.starts[d], size)
            return view
    raise ConfigError(f"no tensor is {side} here for {transfer.name} at {transfer.box}, which the plan moves")


def _close(group: Any) -> None:
    """Close the connections of this rank: what is pending on them fails at once, here and at the other ranks.

    Gloo closes all of them when one operation is late, so one is made that nobody answers.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING_TAG).wait(timeout_of(0))
