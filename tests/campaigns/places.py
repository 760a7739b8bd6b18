"""What a run has on this machine: its processes by name, their sockets and shared memory, and its file systems."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

TAG = "INFLIGHT_CAMPAIGN_RUN"
"""Environment variable that holds the place of a run; its processes inherit it."""
_MNT_DETACH = 2
_ESTABLISHED, _LISTENS = "01", "0A"


def processes(place: Path) -> dict[str, int]:
    """Return the live processes of a run that write to a log below its place, by the name of that log."""
    found = {}
    for pid, directory in _all():
        with contextlib.suppress(OSError):
            log = os.readlink(directory / "fd" / "1")
            if log.endswith("/output.log") and os.readlink(directory / "fd" / "0").startswith("pipe:"):
                continue  # the process of a task, which shares the output of the controller
            if log.startswith(f"{place}/") and log.endswith(".log") and is_alive(pid) and not _is_shim(directory):
                found["controller" if log.endswith("/output.log") else Path(log).stem] = pid
    return found


def belongings(place: Path) -> dict[int, str]:
    """Return every live process that has to do with a run, with the reason: a file, its directory, or the tag."""
    found = {}
    tag = f"{TAG}={place}".encode()
    for pid, directory in _all():
        with contextlib.suppress(OSError):
            if not is_alive(pid):
                continue
            paths = [*_links(directory), os.readlink(directory / "cwd")]
            if reason := next((path for path in paths if path.startswith(f"{place}/")), None):
                found[pid] = f"process {pid} has {reason}"
            elif tag in (directory / "environ").read_bytes().split(b"\0"):
                found[pid] = f"process {pid}: {(directory / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return found


def held_by(pids: Iterator[int] | list[int]) -> tuple[set[str], set[str]]:
    """Return sockets (inode numbers) and paths in shared memory that these processes hold."""
    sockets, shared = set(), set()
    for pid in pids:
        for path in _links(Path(f"/proc/{pid}")):
            if path.startswith("socket:["):
                sockets.add(path[8:-1])
            elif path.startswith("/dev/shm/"):
                shared.add(path.removesuffix(" (deleted)"))
    return sockets, shared


def listening(inodes: set[str]) -> list[str]:
    """Return the ports on which some of these sockets listen."""
    return [str(local) for state, inode, local, _ in _connections() if state == _LISTENS and inode in inodes]


def _connections() -> Iterator[tuple[str, str, int, int]]:
    """Yield state, inode, and both ports of every TCP socket."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, remote = (int(fields[i].rpartition(":")[2], 16) for i in (1, 2))
            yield fields[3], fields[9], local, remote


def cut_connections(pid: int) -> int:
    """Abort the established connections of a process, as a network that resets them does; returns how many."""
    sockets, _ = held_by([pid])
    ends = [
        (local, remote) for state, inode, local, remote in _connections() if state == _ESTABLISHED and inode in sockets
    ]
    for local, remote in ends:
        _ss("state", "established", f"( sport = :{local} and dport = :{remote} )")
    return len(ends)


@functools.cache
def can_cut() -> str | None:
    """Return why no connection can be cut here; None if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as ours, listener.accept()[0]:
                _ss("state", "established", f"( sport = :{port} or dport = :{port} )")
                ours.setblocking(False)
                ours.recv(1)
    except BlockingIOError:
        return "the kernel does not let ss -K cut connections"
    except FileNotFoundError:
        return "there is no ss"
    except ConnectionError:
        return None
    return None


def _ss(*which: str) -> None:
    subprocess.run(["ss", "-K", "-t", *which], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@functools.cache
def can_mount() -> str | None:
    """Return why no file system can be mounted here; None if it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            mount(Path(directory), 1)
        except (OSError, AttributeError) as error:
            return f"a small file system cannot be mounted: {error}"
        unmount(Path(directory))
    return None


def mount(path: Path, size_mb: int) -> None:
    """Mount an empty file system in memory. Raises `OSError`."""
    path.mkdir(parents=True, exist_ok=True)
    _checked(_libc().mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={size_mb}m".encode()), path)


def unmount(path: Path) -> None:
    """Unmount it, whoever still uses it."""
    _checked(_libc().umount2(str(path).encode(), _MNT_DETACH), path)


def fill(path: Path) -> Path:
    """Fill the file system of a directory to the last byte; returns the file to remove."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return ballast


def is_full(path: Path) -> bool:
    """Return whether not a byte more can be written: the proof that a disk was filled."""
    try:
        (path / "probe").write_bytes(b"1")
    except OSError as error:
        return error.errno == errno.ENOSPC
    finally:
        (path / "probe").unlink(missing_ok=True)
    return False


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(status: int, path: Path) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def _all() -> Iterator[tuple[int, Path]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name), Path("/proc") / name


def _links(directory: Path) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        for name in os.listdir(directory / "fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(directory / "fd" / name))
    return links


def _is_shim(directory: Path) -> bool:
    """Return whether it only stands for another process, see `tests.zygote`."""
    return b".python\0" in (directory / "cmdline").read_bytes()
