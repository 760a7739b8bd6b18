"""Updates that are staged in this process and passed to SGLang as a checkpoint directory, which SGLang itself loads.

The files are in this host's memory if they fit there, in a directory that only this user can enter. They are written as
buckets arrive, and exist only while their update is open: once SGLang has loaded them, it no longer needs them. LoRAs
are merged in this process, and the merged weights are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.base.tasks import TaskOwner
from inflight.base.threads import run_abandonable
from inflight.errors import TransferError
from inflight.weights.receive.adapter import BucketSink
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.wire import BucketSpec, BucketTransfer, TensorSpec, TransportSpec, UpdateRef, WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight_sglang.loaded_weights import LoadedWeights


class CheckpointFiles:
    """The buckets of one update as safetensors files. Files that are written after `remove` are removed too."""

    def __init__(self, update: WeightUpdate) -> None:
        self._update = update
        self._lock = threading.Lock()
        self._home: PrivateDirectory | None = None
        self._is_removed = False

    @property
    def probe(self) -> Path:
        """An empty directory: a server that can see it can also see the checkpoint."""
        return self._made().path / "probe"

    @property
    def checkpoint(self) -> Path:
        return self._made().path / "checkpoint"

    def write(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], flat: torch.Tensor) -> None:
        """Store the bytes of one bucket; blocks. Raises `TransferError` if they cannot be written."""
        self._write(bucket.index, tensors, flat, f"bucket {bucket.index}")

    def write_more(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Store tensors that were not in any bucket, after the last bucket; blocks.

        Raises `TransferError` if they cannot be written.
        """
        from inflight.weights.encode.bucket_bytes import pack
        from inflight.weights.send.module import tensor_spec

        specs = [tensor_spec(name, tensor, None) for name, tensor in named]
        self._write(
            len(self._update.buckets), specs, pack([tensor for _, tensor in named]), "the merged weights of the update"
        )

    def _write(self, index: int, tensors: Sequence[TensorSpec], flat: torch.Tensor, what: str) -> None:
        from inflight.weights.transports.bucket_files import bucket_name, safetensors_header
        from inflight.weights.transports.store import bytes_of

        parts = (memoryview(safetensors_header(tensors, self._update.ref, index)), bytes_of(flat))
        try:
            with open(self.checkpoint / bucket_name(index), "xb", buffering=0) as file:
                for part in parts:
                    written = 0
                    while written < len(part):
                        written += file.write(part[written:])
        except OSError as error:
            raise TransferError(f"{what} could not be written to {self.checkpoint} for the engine: {error}") from error
        finally:
            with self._lock:
                is_late, home = self._is_removed, self._home
            if is_late and home is not None:
                shutil.rmtree(home.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything. Files that the engine has mapped remain readable to it. Idempotent."""
        with self._lock:
            self._is_removed = True
            home = self._home
        if home is not None:
            home.remove()

    def _made(self) -> PrivateDirectory:
        with self._lock:
            if self._is_removed:
                raise TransferError("the update has ended")
            if self._home is None:
                try:
                    self._home = PrivateDirectory(_parent(self._update.manifest.size_bytes))
                    for name in ("probe", "checkpoint"):
                        (self._home.path / name).mkdir(mode=0o700)
                except OSError as error:
                    raise TransferError(f"no directory could be created for the engine: {error}") from error
            return self._home


class CheckpointSink(BucketSink):
    """Verifies and decodes buckets in this process, and writes them for SGLang.

    ``clear`` is called before a group is joined, and ends the session and the pause of a dead publisher.
    ``make_loaded`` creates the record of the weights that the server has loaded, into which LoRAs are merged. It is
    called only at the first update, because it imports torch.
    """

    def __init__(
        self,
        clear: Callable[[TransportSpec], Awaitable[None]],
        make_loaded: Callable[[], LoadedWeights],
        background: TaskOwner,
    ) -> None:
        self._clear = clear
        self._make_loaded = make_loaded
        self._background = background
        self._loaded: LoadedWeights | None = None
        self._staged = StagedSink(make_receiver)
        self._update: WeightUpdate | None = None
        self._files: CheckpointFiles | None = None

    @property
    def has_applied(self) -> bool:
        """Always False: staging applies nothing."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        return self._staged.kept

    @property
    def files(self) -> CheckpointFiles:
        if self._files is None:
            raise TransferError("no weight update is open: begin one first")
        return self._files

    async def join(self, spec: TransportSpec) -> None:
        """Join the group from this process, in place of the engine."""
        await self._clear(spec)
        await self._staged.join(spec)

    def leave(self) -> None:
        self._staged.leave()
        self._drop()

    def begin(self, update: WeightUpdate) -> None:
        self._drop()
        if self._loaded is None:
            self._loaded = self._make_loaded()
        self._loaded.begin(update)
        self._staged.begin(update)
        self._update, self._files = update, CheckpointFiles(update)

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        files, update, loaded = self.files, self._update, self._loaded
        assert update is not None and loaded is not None  # `begin` was called
        await self._staged.receive(transfer, bucket, tensors)
        flat = self._staged.flat(bucket.index)
        arrived = self._staged.take() if bucket.index == len(update.buckets) - 1 else None

        def write() -> None:
            if update.manifest.lora is None:
                files.write(bucket, tensors, flat)
            if arrived is not None and (more := loaded.prepare(update, arrived)):
                files.write_more(more)

        try:
            async with asyncio.timeout(transfer.timeout_s):
                await run_abandonable(write, "inflight-write")
        except TimeoutError as error:
            raise TransferError(
                f"storing bucket {bucket.index} for the engine failed: it took longer than {transfer.timeout_s:g} s"
            ) from error

    def note_committed(self) -> None:
        assert self._loaded is not None  # `begin` was called
        self._loaded.note_committed(self._staged.take())
        self._staged.note_committed()
        self._drop()

    def _drop(self) -> None:
        """Remove the files outside the event loop, because freeing gigabytes takes a while."""
        files, self._files = self._files, None
        if files is not None:
            self._background.start(asyncio.get_running_loop().run_in_executor(None, files.remove))


def _parent(size_bytes: int) -> Path:
    """Return a directory in this host's memory if the update fits there, else the directory for temporary files."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        free = os.statvfs(memory)
        if os.access(memory, os.W_OK | os.X_OK) and free.f_bavail * free.f_frsize > size_bytes + (64 << 10):
            return memory
    return Path(tempfile.gettempdir())
