"""What code in a sandbox must leave alone, and how to see from outside whether it did.

Everything here can be reached by any user of the machine, also by nobody, as whom code runs where root starts it: what
keeps the code off is then the sandbox, not the permissions of files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from inflight.environments.tools.python_tool import PythonResult
from tests.gates import SOON_S

NOBODY = 65534
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT)


@dataclass
class Outside:
    """Secrets, files, servers, a process and this process. ``mark`` is found in the command line of sandboxes."""

    folder: Path
    secret: str
    mark: str
    listeners: dict[str, socket.socket]
    victim: subprocess.Popen[bytes]
    inheritable_fd: int
    signals: list[int] = field(default_factory=list)
    token_seen: bool = False
    most_threads: int = 0
    most_memory_bytes: int = 0

    def __post_init__(self) -> None:
        self.before = self._state()
        self._descriptors = _open_descriptors()

    @property
    def header(self) -> str:
        """One line of code that tells an attempt where everything is."""
        values = {
            "SECRET_FILE": str(self.folder / "secret"),
            "FOLDER": str(self.folder),
            "CANARY": str(self.folder / "canary"),
            "SHARED": f"/dev/shm/{self.folder.name}",
            "PORT": self.listeners["tcp"].getsockname()[1],
            "UDP_PORT": self.listeners["udp"].getsockname()[1],
            "UNIX": self.listeners["unix"].getsockname(),
            "ABSTRACT": self.listeners["abstract"].getsockname(),
            "PARENT": os.getpid(),
            "VICTIM": self.victim.pid,
        }
        return "import os; " + "; ".join(f"{name} = {value!r}" for name, value in values.items()) + "\n"

    def marked_processes(self) -> list[int]:
        """Return every process of this machine whose command line has the mark: launchers and all their forks."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if pid not in (os.getpid(), os.getppid())]

    def measure(self) -> None:
        """Keep what marked processes had: the token in the environment, the most threads and memory at one time."""
        threads = memory_bytes = 0
        for pid in self.marked_processes():
            with contextlib.suppress(OSError):
                lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                self.token_seen |= b"INFLIGHT_TOKEN" in Path(f"/proc/{pid}/environ").read_bytes()
                threads += int(lines.get("Threads", "0"))
                memory_bytes += int(lines.get("RssAnon", "0 kB").split()[0]) * 1024
                memory_bytes += int(lines.get("RssShmem", "0 kB").split()[0]) * 1024
        self.most_threads = max(self.most_threads, threads)
        self.most_memory_bytes = max(self.most_memory_bytes, memory_bytes)

    def problems(self, result: PythonResult) -> list[str]:
        """Return what the code has reached, left or changed. Empty if it has stayed inside."""
        found = [f"{name} changed" for name, value in self._state().items() if value != self.before[name]]
        found += [
            f"the {name} socket was reached" for name, listener in self.listeners.items() if _is_readable(listener)
        ]
        found += self._changed_descriptors()
        if self.victim.poll() is not None:
            found.append("another process was ended")
        if self.signals:
            found.append(f"this process got the signals {self.signals}")
        if left := self.marked_processes():
            found.append(f"processes are left: {left}")
        if self.token_seen:
            found.append("the sandbox had the token")
        if self.secret in result.text:
            found.append("the secret was read")
        if any(line in result.text for line in Path("/etc/passwd").read_text().splitlines() if line):
            found.append("/etc/passwd was read")
        return found

    def _state(self) -> dict[str, Any]:
        own = Path(f"/proc/{os.getpid()}")
        # Tests of several hosts, which may run beside this one, mount their network namespaces.
        mounts = [line for line in (own / "mountinfo").read_text().splitlines() if "/netns" not in line]
        return {
            "files": {path.name: path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()},
            "shared memory": Path(f"/dev/shm/{self.folder.name}").read_bytes(),
            "the standard library": Path(os.__file__).read_bytes(),
            "names beside the standard library": sorted(os.listdir(Path(os.__file__).parent)),
            "mounts": mounts,
            "the host's name": socket.gethostname(),
            "limits": [Path(f"/proc/{pid}/limits").read_text() for pid in (os.getpid(), self.victim.pid)],
            "priority": [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, self.victim.pid)],
            "children": (own / "task" / str(threading.get_native_id()) / "children").read_text(),
        }

    def _changed_descriptors(self) -> list[str]:
        """Return which of our file descriptors have changed, and which additional ones stay open.

        Threads of earlier tests may still close their own.
        """
        ours = {self.inheritable_fd, *(listener.fileno() for listener in self.listeners.values())}
        now = _open_descriptors()
        found = [f"file descriptor {fd} changed" for fd in ours if now.get(fd) != self._descriptors[fd]]
        deadline = time.monotonic() + SOON_S
        while (added := _open_descriptors().keys() - self._descriptors.keys()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [*found, *(f"file descriptor {fd} was left open" for fd in added)]


def _open_descriptors() -> dict[int, str]:
    """Return what each file descriptor of this process refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _is_readable(listener: socket.socket) -> bool:
    """Whether a datagram or a connection waits."""
    return bool(select.select([listener], [], [], 0)[0])


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """Set everything up, for the main thread; the secret is also in this process's environment and memory."""
    secret = secrets.token_hex(16)
    mark = repr(100.5 + secrets.randbelow(10**9) / 4e9)  # the timeout of the sandboxes, in their command lines
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="outside-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o777)
        shared = Path(f"/dev/shm/{folder.name}")
        stack.callback(shared.unlink)
        for path in (folder / "secret", folder / "canary", folder / "inherited", shared):
            path.write_text(secret)
            path.chmod(0o666)
        inheritable_fd = os.open(folder / "inherited", os.O_RDWR)
        stack.callback(os.close, inheritable_fd)
        os.set_inheritable(inheritable_fd, True)
        addresses: dict[str, tuple[int, int, Any]] = {
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{folder.name}"),
        }
        listeners = {}
        for name, (family, kind, address) in addresses.items():
            listener = listeners[name] = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            listener.setblocking(False)
            if kind == socket.SOCK_STREAM:
                listener.listen()
        (folder / "socket").chmod(0o777)
        sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        user = NOBODY if os.geteuid() == 0 else None
        victim = subprocess.Popen(["/bin/sleep", "600"] if shutil.which("sleep") else sleep, user=user)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        signals: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            signals.append(number)

        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, note))
        os.environ["INFLIGHT_TOKEN"] = secret
        stack.callback(os.environ.pop, "INFLIGHT_TOKEN")
        yield Outside(folder, secret, mark, listeners, victim, inheritable_fd, signals)
