"""Updates that are staged in this process and handed to SGLang as a checkpoint directory, which it loads by itself.

The files lie in memory of this host where they fit there, in a directory that only this user can enter, and are written
as buckets arrive. They are there for as long as their update is open: once it is loaded, SGLang needs nothing of them.
An adapter is merged here, and the weights that it changes are written. Knows nothing of SGLang's routes.
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

from inflight.engines.calls import BackgroundCalls
from inflight.errors import TransferError
from inflight.weights.receiving import StagedIntake, WeightIntake
from inflight.weights.threads import run_abandonable
from inflight.weights.transports import make_receiver
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.wire import BucketSpec, BucketTransfer, TensorSpec, TransportSpec, UpdateRef, WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight_sglang.loaded_weights import LoadedWeights


class CheckpointFiles:
    """The buckets of one update as safetensors files. What a late writer leaves behind a `remove` is removed too."""

    def __init__(self, update: WeightUpdate) -> None:
        self._update = update
        self._lock = threading.Lock()
        self._home: PrivateDirectory | None = None
        self._is_removed = False

    @property
    def probe(self) -> Path:
        """An empty directory: a server that finds it finds the checkpoint too."""
        return self._made().path / "probe"

    @property
    def checkpoint(self) -> Path:
        """The directory of the files."""
        return self._made().path / "checkpoint"

    def write(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], flat: torch.Tensor) -> None:
        """Store the bytes of one bucket; blocks. Raises `TransferError`."""
        self._write(bucket.index, tensors, flat, f"bucket {bucket.index}")

    def write_more(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Store tensors that no bucket brought, after the last one; blocks. Raises `TransferError`."""
        from inflight.weights.module import tensor_spec
        from inflight.weights.packing import pack

        specs = [tensor_spec(name, tensor, None) for name, tensor in named]
        self._write(len(self._update.buckets), specs, pack([tensor for _, tensor in named]), "what the update changes")

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
            raise TransferError(f"{what} could not be stored for the engine: {error}") from error
        finally:
            with self._lock:
                is_late, home = self._is_removed, self._home
            if is_late and home is not None:
                shutil.rmtree(home.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything; what the engine still has mapped stays readable there. Idempotent."""
        with self._lock:
            self._is_removed = True
            home = self._home
        if home is not None:
            home.remove()

    def _made(self) -> PrivateDirectory:
        with self._lock:
            if self._is_removed:
                raise TransferError("the update ended meanwhile")
            if self._home is None:
                try:
                    self._home = PrivateDirectory(_parent(self._update.manifest.size_bytes))
                    for name in ("probe", "checkpoint"):
                        (self._home.path / name).mkdir(mode=0o700)
                except OSError as error:
                    raise TransferError(f"no directory could be made for the engine: {error}") from error
            return self._home


class CheckpointIntake(WeightIntake):
    """Compares and decodes buckets in this process, then writes them for SGLang.

    ``clear`` is called before a group is joined: it ends what a publisher that died left behind on the server.
    ``make_loaded`` makes what says which weights the server has loaded, which adapters are merged into; it is called
    for the first update, since it takes torch.
    """

    def __init__(
        self,
        clear: Callable[[TransportSpec], Awaitable[None]],
        make_loaded: Callable[[], LoadedWeights],
        background: BackgroundCalls,
    ) -> None:
        self._clear = clear
        self._make_loaded = make_loaded
        self._background = background
        self._loaded: LoadedWeights | None = None
        self._staged = StagedIntake(make_receiver)
        self._update: WeightUpdate | None = None
        self._files: CheckpointFiles | None = None

    @property
    def has_applied(self) -> bool:
        """What is staged is not applied."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        return self._staged.kept

    @property
    def files(self) -> CheckpointFiles:
        """The files of the open update."""
        if self._files is None:
            raise TransferError("no update is open")
        return self._files

    async def join(self, spec: TransportSpec) -> None:
        """It is this process that joins, in place of the engine."""
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
        assert update is not None and loaded is not None  # `begin` was called: there are files
        await self._staged.receive(transfer, bucket, tensors)
        flat = self._staged.flat(bucket.index)
        arrived = self._staged.take() if bucket.index == len(update.buckets) - 1 else None

        def write() -> None:
            if update.manifest.adapter is None:
                files.write(bucket, tensors, flat)
            if arrived is not None and (more := loaded.prepare(update, arrived)):
                files.write_more(more)

        try:
            async with asyncio.timeout(transfer.timeout_s):
                await run_abandonable(write, "inflight-write")
        except TimeoutError as error:
            raise TransferError(
                f"storing bucket {bucket.index} for the engine failed: not done after {transfer.timeout_s:g} s"
            ) from error

    def committed(self) -> None:
        assert self._loaded is not None  # something began
        self._loaded.committed(self._staged.take())
        self._staged.committed()
        self._drop()

    def _drop(self) -> None:
        """Have the files removed, beside the event loop: to give gigabytes back takes a while."""
        files, self._files = self._files, None
        if files is not None:
            self._background.start(asyncio.get_running_loop().run_in_executor(None, files.remove))


def _parent(size_bytes: int) -> Path:
    """Return memory of this host if the update fits there, or else the directory for temporary files."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        free = os.statvfs(memory)
        if os.access(memory, os.W_OK | os.X_OK) and free.f_bavail * free.f_frsize > size_bytes + (64 << 10):
            return memory
    return Path(tempfile.gettempdir())
