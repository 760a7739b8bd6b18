"""One end of a transport in a process of its own, to be killed or stopped: ``python -m`` and a `Setup` on stdin.

It joins, writes a line ``joined``, sends a bucket if it was told to, and stays. A sender first writes the spec for its
receiver. It ends with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import torch
from pydantic import BaseModel, ConfigDict

from inflight.conformance.judge import Hung
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.pair import open_pair
from inflight.types import WeightBucket
from inflight.wire import ProcessGroupSpec, TensorSpec

START_S = 15.0


class Setup(BaseModel):
    """What the process is: a receiver if it has a spec, else a sender to one receiver."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: TransportTarget
    spec: ProcessGroupSpec | None = None
    timeout_s: float = START_S
    bucket: TensorSpec | None = None
    """The sender sends this one tensor, filled with ones, once it has joined."""


class Peer:
    """The parent's side of such a process."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight.conformance.transport.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._buffer = b""
        assert self._process.stdin is not None
        self._process.stdin.write(setup.model_dump_json().encode() + b"\n")

    def spec(self) -> ProcessGroupSpec:
        """Return the spec that a sender wrote. Raises `Hung`."""
        return ProcessGroupSpec.model_validate_json(self._line("open a group"))

    def wait_until_joined(self) -> None:
        """Return once it has joined. Raises `Hung`."""
        self._line("join")

    def kill(self) -> None:
        """Kill it at once, stopped or not. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        """Let it stand still: its sockets stay, and it does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def _line(self, what: str) -> bytes:
        """Return the next line, which the process writes once it did ``what``."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = self._process.stdout.read(4096) if ready else b""
            if not part:
                how = f"ended with status {self._process.wait()}" if ready else f"did not within {START_S:g} s"
                raise Hung(f"the other process was to {what} and {how}", "")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main() -> None:
    """Be one end until the parent closes stdin."""
    setup = Setup.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pair = open_pair(setup.target)
    if setup.spec is not None:
        receiver = pair.receiver(setup.spec)
        receiver.join()
        print("joined", flush=True)
    else:
        (spec,) = pair.sender.specs("conformance", [1], setup.timeout_s)
        print(spec.model_dump_json(), flush=True)
        pair.sender.join()
        print("joined", flush=True)
        if setup.bucket is not None:
            tensor = torch.ones(setup.bucket.shape, dtype=getattr(torch, setup.bucket.dtype))
            bucket = WeightBucket(0, (setup.bucket,), (tensor,))
            threading.Thread(target=pair.sender.send, args=(bucket, setup.timeout_s), daemon=True).start()
    threading.Event().wait()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
