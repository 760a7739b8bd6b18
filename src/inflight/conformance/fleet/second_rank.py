"""Controls a trainer's rank 1 for the campaign: starts, kills, stops and ends the process, and observes its end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from inflight.base.shortened import shortened
from inflight.conformance.fleet.faults import Faults
from inflight.conformance.fleet.plan import RANK, Fault, Kind, Transport, UpdateStep
from inflight.conformance.fleet.rank import RankSettings, run_rank
from inflight.conformance.fleet.sources import RankLink, ShardedShadeSource
from inflight.errors import ConfigError

_END_S = 10.0
"""How many seconds rank 1 may take to end a publish once rank 0 has ended it, and to exit."""
_START_S = 60.0
_COME_BACK_S = 12.0
"""Maximum time for which a rank waits for its trainer's successor before it resumes."""


class SecondRank:
    """Rank 1 of a trainer, and ``source``, the weights that rank 0 holds. Setting ``trainer_is_dead`` ends rank 0."""

    def __init__(
        self,
        transport: Transport,
        frozen: tuple[str, ...],
        directory: Path,
        faults: Faults,
        trainer_is_dead: threading.Event,
        scale: float,
    ) -> None:
        self._faults = faults
        self._trainer_is_dead = trainer_is_dead
        self._transport = transport
        self._end_s = _END_S * scale
        self._directory = directory / "rank-1"
        self._directory.mkdir()
        self._file = directory / "shade.safetensors"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["inflight.conformance.fleet.rank"])  # it starts in milliseconds
        here, there = context.Pipe()
        self._control, control = context.Pipe()
        settings = RankSettings(transport, frozen, self._directory)
        self._process = context.Process(target=run_rank, args=(there, control, settings), daemon=True)
        self._process.start()
        there.close()
        control.close()
        self.source = ShardedShadeSource(0, frozen, RankLink(here, other=1), lambda *_: None)
        self.problems: list[str] = []
        self._has_ended, self._is_gone = threading.Event(), threading.Event()
        self._was_killed = False
        self._attending = threading.Thread(target=self._attend, name="inflight-fleet-rank", daemon=True)
        self._attending.start()
        if not self._has_ended.wait(_START_S * scale):
            raise ConfigError(f"the process of a trainer's rank 1 did not start within {_START_S * scale:g} s")

    @property
    def is_lost(self) -> bool:
        """Whether the ranks have lost their connection to each other, so that the whole trainer has to restart."""
        return self.source.link.lost is not None or self._is_gone.is_set()

    def begin_publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], deadline_s: float, *, is_sharded: bool
    ) -> None:
        """Give both ranks the tensors of a version, and let rank 1 take part in publishing it."""
        self.source.hold(version, tensors)
        self.source.is_sharded = is_sharded
        self._has_ended.clear()
        if self._is_gone.is_set():
            self._has_ended.set()
        save_file(dict(tensors), self._file)
        order = {
            "version": version,
            "file": str(self._file),
            "names": list(tensors),
            "deadline_s": deadline_s,
            "is_sharded": is_sharded,
        }
        with contextlib.suppress(OSError):  # it has exited, which rank 0 will notice
            self._control.send_bytes(json.dumps(order).encode())

    def end_publish(self) -> None:
        """Return once rank 1 has also ended the publish that rank 0 has ended, or once rank 1 has exited."""
        if not self._trainer_is_dead.is_set() and not self._has_ended.wait(self._end_s):
            self.problems.append(f"rank 1 did not end a publish within {self._end_s:g} s of rank 0")

    def close(self) -> None:
        """Make rank 1 end, and record anything that it leaves behind. Idempotent."""
        self._faults.replaced.set()
        self.source.link.lose("the trainer has ended")
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # it has ended already
            self._control.send_bytes(b"null")
        self._attending.join(self._end_s)
        self._process.join(self._end_s)
        if self._process.is_alive():
            self.problems.append(f"rank 1 did not end within {self._end_s:g} s")
            self._process.kill()
            self._process.join()
        elif not self._was_killed and self._process.exitcode:
            self.problems.append(f"rank 1 ended with status {self._process.exitcode}")
        left = [path.name for path in self._directory.rglob("*")]
        if left and self._transport == "shm" and not self._was_killed:
            self.problems.append(f"rank 1 left {shortened(left, 3)} behind")

    def _attend(self) -> None:
        """Answer rank 1's queries until it has exited."""
        try:
            while True:
                said = json.loads(self._control.recv_bytes())
                if "step" in said:
                    self._inject(self._faults.due(RANK, UpdateStep(f"rank_{said['step']}"), said["bucket"]))
                elif "problem" in said:
                    self.problems.append(f"rank 1 failed: {said['problem']}")
                else:
                    self._has_ended.set()
        except (EOFError, OSError):
            self._is_gone.set()
            self._has_ended.set()

    def _inject(self, fault: Fault | None) -> None:
        """Tell rank 1 which fault is due. Kill or stop it here, before the answer or shortly after it."""
        is_signal = fault is not None and fault.kind in (Kind.KILL, Kind.STOP, Kind.COME_BACK)
        if fault is None or not is_signal:
            if is_trainer := fault is not None and fault.kind is Kind.KILL_TRAINER:
                self._trainer_is_dead.set()
            self._answer(None if is_trainer else fault)
            return
        if fault.num_calls % 2 and fault.kind is not Kind.COME_BACK:
            self._answer(None)
            time.sleep(min(fault.seconds, 0.02) / 4)
        if fault.kind is Kind.KILL:
            self._was_killed = True
            self._is_gone.set()  # before a message that it sent first is read
            self._signal(signal.SIGKILL)
            return
        self._signal(signal.SIGSTOP)
        if fault.kind is Kind.STOP:
            time.sleep(fault.seconds)
        else:
            self._trainer_is_dead.set()
            self._faults.replaced.wait(_COME_BACK_S)
        self._signal(signal.SIGCONT)
        if not fault.num_calls % 2 or fault.kind is Kind.COME_BACK:
            self._answer(None)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _answer(self, fault: Fault | None) -> None:
        said = None if fault is None else {"kind": fault.kind, "seconds": fault.seconds, "num": fault.num_calls}
        self._control.send_bytes(json.dumps(said).encode())
