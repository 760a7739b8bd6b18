"""Gloo, used as NCCL is: its operations are polled, and buckets are compared where they lie. ``POLLED`` is a transport.

Only the lines that call CUDA are missing here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from inflight.contracts import Transport, WeightReceiver, WeightSender
from inflight.weights.transports.groups import GlooGroup, GroupKind, PolledGroup, new_gloo_group
from inflight.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from inflight.wire import ProcessGroupSpec, TransportSpec

KIND = GroupKind("cpu", sends_from_device=True, make=lambda *told: PolledGroup(new_gloo_group(*told)))


class _AmongGloo(PolledGroup):
    """Gathers as gloo's ranks do, by sends, because that is what the other ranks of the group do."""

    def gather(self, flat: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        return GlooGroup(self.raw).gather(flat, timeout_s)


AMONG_GLOO = GroupKind("cpu", sends_from_device=True, make=lambda *told: _AmongGloo(new_gloo_group(*told)))
"""For a sender whose receivers are those of gloo."""


class PolledTransport(Transport):
    """A process group whose both ends are those of NCCL."""

    name, spec_type, needs_gpu = "gloo", ProcessGroupSpec, False

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        return ProcessGroupSender("gloo", address, KIND)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        assert isinstance(spec, ProcessGroupSpec)
        return ProcessGroupReceiver(spec.model_copy(update={"rank": spec.rank + rank}), device, KIND)


POLLED = PolledTransport()
