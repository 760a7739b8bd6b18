"""Receives from several senders at once, with one receiver per sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial

import torch

from inflight.base.threads import start_in_thread
from inflight.contracts import WeightReceiver
from inflight.weights.encode.transit import ReusedMemory
from inflight.wire import TensorSpec, UpdateRef


class SeveralReceivers(WeightReceiver):
    """The receivers of one endpoint rank, by sender.

    Buckets that are not divided among senders come from the first sender. ``device`` is where the rank's weights are.
    Buckets are assembled there if they arrive ``on_device``, and otherwise in host memory.
    """

    def __init__(self, receivers: Sequence[WeightReceiver], device: torch.device | None, *, on_device: bool) -> None:
        self.receivers = tuple(receivers)
        self._memory = ReusedMemory(device)
        self._device = device if on_device else None

    def join(self) -> None:
        """Join the groups one after another, in the order of the senders."""
        for receiver in self.receivers:
            receiver.join()

    def begin(self, ref: UpdateRef) -> None:
        self._memory.begin()
        for receiver in self.receivers:
            receiver.begin(ref)

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        return self.receivers[0].receive(specs, timeout_s)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory for a bucket, uint8 [size_bytes]."""
        if self._device is None:
            return self._memory.take(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def of_each(self, call: Callable[[int, WeightReceiver], None]) -> None:
        """Call ``call`` concurrently with each sender's number and receiver, and return when all calls have returned.

        Raises the first error immediately. The other calls end when the group is left.
        """
        calls = [start_in_thread(partial(call, *it), "inflight-receive-part") for it in enumerate(self.receivers)]
        for ended in wait(calls, return_when=FIRST_EXCEPTION).done:
            ended.result()

    def abort(self) -> None:
        for receiver in self.receivers:
            receiver.abort()
