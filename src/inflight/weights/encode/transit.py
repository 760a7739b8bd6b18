"""The CUDA stream and host memory for weights in transit, separate from those that an engine uses for sampling.

There is one weight stream for each device of a process. Before the host passes on data that arrives on the weight
stream, `finished_on_weight_stream` waits until the device has finished that stream, but not other streams. On the CPU,
every operation is synchronous, and these functions do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

cuda: Any = torch.cuda  # its streams are not typed


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event recorded after everything that this thread has queued on a device; None on the CPU."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = cuda.current_stream(device).record_event()
    return event


def synchronise_stream(device: torch.device) -> None:
    """Return once the device has finished everything that this thread has queued on it."""
    if (event := record_event(device)) is not None:
        event.synchronize()


def synchronise_device(device: torch.device) -> None:
    """Return once the device has finished everything that this process has queued on any stream."""
    if device.type == "cuda":
        cuda.synchronize(device)


@contextlib.contextmanager
def on_weight_stream(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Queue the operations of the body on the weight stream, after the event ``after``."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    with cuda.stream(stream):
        yield


@contextlib.contextmanager
def finished_on_weight_stream(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Run the operations of the body on the weight stream, after the event ``after``. On exit, wait for the device."""
    with on_weight_stream(device, after):
        yield
        synchronise_stream(device)


@functools.cache
def _stream(device: torch.device) -> Any:
    return cuda.Stream(device)


class ReusedMemory:
    """Memory for received tensors, reused once nothing refers to the tensors in it.

    Reuse avoids allocating fresh pages, which takes longer than the copy itself. If ``device`` is a GPU, the memory is
    pinned, so that its contents are copied to the GPU at full speed. Any thread may call the methods: a thread that was
    abandoned in an earlier update may still be receiving when the next update begins.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._pinned = device is not None and device.type == "cuda"
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory that nothing else refers to, uint8 [size_bytes] on the CPU."""
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            block = next((it for it in self._blocks if it.size_bytes == size_bytes and it.is_free), None)
            if block is None:
                block = _Block(size_bytes, self._pinned)
                self._blocks.append(block)
            return block.lend()

    def begin(self) -> None:
        """Free the memory that the last two updates did not need. Call this before each update.

        An engine that serves from received tensors releases the memory of one update only when it commits the next.
        """
        with self._lock:
            self._blocks = [block for block in self._blocks if block.is_needed()]


class _Block:
    """Memory that is lent to one tensor at a time, together with the tensor's views.

    The tensor's storage holds a numpy array that is a view of the memory, and the array is freed with the storage.
    """

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()  # aligned by torch
        self._loan: Callable[[], object] = lambda: None
        self._was_taken = self._was_needed = False

    @property
    def is_free(self) -> bool:
        return self._loan() is None

    def lend(self) -> torch.Tensor:
        view = self._memory[:]
        self._loan, self._was_taken = weakref.ref(view), True
        return torch.from_numpy(view)

    def is_needed(self) -> bool:
        """Return whether the memory is referenced, was taken since the last call, or was needed at the last call."""
        before, self._was_needed = self._was_needed, self._was_taken or not self.is_free
        self._was_taken = False
        return before or self._was_needed
