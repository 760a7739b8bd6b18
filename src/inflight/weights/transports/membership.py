"""How the ranks of a weight group find each other, and prove over the formed group that they belong to it.

Ranks meet by setting keys in the store that the sender hosts, and form the group through this store. Closing the store
ends every pending join on both sides. Before anything is sent, each rank proves over the group itself that it knows the
group's secret, because gloo accepts any connection to a rank's port as another rank.

An engine that joins groups with its own torch code can neither use this store nor prove that it knows the secret. If
any rank belongs to such an engine, the group is formed through torch's TCPStore, which anyone on the network may use,
and no rank proves anything.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from inflight.base.addresses import listen_on
from inflight.base.threads import run_unless_abandoned
from inflight.errors import TransferError, transfer_error
from inflight.weights.transports.groups import GLOO, GRACE_S, CollectiveGroup, GroupKind, timeout_of
from inflight.weights.transports.key_store import KeyStore
from inflight.weights.transports.store import abandon
from inflight.wire import ProcessGroupSpec

dist: Any = torch.distributed  # its stubs leave out the stores
JOINING = "joining the weight group"
_NONCE = "nonce"
_BY_TORCH, _TORCH_PORT = "torch", "torch/port"
_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of `meet`: the store through which the ranks form their group, and torch's store if it is needed."""

    keys: KeyStore
    torch_store: Any = None
    torch_port: int = 0


def join_group(spec: ProcessGroupSpec, rank: int, address: str, kind: GroupKind = GLOO) -> CollectiveGroup:
    """Return the group that ``spec`` describes, joined as ``rank`` from ``address`` once all ranks have arrived.

    Raises `TransferError`, which names any rank that cannot prove that it belongs to the group.
    """
    deadline = time.monotonic() + spec.timeout_s
    meeting = meet(spec, [rank])
    what = f"rank {rank} {JOINING} of {spec.world_size} ranks"
    try:
        keys: Any = meeting.keys
        if meeting.torch_store is not None:
            # The prefixes that torch's own groups use, so that ranks that join through torch itself (SGLang's) find
            # ours.
            keys = dist.PrefixStore(f"{spec.group_name}/", meeting.torch_store)
            keys = dist.PrefixStore(f"{kind.device_type}/", keys)
        group = kind.make(keys, rank, spec.world_size, address, max(deadline - time.monotonic(), 0.001))
    except (RuntimeError, TransferError) as error:
        meeting.keys.close()
        raise transfer_error(error, what) from error
    group.meeting = meeting
    try:
        if meeting.torch_store is None:
            _prove_membership(group, meeting.keys, spec, rank, kind, deadline)
    except RuntimeError as error:
        group.abort()
        raise transfer_error(error, f"{what}: proving that every rank knows its secret") from error
    except TransferError:
        group.abort()
        raise
    finally:
        meeting.keys.close()
    return group


def meet(spec: ProcessGroupSpec, ranks: Sequence[int], *, by_torch: bool = False) -> Meeting:
    """Announce ``ranks`` in the group's store, and return once all ranks are announced.

    ``by_torch`` means that an engine joins these ranks with its own torch code. Raises `TransferError`.
    """
    deadline = time.monotonic() + spec.timeout_s
    keys = KeyStore(spec.master_address, spec.master_port, spec.secret.encode(), ranks[0], deadline - time.monotonic())
    try:
        if by_torch:
            keys.set(_BY_TORCH, b"")
        if ranks[0] == 0:
            keys.set(_NONCE, secrets.token_bytes(_NONCE_BYTES))
        for rank in ranks:
            keys.set(f"here/{rank}", b"")  # NCCL waits for no rank before its first operation
        here = [f"here/{other}" for other in range(spec.world_size)]
        keys.wait(here, timeout_of(deadline - time.monotonic()))
        if not keys.check([_BY_TORCH]):
            return Meeting(keys)
        store, port = _torch_store(keys, spec, ranks[0], deadline)
        return Meeting(keys, dist.PrefixStore(spec.group_name, store), port)
    except (RuntimeError, TransferError) as error:
        keys.close()
        raise transfer_error(error, f"rank {ranks[0]} {JOINING} of {spec.world_size} ranks") from error


def _torch_store(keys: KeyStore, spec: ProcessGroupSpec, rank: int, deadline: float) -> tuple[Any, int]:
    """Return torch's store, and the port on which rank 0 hosts it."""
    if rank == 0:
        store, port = host_store(spec.master_address, spec.timeout_s)
        keys.set(_TORCH_PORT, str(port))
        return store, port
    port = int(keys.get(_TORCH_PORT))
    timeout = timeout_of(deadline - time.monotonic())
    return dist.TCPStore(spec.master_address, port, is_master=False, timeout=timeout), port


def host_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return torch's store, which listens on ``address``, and its port. Raises `TransferError`."""
    try:
        with listen_on(address) as listener:
            port = int(listener.getsockname()[1])
            hosted = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timeout_of(timeout_s),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise transfer_error(error, f"hosting the ranks' store on {address}") from error
    return hosted, port


def announce_send(group: CollectiveGroup, index: int) -> None:
    """Notify engines that joined with their own torch code that bucket ``index`` is being sent.

    Raises `RuntimeError`.
    """
    if group.meeting is not None and group.meeting.torch_store is not None:
        group.meeting.torch_store.set(_send_key(index), "")


def _send_key(index: int) -> str:
    return f"sending/{index}"


# -------------------------------------------------------------------------------------------------------- proofs


def _prove_membership(
    group: CollectiveGroup, keys: KeyStore, spec: ProcessGroupSpec, rank: int, kind: GroupKind, deadline: float
) -> None:
    """Return once every rank has proved to rank 0, and rank 0 to every other rank, that it knows the group's secret."""
    device = torch.device("cuda", torch.cuda.current_device()) if kind.device_type == "cuda" else torch.device("cpu")
    nonce = keys.get(_NONCE)
    mine = _tensor(_proof(spec, nonce, rank), device)
    proofs = group.gather(mine, max(deadline - time.monotonic(), 0.001))
    for other, proof in enumerate(proofs):
        _check(proof, spec, nonce, other)
    # Only receivers may learn the sender's proof, so rank 0 sends it after it has verified theirs.
    group.make_broadcast(mine, max(deadline - time.monotonic(), 0.001))()
    _check(mine, spec, nonce, 0)


def _proof(spec: ProcessGroupSpec, nonce: bytes, rank: int) -> bytes:
    return hmac.digest(spec.secret.encode(), b"\0".join((nonce, spec.group_name.encode(), b"%d" % rank)), "sha256")


def _check(proof: torch.Tensor, spec: ProcessGroupSpec, nonce: bytes, rank: int) -> None:
    if not hmac.compare_digest(proof.cpu().numpy().tobytes(), _proof(spec, nonce, rank)):
        raise TransferError(
            f"rank {rank} of the weight group {spec.group_name!r} does not know the group's secret: another process "
            "has taken its place; nothing was sent"
        )


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


# ------------------------------------------------------------------------------------- engines that join through torch


class AnnouncedRanks:
    """The ranks of an engine that joins and receives with its own torch code.

    This class is needed because the engine's waits have no deadline and cannot be interrupted.

    The object announces ``spec.rank`` and the engine's other ranks on the engine's behalf. Once `meet` returns, every
    other rank has arrived and is joining; once `await_send` returns, the sender is sending. Calling `abandon` from
    another thread makes both methods raise `TransferError` early.
    """

    def __init__(self, spec: ProcessGroupSpec, num_ranks: int) -> None:
        self._spec = spec
        self._ranks = range(spec.rank, spec.rank + num_ranks)
        self._abandoned: Future[str] = Future()
        self._store: Any = None

    def meet(self) -> int:
        """Block until all ranks have arrived. Return the port of torch's store, through which the engine joins.

        Raises `TransferError` after ``spec.timeout_s`` seconds.
        """
        spec = self._spec
        what = f"{JOINING} through its store at {spec.master_address}:{spec.master_port}"
        meeting = run_unless_abandoned(
            self._abandoned, lambda: meet(spec, self._ranks, by_torch=True), what, spec.timeout_s + GRACE_S
        )
        meeting.keys.close()
        self._store = meeting.torch_store
        return meeting.torch_port

    def await_send(self, index: int, timeout_s: float) -> None:
        """Block until the sender sends bucket ``index`` of this group, counted from 0."""
        store, what = self._store, "waiting for the sender"
        if store is None:
            raise TransferError("no weight group is formed")
        try:
            run_unless_abandoned(
                self._abandoned,
                lambda: store.wait([_send_key(index)], timeout_of(timeout_s)),
                what,
                timeout_s + GRACE_S,
            )
        except RuntimeError as error:
            raise transfer_error(error, what) from error

    def abandon(self) -> None:
        """End the pending calls. Returns immediately. Idempotent."""
        abandon(self._abandoned)
