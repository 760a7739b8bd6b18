"""A process that has imported everything, and forks what would otherwise be a new interpreter.

    python -m tests.zygote SOCKET [MODULE ...]

A run starts five processes, each of which imports torch and transformers for seconds. The zygote imports them once. A
`shim` takes the place of ``sys.executable``: it hands its arguments, environment, directory, network namespace and file
descriptors to the zygote, which forks the real process, and lives and ends as that process does. Product code is not
changed: the run starts ``sys.executable -m inflight serve ...``, only that this is the shim. Whatever is neither a
module nor a script gets a new interpreter, and so does everything where INFLIGHT_TESTS_FORK is 0.

What differs from processes that are started plainly:

- The real process is a child of the zygote and has another id than the one that its starter knows, the shim's. Signals
  that the starter sends reach it by way of the shim, and its end reaches the starter by way of the shim's.
- ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are the zygote's. Which run a process belongs to is told by its
  standard output.
- Seeds that an interpreter draws when it starts (hashes of strings) are alike in all of them; module state that
  importing makes is shared until written. No thread runs in the zygote, so none is lost by the fork.
- They end without collecting their objects. Exit handlers run, threads are waited for.
- Modules are imported already, and so nothing can strike while they are. Campaigns start a share of their runs plainly.
- Figures are not rendered, which takes a second of a processor for each run: files of plots are empty unless
  INFLIGHT_TESTS_PLOTS is set.
- SIGKILL reaches the real process a moment after the shim, and SIGSTOP never does. To send either, use the real
  process's own id.

The zygote has one thread. It ends when its standard input does, and then kills the processes that are left.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from inflight.base.openmp import WAIT_ASLEEP

_SHIM = """#!{python} -IS
import array, json, os, resource, signal, socket, struct, sys
words = sys.argv[3:] if sys.argv[1:2] == ["-W"] else sys.argv[1:]
if not (words and words[0].endswith(".py") or words[:1] == ["-m"] and words[1] not in {plain!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
zygote = socket.socket(socket.AF_UNIX)
zygote.connect({path!r})
fds = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
    except OSError:
        continue
    if int(name) != zygote.fileno():
        fds.append(int(name))
message = json.dumps({{
    "argv": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "fds": fds,
    "session": os.getsid(0) == os.getpid(), "pid": os.getpid(), "network": os.readlink("/proc/self/ns/net"),
    "limits": {{str(name): resource.getrlimit(name) for name in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}},
}}).encode()
zygote.sendmsg([struct.pack("!I", len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
zygote.sendall(message)
null = os.open("/dev/null", os.O_RDWR)
for fd in fds:
    os.dup2(null, fd) if fd < 3 else os.close(fd)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: zygote.send(bytes([number])))
answer = zygote.recv(4)
if len(answer) < 4:
    os.kill(os.getpid(), signal.SIGKILL)
status = struct.unpack("!i", answer)[0]
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""

INTERPRETER = "INFLIGHT_TESTS_SERVER_PYTHON"
"""Environment variable: the interpreter of what tests start, where it is not their own."""
_NETWORK = "/proc/{}/ns/net"
_TEMPORARY = tempfile.gettempdir()  # now: a test may set another one for its own time
SHARED = "INFLIGHT_TESTS_ZYGOTE"
"""Environment variable: the socket of the zygote that xdist's workers share."""
ROOT = Path(__file__).parents[1]
_PATH = f"{ROOT / 'src'}{os.pathsep}{ROOT}"

_PLAIN = {"inflight.conformance.doomed", "inflight.conformance.transport.peer", "torch.distributed.run"}
"""Programs that get an interpreter of their own: the kit stops its helpers with SIGSTOP."""
_PROGRAMS = ("inflight.run.ranks.rank", "inflight.conformance.child", "tests.conformance.mutants.server")
"""Modules that are imported here and run as programs."""
_MODULES = (
    *_PROGRAMS,
    "inflight.cli",
    "inflight.conformance.endpoint.subject",
    "inflight.conformance.transport",
    "inflight.conformance.worker.subject",
    "inflight.run.run",
    "inflight.run.ranks.rank",
    "inflight.engines.embedded.loading",
    "inflight.http.serving",
    "inflight.weights.receive.following",
    "inflight.weights.transports.file_server",
    "inflight.weights.transports.shared_memory",
    "inflight_fsdp",
    "inflight_fsdp.worker",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
    "tests.campaigns.task",
)
_IF_INSTALLED = ("redis",)
"""Modules that are imported here where the interpreter has them."""


def interpreter() -> str:
    """Return the interpreter of the processes that tests start."""
    return os.environ.get(INTERPRETER, sys.executable)


def write_shim(path: Path, zygote: Path) -> Path:
    """Write the program that stands for an interpreter; it asks the zygote that listens at that socket."""
    path.write_text(_SHIM.format(python=interpreter(), path=str(zygote), plain=_PLAIN))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def zygote(parent: Path, *modules: str) -> Iterator[str]:
    """Start a zygote that has imported the modules, or else everything; yields what stands for ``python``."""
    with _starting_zygote(parent, *modules) as (process, path):
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the zygote did not start: {_end_of_log(path)}")
        yield str(write_shim(_shim_of(path), path))


@contextlib.contextmanager
def _starting_zygote(parent: Path, *modules: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a zygote that listens at the path; it ends on leaving."""
    path = parent / "zygote"
    path.unlink(missing_ok=True)
    with _log_of(path).open("wb") as log:
        process = subprocess.Popen(
            [interpreter(), "-m", "tests.zygote", str(path), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _PATH},
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, path
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30.0)


def _shim_of(zygote: Path) -> Path:
    return zygote.with_suffix(".python")


def _log_of(zygote: Path) -> Path:
    return zygote.with_suffix(".log")


def _end_of_log(zygote: Path) -> str:
    return _log_of(zygote).read_text()[-2000:]


def share_zygote() -> None:
    """Start the zygote that the processes started from here use, without waiting for it; it ends with this process."""
    if os.environ.get("INFLIGHT_TESTS_FORK") == "0":
        return
    open_until_exit, parent = _temporary_until_exit()
    _, path = open_until_exit.enter_context(_starting_zygote(parent))
    write_shim(_shim_of(path), path)
    os.environ[SHARED] = str(path)


@functools.cache
def python() -> str:
    """Return what stands for ``python``: of a shared zygote, or of one that the first call starts for this process."""
    if os.environ.get("INFLIGHT_TESTS_FORK") == "0":
        return interpreter()
    if shared := os.environ.get(SHARED):
        return shared_python(Path(shared))
    open_until_exit, parent = _temporary_until_exit()
    return open_until_exit.enter_context(zygote(parent))


def shared_python(zygote: Path, timeout_s: float = 120.0) -> str:
    """Return what stands for ``python`` once the shared zygote listens."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as asking:
        while asking.connect_ex(str(zygote)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the shared zygote did not start within {timeout_s:g} s: {_end_of_log(zygote)}")
            time.sleep(0.05)
    return str(_shim_of(zygote))


def _temporary_until_exit() -> tuple[contextlib.ExitStack, Path]:
    open_until_exit = contextlib.ExitStack()
    atexit.register(open_until_exit.close)
    made = tempfile.TemporaryDirectory(prefix="inflight-zygote-", dir=_TEMPORARY)
    return open_until_exit, Path(open_until_exit.enter_context(made))


@dataclass(slots=True, eq=False)
class _Child:
    pid: int
    pidfd: int
    shim: socket.socket


def serve(path: Path) -> Callable[[], None] | None:
    """Fork what shims ask for until standard input ends; in the child, return what it is to run."""
    shim = _shim_of(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        print("ready", flush=True)
        poll = select.poll()
        children: dict[int, _Child] = {}
        for fd in (0, listener.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == 0:
                    for child in children.values():
                        os.kill(child.pid, signal.SIGKILL)
                    return None
                if fd == listener.fileno():
                    connection, _ = listener.accept()
                    asked = _asked(connection)
                    if asked is None:
                        connection.close()
                        continue
                    message, fds = asked
                    pid = os.fork()
                    if pid == 0:
                        for open_socket in (listener, connection, *(other.shim for other in children.values())):
                            open_socket.detach()  # they are closed by number
                        _become(message, fds)
                        return lambda: _run(message["argv"], shim)
                    for received in fds:
                        os.close(received)
                    child = _Child(pid, os.pidfd_open(pid), connection)
                    for number in (child.pidfd, connection.fileno()):
                        children[number] = child
                        poll.register(number, select.POLLIN)
                elif fd in children and fd == children[fd].pidfd:
                    child = children.pop(fd)
                    _, status = os.waitpid(child.pid, 0)
                    with contextlib.suppress(OSError):  # the shim was killed
                        child.shim.send(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                    poll.unregister(fd)
                    if children.pop(child.shim.fileno(), None) is not None:
                        poll.unregister(child.shim)
                    child.shim.close()
                    os.close(fd)
                elif fd in children:
                    told = b""
                    with contextlib.suppress(OSError):
                        told = children[fd].shim.recv(16)
                    for number in told or (signal.SIGKILL,):
                        signal.pidfd_send_signal(children[fd].pidfd, number)
                    if not told:
                        poll.unregister(fd)
                        del children[fd]


def _asked(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a shim's message and the descriptors that came with it; None if the shim was killed meanwhile."""
    fds = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(64 * fds.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(head) == 4:
        (size,) = struct.unpack("!I", head)
        body = b""
        while len(body) < size and (piece := connection.recv(size - len(body))):
            body += piece
        if len(body) == size:
            return json.loads(body), list(fds)
    for fd in fds:
        os.close(fd)
    return None


def _become(message: dict[str, Any], received: list[int]) -> None:
    """Take over the shim's descriptors, environment and directory; every other descriptor is closed."""
    if message["session"]:
        os.setsid()
    if message["network"] != os.readlink(_NETWORK.format("self")):
        with open(_NETWORK.format(message["pid"])) as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
                raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
    safe = 1000  # above whatever number the shim had
    for i, fd in enumerate(received):
        os.dup2(fd, safe + i)
    os.closerange(0, safe)
    for i, fd in enumerate(message["fds"]):
        os.dup2(safe + i, fd, inheritable=True)
    os.closerange(safe, safe + len(received))
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["environment"])
    for name, limits in message["limits"].items():
        resource.setrlimit(int(name), limits)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _run(argv: list[str], shim: Path) -> NoReturn:
    """Do as ``python [-W ACTION] (-m MODULE | SCRIPT) ARGUMENTS...`` does, and end as it would, its memory as it is."""
    words = argv[1:]
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    is_module = words[0] == "-m"
    sys.executable = str(shim)
    sys.argv = words[is_module:]
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = [os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0])), *further]
    if further:
        site.execsitecustomize()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    if "INFLIGHT_TESTS_PLOTS" not in os.environ and (figures := sys.modules.get("matplotlib.figure")):
        figures.Figure.savefig = lambda figure, path, **options: path.touch()  # type: ignore[attr-defined]
    status: object = 0
    try:
        if is_module:
            warnings.filterwarnings("ignore", message=r".* found in sys\.modules", category=RuntimeWarning)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls: it joins threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(status or 0))


def main() -> Callable[[], None] | None:
    """Import, then serve."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the campaign
    os.environ.update(
        {
            **WAIT_ASLEEP,  # libgomp reads it once, here, and not in the processes that are forked
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "MPLBACKEND": "Agg",
        }
    )
    for name in sys.argv[2:] or (*_MODULES, *filter(importlib.util.find_spec, _IF_INSTALLED)):
        importlib.import_module(name)
    for name in _PROGRAMS:
        sys.modules.pop(name, None)
    if mapping := sys.modules.get("transformers.conversion_mapping"):
        mapping.get_checkpoint_conversion_mapping("qwen3")  # which the first model of a process makes for all families
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the zygote has {threads} threads, and a fork would lose all but one")
    gc.freeze()
    gc.enable()
    return serve(Path(sys.argv[1]))


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
