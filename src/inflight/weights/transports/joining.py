"""How ranks meet: a store that one of them hosts, and the group that they form over it.

The store binds to the given address only; taking it down ends every join that is still pending, on either side. Knows
nothing of what travels in the group.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from inflight.weights.session import transfer_failed
from inflight.wire import ProcessGroupSpec

dist: Any = torch.distributed  # its stubs leave out the stores and Gloo's options
GRACE_S = 0.5
"""How much longer a call may take than its timeout: torch's store retries for up to twice as long; where it does not,
its own words say more."""


def host_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return a store that listens on ``address``, and its port. Raises `TransferError` if it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            hosted = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise transfer_failed(error, f"hosting the weight group's store on {address}") from error
    return hosted, port


def meet(spec: ProcessGroupSpec, ranks: Sequence[int]) -> Any:
    """Announce ``ranks`` in the group's store; return it once all ranks are announced."""
    deadline = time.monotonic() + spec.timeout_s
    timeout = timeout_of(spec.timeout_s)
    where = f"{spec.master_address}:{spec.master_port}"
    try:
        store = dist.TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise transfer_failed(error, f"reaching the weight group's store at {where}") from error
    prefixed = dist.PrefixStore(spec.group_name, store)
    try:
        for rank in ranks:
            prefixed.set(f"here/{rank}", "")  # NCCL itself waits for nobody before its first operation
        here = [f"here/{other}" for other in range(spec.world_size)]
        prefixed.wait(here, timeout_of(deadline - time.monotonic()))
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {ranks[0]} joining the weight group of {spec.world_size} ranks") from error
    return prefixed


def join_group(spec: ProcessGroupSpec, rank: int, address: str) -> Any:
    """Return the group that ``spec`` describes, joined as ``rank`` from local ``address`` once all ranks came."""
    prefixed = meet(spec, [rank])
    timeout = timeout_of(spec.timeout_s)
    # Where torch's own groups keep their keys, so that ranks which torch joins (SGLang's) meet ours.
    device = "cuda" if spec.backend == "nccl" else "cpu"
    keys = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{spec.group_name}/", prefixed))
    try:
        if spec.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(keys, rank, spec.world_size, options)
        gloo_options = dist.ProcessGroupGloo._Options()
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo_options._timeout = timeout
        return dist.ProcessGroupGloo(keys, rank, spec.world_size, gloo_options)
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {rank} joining the weight group of {spec.world_size} ranks") from error


def timeout_of(timeout_s: float) -> timedelta:
    """Return a timeout of at least a millisecond: Gloo counts in whole ones, and takes 0 for no timeout at all."""
    return timedelta(seconds=max(timeout_s, 0.001))


def address_towards(address: str, port: int) -> str:
    """Return the local address that packets to ``address`` leave from, so that nothing wider is bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
