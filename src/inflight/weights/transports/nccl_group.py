"""Creates an NCCL group whose failures never end the process.

torch's ProcessGroupNCCL starts two threads of its own. The watchdog ends the process when an operation fails or exceeds
the group's timeout, unless it is configured only to clean up. Even then, it asks every monitor in the process to dump
and exit. The monitor ends the process when the watchdog hangs, which can happen while the watchdog aborts a
communicator. Here, the caller of an operation watches the operation (`inflight.weights.transports.groups.PolledGroup`),
so neither thread is needed. They can only be configured by environment variables, which the group reads while it is
constructed.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed

from inflight.errors import TransferError

dist: Any = torch.distributed  # its stubs leave out NCCL's options where torch was built without it

QUIET: Mapping[str, str] = {
    # CleanUpOnly. 1 is TearDown; 3, the default, is SkipCleanUp, which also tears down.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # starts neither the watchdog nor its monitor
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a monitor that is started anyway ends nothing
}
_OPERATION_TIMEOUT = timedelta(days=14)
"""Longer than any deadline or lease that the protocol allows, so that inflight's own deadlines always expire first."""

_constructing = threading.Lock()


def new_nccl_group(keys: Any, rank: int, world_size: int) -> Any:
    """Return a torch NCCL group. Raises `RuntimeError`, or `TransferError` if torch was built without NCCL.

    The communicator is created only by the first operation, because ranks that join with an engine's own torch code
    (SGLang's) create theirs then.
    """
    if not dist.is_nccl_available():
        raise TransferError("this build of torch has no NCCL; use the gloo transport")
    with environment(QUIET):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _OPERATION_TIMEOUT
        return dist.ProcessGroupNCCL(keys, rank, world_size, options)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore the user's values on exit. Only one thread can enter at a time."""
    with _constructing:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
