"""The vital processes of an engine, read from /proc. Without /proc, none are known.

They are watched because an engine's own server may outlive the process that samples.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TITLE = "::"
"""The titles of vLLM's and SGLang's vital processes contain this at any depth of the tree, as in ``VLLM::Worker_TP1``.
"""


@dataclass(frozen=True, slots=True)
class VitalProcess:
    """One process. ``started`` distinguishes it from a later process with the same id.

    ``status`` is a wait status, 0 while the process is alive. The status of a process that its parent has not reaped
    yet can be read only by the process's own user.
    """

    pid: int
    parent: int
    name: str
    started: int
    is_alive: bool
    status: int

    @property
    def how(self) -> str:
        """How the process ended, as far as a process other than its parent can see."""
        if self.is_alive or not self.status:
            return "ended"
        number = self.status & 0x7F
        return f"was killed by {signal.Signals(number).name}" if number else f"ended with status {self.status >> 8}"


def vital_parts(supervisor: int) -> tuple[int, Mapping[int, VitalProcess]]:
    """Return the engine's first process and its vital parts, among the processes that ``supervisor`` started.

    The vital parts are the children of the first process, and every process to which the engine gave a title. Other
    descendants are ignored, because compiler pools start and stop at any time.
    """
    processes = _processes()
    started = [part for part in processes.values() if part.parent == supervisor]
    if not started:
        return 0, {}
    first = min(started, key=lambda part: part.started).pid
    descendants = {supervisor}
    while more := {pid for pid, part in processes.items() if part.parent in descendants} - descendants:
        descendants |= more
    found = (part for pid, part in processes.items() if pid in descendants - {supervisor, first})
    return first, {part.pid: part for part in found if part.is_alive and (part.parent == first or _TITLE in part.name)}


def dead_part(first: int, parts: Mapping[int, VitalProcess]) -> VitalProcess | None:
    """Return a part that has died although the first process is alive; None if there is none."""
    for pid, part in parts.items():
        now = _process(pid)
        if now is not None and now.is_alive and now.started == part.started:
            continue
        leader = _process(first)
        if leader is None or not leader.is_alive:
            return None  # the first process ended, and the others with it
        return now if now is not None and now.started == part.started else part
    return None


def _processes() -> dict[int, VitalProcess]:
    with contextlib.suppress(OSError):
        found = (_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return {part.pid: part for part in found if part is not None}
    return {}


def _process(pid: int) -> VitalProcess | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()
    # The third field of proc(5) is the first here.
    return VitalProcess(pid, int(fields[1]), name, int(fields[19]), fields[0] not in "ZX", int(fields[49]))
