"""A worker that waits to be killed in the middle of a save: ``python -m tests.worker.killed_program DIRECTORY``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from inflight_fsdp import create_worker
from tests.worker.worker_cases import accumulate, make_batch, settings


def main(directory: Path) -> None:
    worker = create_worker(settings(directory / "model"))
    for path in ("checkpoint", "expected"):
        worker.save(directory / path)
    accumulate(worker, [make_batch((9, 4), seed=1)])
    worker.step()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("optimizer.safetensors"):
            (directory / "in the middle").touch()
            time.sleep(60)

    os.fsync = slow_fsync
    worker.begin_save(directory / "checkpoint")
    worker.finish_save(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
