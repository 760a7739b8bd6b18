"""The stream on which weights travel, apart from those on which an engine samples and a worker trains.

There is one for each device of a process. What arrives on it is handed over by the host: `beside` returns once the
device is done, and waits for no other stream. On the CPU everything happens at once, and all of this does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

cuda: Any = torch.cuda  # its streams are not typed


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes after everything this thread has queued on a device; None on the CPU."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = cuda.current_stream(device).record_event()
    return event


def finish(device: torch.device) -> None:
    """Return once everything that this thread has queued on a device is done."""
    if (event := recorded(device)) is not None:
        event.synchronize()


def finish_all(device: torch.device) -> None:
    """Return once everything that this process has queued on a device is done, on whatever stream."""
    if device.type == "cuda":
        cuda.synchronize(device)


@contextlib.contextmanager
def queued_beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Queue what follows on the stream for weights, behind ``after``."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    with cuda.stream(stream):
        yield


@contextlib.contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Do what follows on the stream for weights, behind ``after``; on return the device has done it."""
    with queued_beside(device, after):
        yield
        finish(device)


@functools.cache
def _stream(device: torch.device) -> Any:
    return cuda.Stream(device)
