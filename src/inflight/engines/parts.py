"""The processes of an engine that it cannot live without, read from /proc; none are known where there is no /proc.

An engine's own server may live on after the process that samples has died. Knows nothing of how engines are started.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TITLE = "::"
"""vLLM and SGLang name their vital processes so, wherever in the tree they are: ``VLLM::Worker_TP1``."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process; ``started`` tells it from a later one with the same id. ``status`` is a wait status, 0 while alive.

    The status of a process that its parent has not collected yet is known to its own user only.
    """

    pid: int
    parent: int
    name: str
    started: int
    is_alive: bool
    status: int

    @property
    def how(self) -> str:
        """How it ended, as far as its parent left that to be seen."""
        if self.is_alive or not self.status:
            return "ended"
        number = self.status & 0x7F
        return f"was killed by {signal.Signals(number).name}" if number else f"ended with status {self.status >> 8}"


def vital_parts(supervisor: int) -> tuple[int, Mapping[int, Part]]:
    """Return the engine's first process and the parts that it cannot live without, of what ``supervisor`` started.

    They are the children of the first process, and whatever the engine gave a title of its own. Further descendants
    are not: pools of compilers come and go.
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


def dead_part(first: int, parts: Mapping[int, Part]) -> Part | None:
    """Return a part that has died while the first process lives on; None if there is none."""
    for pid, part in parts.items():
        now = _process(pid)
        if now is not None and now.is_alive and now.started == part.started:
            continue
        leader = _process(first)
        if leader is None or not leader.is_alive:
            return None  # the end of the first process is what ended the others
        return now if now is not None and now.started == part.started else part
    return None


def _processes() -> dict[int, Part]:
    with contextlib.suppress(OSError):
        found = (_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return {part.pid: part for part in found if part is not None}
    return {}


def _process(pid: int) -> Part | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()
    # The third field of proc(5) is the first here.
    return Part(pid, int(fields[1]), name, int(fields[19]), fields[0] not in "ZX", int(fields[49]))
