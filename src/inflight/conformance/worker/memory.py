"""The check that gathering a large model needs memory for only a few buckets, measured by the Linux kernel."""

from __future__ import annotations

import torch

from inflight.base.peak_memory import PeakMemory
from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import make_batch
from inflight.conformance.worker.subject import WorkerSubject
from inflight.weights.encode.buckets import plan_buckets

LEVEL = "gather"
_MIB = 1024 * 1024
_SLACK_BYTES = 16 * _MIB
"""Memory allowed for the allocator and for communication, in addition to the tensors."""


@check("W-34", deadline_s=60)
@look_at("a full state dict before the first bucket; a list of buckets; tensors that the generator still holds")
def gathering_takes_a_few_buckets(subject: WorkerSubject) -> None:
    """Gathering needs memory for a few buckets, not for the whole model."""
    worker = subject.create(model=subject.large_model("large", hidden_size=512, num_layers=10))
    with torch.no_grad():
        worker.forward(make_batch((3,), seed=170))  # load everything that is loaded at first use
    plan = plan_buckets(worker.parameter_specs(), 1)
    model_bytes, largest = sum(b.size_bytes for b in plan), max(b.size_bytes for b in plan)
    try:
        memory = PeakMemory()
    except OSError as error:
        skip(f"the Linux kernel does not report or reset the peak of memory here: {error}")
    devices = {tensor.device.type for bucket in worker.gather_weights(plan) for tensor in bucket.tensors}
    grown = memory.grown_bytes()
    allowed = 8 * largest + _SLACK_BYTES
    figures = {"grown": grown, "allowed": allowed, "model": model_bytes, "largest_bucket": largest}
    subject.note(**{f"{name}_mib": round(size / _MIB, 1) for name, size in figures.items()})
    if devices - {"cpu"}:
        skip(f"the weights are gathered on {', '.join(sorted(devices))}, whose memory the kernel does not count")
    require(
        grown <= allowed,
        f"gathering {model_bytes / _MIB:.0f} MiB in buckets of {largest / _MIB:.1f} MiB at most takes "
        f"{grown / _MIB:.0f} MiB at its peak",
    )
