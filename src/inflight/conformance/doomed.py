"""A sender of weights in its own process, which checks can stop or kill.

The process hosts the store of the weight group, joins as rank 0 and sends; the check makes the control calls. The
process is started with ``python -m``; its input and output are lines of JSON. The input is one `SendCommand` per group.
For each command, the output is the `ProcessGroupSpec` with which the endpoint joins that group.
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
"""Time limit for importing torch in the new process."""


class SendCommand(WireModel):
    """A request to form a group, send the first ``num_buckets`` buckets of an update, and then do nothing more."""

    transport: Literal["gloo", "nccl"]
    num_ranks: int
    update: WeightUpdate
    weights: Path
    """A safetensors file that contains the tensors of the manifest."""
    num_buckets: int
    timeout_s: float


class DoomedSender:
    """The check's side of the sending process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def begin(self, command: SendCommand) -> ProcessGroupSpec:
        """Return the spec with which the endpoint joins the group; the process itself joins before it sends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.model_dump_json().encode() + b"\n")
        async with asyncio.timeout(_START_S):
            return ProcessGroupSpec.model_validate_json(await self._process.stdout.readline())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


@contextlib.asynccontextmanager
async def start_doomed_sender() -> AsyncIterator[DoomedSender]:
    """Start a sending process, yield it, and kill it on exit."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    try:
        yield DoomedSender(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """Execute each command read from standard input."""
    for line in sys.stdin:
        command = SendCommand.model_validate_json(line)
        sender = ProcessGroupSender(command.transport)
        (spec,) = sender.specs(command.update.run_id, [command.num_ranks], command.timeout_s)
        print(spec.model_dump_json(), flush=True)
        sender.join()
        tensors, manifest = load_file(command.weights), command.update.manifest.tensors
        for bucket in command.update.buckets[: command.num_buckets]:
            specs = manifest[bucket.start : bucket.stop]
            sent = WeightBucket(bucket.index, specs, tuple(tensors[spec.name] for spec in specs))
            sender.send(sent, command.timeout_s)


if __name__ == "__main__":
    main()
