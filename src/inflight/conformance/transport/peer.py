"""One end of a transport in its own process, which checks can kill or stop.

The process is started with ``python -m``. It writes the line ``ready`` once it has imported what it needs, reads a
`PeerSetup` from stdin, joins, writes the line ``joined``, sends or receives the buckets of its setup, and waits. Before
it joins, a sender writes the spec for its receiver. A receiver writes a digest of each bucket that it has received.
The process ends when its parent does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from inflight.conformance.calls import PendingCall
from inflight.conformance.judge import Hung
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.buckets import digest_of, numbered
from inflight.conformance.transport.pair import GroupMember, open_pair, update_of
from inflight.contracts import WeightReceiver
from inflight.types import WeightBucket
from inflight.wire import TensorSpec, TransportBody, TransportSpec, UpdateRef, WeightUpdate, WireModel

READY_S = 60.0
"""Time limit for starting Python and importing torch, which does not count towards the transport's time limits."""
START_S = 15.0


class PeerSetup(WireModel):
    """The role of the process: a receiver if it has a spec, otherwise a sender to one receiver."""

    target: TransportTarget
    directory: Path
    spec: TransportBody | None = None
    timeout_s: float = START_S
    bucket: TensorSpec | None = None
    """The float64 [n] tensor from `numbered` that the sender sends once it has joined."""
    receives: WeightUpdate | None = None
    """The update whose buckets the receiver receives once it has joined."""


class Peer:
    """The parent's side of the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight.conformance.transport.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def is_ready(self) -> bool:
        """Wait until the process has started; return whether it did so within `READY_S`."""
        assert self._process.stdout is not None
        reading = PendingCall(self._process.stdout.readline, "the other process")
        return reading.has_ended(READY_S) and bool(reading.result(0.0))

    def set_up(self, setup: PeerSetup) -> None:
        """Send the process its role. The process must be ready."""
        assert self._process.stdin is not None
        self._process.stdin.write(setup.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()

    def member(self, spec_type: type[TransportSpec]) -> GroupMember:
        """Return the receiver's position in the group, from the spec that the sender has written. Raises `Hung`."""
        return GroupMember(spec_type.model_validate_json(self._line("open a group")))

    def wait_until_joined(self) -> None:
        self._line("join")

    def sent(self, bucket: WeightBucket) -> UpdateRef:
        """Return a reference to the update in which the process sends ``bucket``."""
        return _update(bucket, self._process.pid).ref

    def digest(self) -> str:
        """Return the digest of the next bucket that the process has received. Raises `Hung`."""
        return self._line("receive a bucket").decode().strip()

    def kill(self) -> None:
        """Kill the process immediately, even if it is stopped. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _line(self, what: str) -> bytes:
        """Return the next line, which the process writes once it has done ``what``."""
        assert self._process.stdout is not None
        reading = PendingCall(self._process.stdout.readline, "the other process")
        line = reading.result(0.0) if (has_ended := reading.has_ended(START_S)) else b""
        if not line:
            how = f"ended with status {self._process.wait()}" if has_ended else f"did not within {START_S:g} s"
            raise Hung(f"the other process had to {what} but {how}", "")
        return line


def main() -> None:
    """Run one end of the transport until the parent closes stdin."""
    print("ready", flush=True)
    setup = PeerSetup.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pair = open_pair(setup.target, setup.directory)
    if setup.spec is not None:
        receiver = pair.receiver(GroupMember(pair.transport.spec_type.model_validate(setup.spec.model_dump())))
        receiver.join()
        print("joined", flush=True)
        if setup.receives is not None:
            _receive(receiver, setup.receives, setup.timeout_s)
    else:
        (spec,) = pair.sender.specs("conformance", [1], setup.timeout_s)
        print(spec.model_dump_json(), flush=True)
        pair.sender.join()
        print("joined", flush=True)
        if setup.bucket is not None:
            bucket = WeightBucket(0, (setup.bucket,), (numbered(setup.bucket.num_elements),))
            pair.sender.begin(_update(bucket, os.getpid()))
            threading.Thread(target=pair.sender.send, args=(bucket, setup.timeout_s), daemon=True).start()
    threading.Event().wait()


def _update(bucket: WeightBucket, pid: int) -> WeightUpdate:
    """Return the update in which a process sends ``bucket``.

    Its session id contains ``pid``, because a store may contain updates of earlier processes.
    """
    return update_of([bucket], 1, f"process-{pid}")


def _receive(receiver: WeightReceiver, update: WeightUpdate, timeout_s: float) -> None:
    receiver.begin(update.ref)
    for bucket in update.buckets:
        tensors = receiver.receive(update.manifest.tensors[bucket.start : bucket.stop], timeout_s)
        print(digest_of(tensors), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
