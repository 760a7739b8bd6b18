"""Runs one command, and ends all of the command's processes when this process's standard input is closed.

    python -I supervise.py PATIENCE_S COMMAND...

PATIENCE_S is how long, in seconds, the processes may take to exit. On SIGQUIT, or when the command itself ends, the
remaining processes have half a second to exit.

An engine starts processes of its own, and an owner that is killed cannot end them. This process runs between the owner
and the engine, and does nothing else: its input is closed no matter how its owner ends. On Linux, it adopts descendants
whose parents have ended, so it loses track of none; if this process itself is killed, the command dies with it. Killed
processes leave semaphores and shared memory behind. This process therefore records which of these appear in the memory
maps of running processes, and removes them by name. vLLM leaves sockets and files in the temporary directory, however
it ends; the command therefore gets a temporary directory of its own, which is removed at the end. This module is run as
a file and imports only the standard library, because it must start quickly and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from getpass import getuser

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_SHORT_S = 0.5
_NOT_FOUND = 127
_LOOK_EVERY_S = 5.0
_SHARED = re.compile(r"(?:sem\.mp-|psm_|sglang_loads_)[^/\s]+")
"""Names of semaphores and shared memory of Python's multiprocessing and of SGLang in `_MEMORY`."""
_MEMORY = "/dev/shm"
_MAPPED = re.compile(rf" (\d+) +{_MEMORY}/", re.MULTILINE)
"""The inode number of a file in `_MEMORY`, in a process's memory maps. The name there does not identify the file: the
process that created a semaphore maps it under a temporary name that has been removed.
"""


_MAX_DIRECTORY_BYTES = 70
"""Length of the longest temporary directory in which vLLM can bind its sockets, whose paths have at most 107 bytes."""


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit status, or 128 plus a signal's number, once none of its processes is left."""
    patience_s, command = float(arguments[0]), arguments[1:]
    asked_to_end: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    temporary = _private_temporary_directory()
    try:
        return _run(patience_s, command, temporary, asked_to_end)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _run(patience_s: float, command: Sequence[str], temporary: str | None, asked_to_end: Sequence[int]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        # Kept: a Popen that is deleted reaps a command that has ended already, and its status would never be seen.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_die_with_parent,
            env={**os.environ, **_variables(temporary)},
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND
    child, status, shared, look_at = process.pid, None, set[str](), 0.0
    while status is None and not asked_to_end and not _input_ended():
        if time.monotonic() > look_at:
            shared |= _shared_by(_remaining_processes(child))
            look_at = time.monotonic() + _LOOK_EVERY_S
        status = _reap(child)
    shared |= _shared_by(_remaining_processes(child))
    ended_with = _end_all(
        child, lambda: min(patience_s, _SHORT_S) if status is not None or signal.SIGQUIT in asked_to_end else patience_s
    )
    _remove(shared)
    code = os.waitstatus_to_exitcode(status if status is not None else ended_with or 0)
    return code if code >= 0 else 128 - code


def _private_temporary_directory() -> str | None:
    """Create a directory for temporary files, and return its path; None if that fails or the path is too long."""
    path = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"engine-{os.getpid()}-{time.time_ns() % 1000}")
    if len(os.fsencode(path)) > _MAX_DIRECTORY_BYTES:
        return None
    try:
        os.mkdir(path, 0o700)
    except OSError:
        return None
    return path


def _variables(temporary: str | None) -> dict[str, str]:
    """Return variables that move temporary files to a directory, except torch's cache, which later engines reuse."""
    if temporary is None:
        return {}
    try:
        cache = os.path.join(os.path.dirname(temporary), f"torchinductor_{getuser()}")  # torch's default
    except (KeyError, OSError):  # the user has no name
        return {"TMPDIR": temporary}
    return {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _input_ended() -> bool:
    readable, _, _ = select.select([0], [], [], _POLL_S)
    return bool(readable) and not os.read(0, 4096)


def _reap(child: int) -> int | None:
    """Reap every process that has ended, and return the wait status of ``child`` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _end_all(child: int, patience_s: Callable[[], float]) -> int | None:
    """Ask every process to end, then kill the rest. Return the wait status of ``child`` if it ends in the meantime."""
    started = time.monotonic()
    status = None
    _signal_all(child, signal.SIGTERM)
    while _remaining_processes(child):
        if time.monotonic() - started > patience_s():
            _signal_all(child, signal.SIGKILL)  # repeated: a new one may have started
        time.sleep(_POLL_S / 2)
        ended_with = _reap(child)
        status = ended_with if ended_with is not None else status
    return status


def _signal_all(child: int, number: int) -> None:
    for pid in _remaining_processes(child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _remaining_processes(child: int) -> list[int]:
    """Return the command's descendants that have not ended; without /proc, only those in its process group."""
    if sys.platform != "linux":
        try:
            os.killpg(child, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-child]
    parents = dict(_live_processes())
    descendants = []
    for pid in parents:
        ancestor = pid
        while (ancestor := parents.get(ancestor, 0)) > 1:
            if ancestor == os.getpid():
                descendants.append(pid)
                break
    return descendants


def _shared_by(pids: Sequence[int]) -> set[str]:
    """Return the semaphores and shared memory in the memory maps of processes; without /proc, none."""
    mapped = set[int]()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            mapped |= {int(number) for number in _MAPPED.findall(file.read())}
    found = set[str]()
    for name in filter(_SHARED.fullmatch, os.listdir(_MEMORY) if mapped else []):
        with contextlib.suppress(OSError):
            if os.stat(f"{_MEMORY}/{name}").st_ino in mapped:
                found.add(f"{_MEMORY}/{name}")
    return found


def _remove(shared: set[str]) -> None:
    """Remove the shared memory and semaphores left by the engine's processes, unless another live process uses them."""
    left = {name for name in shared if os.path.exists(name)}
    for name in left - (_shared_by([pid for pid, _ in _live_processes()]) if left else set()):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _live_processes() -> list[tuple[int, int]]:
    """Return the process id and parent process id of every process that its parent has not reaped.

    This includes zombies: a process becomes one when its first thread ends, but it keeps its sockets, and cannot be
    reaped, until its other threads have ended, too.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "X":
                    found.append((int(entry), int(parent)))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
