"""A sender in a process of its own, which checks stop or kill: ``python -m``, lines of JSON in, lines of JSON out.

It hosts the store of the weight group, joins as rank 0 and sends; the check that owns it makes the control calls.
In: one `Errand` per group. Out: the `ProcessGroupSpec` with which the endpoint joins that group.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file

from inflight.types import WeightBucket
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import ProcessGroupSpec, WeightUpdate, WireModel

_START_S = 30.0
"""For importing torch in a process of its own."""


class Errand(WireModel):
    """Form a group, send the first ``num_buckets`` buckets of an update, then do nothing more."""

    backend: Literal["gloo", "nccl"]
    num_ranks: int
    update: WeightUpdate
    weights: Path
    """A safetensors file that holds the tensors of the manifest."""
    num_buckets: int
    timeout_s: float


class DoomedSender:
    """Such a process, from outside."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def begin(self, errand: Errand) -> ProcessGroupSpec:
        """Return with what the endpoint joins the group; the process joins meanwhile and sends what it should."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(errand.model_dump_json().encode() + b"\n")
        async with asyncio.timeout(_START_S):
            return ProcessGroupSpec.model_validate_json(await self._process.stdout.readline())

    def stop(self) -> None:
        """Stop it where it is, its sockets open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after a stop."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


@contextlib.asynccontextmanager
async def doomed_sender() -> AsyncIterator[DoomedSender]:
    """Start a process that sends, and kill it on the way out."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield DoomedSender(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """Run the errands that come in."""
    for line in sys.stdin:
        errand = Errand.model_validate_json(line)
        sender = ProcessGroupSender(errand.backend)
        (spec,) = sender.specs(errand.update.run_id, [errand.num_ranks], errand.timeout_s)
        print(spec.model_dump_json(), flush=True)
        sender.join()
        tensors, manifest = load_file(errand.weights), errand.update.manifest.tensors
        for bucket in errand.update.buckets[: errand.num_buckets]:
            specs = manifest[bucket.start : bucket.stop]
            sent = WeightBucket(bucket.index, specs, tuple(tensors[spec.name] for spec in specs))
            sender.send(sent, errand.timeout_s)


if __name__ == "__main__":
    main()
