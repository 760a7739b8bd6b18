"""The process that isolates itself and runs code; `inflight.environments.tools.python_tool` starts one for every call.

It starts as a separate program, without the packages of the environment, and so imports nothing from inflight. It reads
the code from standard input, and the code writes to its standard output and error. If the code has not run, the report
on ``report_fd`` is one line, ``failed`` or ``busy`` with the reason; otherwise it is ``started``, followed by a line
that states how the code ended. Under ``isolation="namespaces"``, three processes share the work:

- The launcher runs in the caller's namespaces. It starts init and maps its user, and runs no untrusted code.
- Init is process 1 of its own user, process, mount, network, IPC and host name namespaces, in its own root. It drops
  every privilege before the worker starts. When init ends, so does every process of the namespace.
- The worker is forked from init. It sets its limits and its system call filter, then runs the code.

Under ``isolation="limits"``, the launcher forks the worker itself, and the worker is subject only to limits.

If a step fails, it is reported and the code does not run. Requires Linux 5.14 or later.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
import time
from _signal import (  # type: ignore[import-not-found]  # `signal` converts them to enums, which takes milliseconds
    SIG_BLOCK,
    SIG_DFL,
    SIG_SETMASK,
    SIGCHLD,
    SIGINT,
    SIGKILL,
    SIGTERM,
    pthread_sigmask,
    signal,
    sigtimedwait,
    sigwaitinfo,
)
from _thread import stack_size
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

OUT_OF_MEMORY = 117
"""The worker's exit status when the code ends with a MemoryError. Code that exits with this status is reported the same
way.
"""

SCRATCH = "/tmp"
MAX_FILES = 4096
MAX_OPEN_FILES = 64
MAX_THREADS = 32
THREAD_STACK_BYTES = 2 * 2**20

INSIDE_ID = 1000
NOBODY = 65534

NEW_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
ATTR_READ_ONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 38, 36
SECCOMP_MODE_FILTER = 2
M_ARENA_MAX = -8
SYS_MOUNT_SETATTR = 442
SYS_CLONE, SYS_PIVOT_ROOT, SYS_CAPSET = (220, 41, 91) if os.uname().machine == "aarch64" else (56, 155, 126)

_libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock, as a call that forks must


def _check(step: str, result: int) -> int:
    """Return a C function's result. Raises an `OSError` whose message names the step if the function failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
    return result


def _prctl(step: str, option: int, *arguments: object) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _check(step, _libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(f"mount {kind or source} at {target}", result)


def _make_read_only(path: str, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY | ATTR_NOSUID | (0 if path.startswith("/dev/") else ATTR_NODEV))
    flags = AT_RECURSIVE if recursive else 0
    result = _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(32))
    _check(f"mount_setattr {path}", result)


def main(arguments: list[str]) -> None:
    """Run the code on standard input and report on ``report_fd`` how it ended. Does not return."""
    isolation, scratch, parent, report, timeout_s, memory, disk, filter_hex, *paths = arguments
    pthread_sigmask(SIG_BLOCK, {SIGCHLD, SIGTERM})
    signal(SIGINT, SIG_DFL)
    report_fd = int(report)
    limits = (float(timeout_s), int(memory), int(disk))
    try:
        if isolation == "limits":
            _prctl("prctl PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, 1)
            line = _supervise(lambda: _work(report_fd, scratch, *limits, b""), limits[0], {SIGCHLD, SIGTERM})
            _kill_adopted()
        else:
            _prctl("prctl", PR_SET_PDEATHSIG, SIGKILL)
            if os.getppid() != int(parent):
                return
            line = _in_namespaces(report_fd, *limits, bytes.fromhex(filter_hex), paths)
    except OSError as error:
        line = _failure(error)
    if line:
        os.write(report_fd, f"{line}\n".encode())
    os._exit(0)  # a regular exit of the interpreter takes milliseconds


def _failure(error: OSError) -> str:
    """Return the line that reports a failed step, as temporary or permanent."""
    now = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    return f"{'busy' if error.errno in now else 'failed'} {error}"


# ---------------------------------------------------------------------------------------------------------------
# The launcher


def _in_namespaces(report_fd: int, timeout_s: float, memory: int, disk: int, filters: bytes, paths: list[str]) -> str:
    """Start init in its own namespaces and wait until it ends; return the line to report if it was killed."""
    maps = {name: _id_map(name, own) for name, own in (("uid", os.geteuid()), ("gid", os.getegid()))}
    sources = [(path, os.path.realpath(path)) for path in paths]
    ready, go = os.pipe()
    init = _clone()
    if init == 0:
        os.close(go)
        if os.read(ready, 1):  # nothing if the launcher has died
            _init(report_fd, timeout_s, memory, disk, filters, sources)
        os._exit(0)
    try:
        for name, text in maps.items():
            if name == "gid" and text.count("\n") == 1:
                _write(f"/proc/{init}/setgroups", "deny")
            _write(f"/proc/{init}/{name}_map", text)
    except OSError:
        os.kill(init, SIGKILL)
        raise
    os.write(go, b"1")
    while True:
        pid, status = os.waitpid(init, os.WNOHANG)
        if pid:
            return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        if sigwaitinfo({SIGCHLD, SIGTERM}).si_signo == SIGTERM:
            os.kill(init, SIGKILL)  # waitpid returns once all processes of its namespace are gone


def _clone() -> int:
    """Fork into new namespaces; return what ``os.fork`` returns."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(SYS_CLONE, ctypes.c_ulong(NEW_NAMESPACES | SIGCHLD), None, None, None, None)
    ctypes.pythonapi.PyOS_AfterFork_Child() if pid == 0 else ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check("clone into new namespaces", pid)


def _id_map(name: str, own: int) -> str:
    """Return the map from ids inside the sandbox to ids outside.

    If the caller is root, the code runs as nobody: root is exempt from the limit on threads, and owns most files. If
    the caller's user namespace does not contain nobody, as in some rootless containers, the code runs as the caller.
    """
    with open(f"/proc/self/{name}_map") as file:
        ranges = [(int(line.split()[0]), int(line.split()[2])) for line in file]
    if os.geteuid() == 0 and any(first <= NOBODY < first + count for first, count in ranges):
        return f"0 {own} 1\n{INSIDE_ID} {NOBODY} 1\n"
    return f"{INSIDE_ID} {own} 1\n"


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------------------
# Process 1


def _init(
    report_fd: int, timeout_s: float, memory: int, disk: int, filters: bytes, sources: list[tuple[str, str]]
) -> None:
    """Isolate this process, drop its privileges, run the worker and report how it ended."""
    try:
        os.umask(0o022)
        _enter_root(sources, disk)
        _check("sethostname", _libc.sethostname(b"sandbox", 7))
        if os.getuid() != INSIDE_ID:
            os.setgroups([])
            os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
            os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        _prctl("prctl PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, SIGKILL)  # after the change of user, which resets it
        _prctl("prctl PR_SET_DUMPABLE", PR_SET_DUMPABLE, 0)
        _prctl("prctl PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _check("capset", _libc.syscall(SYS_CAPSET, header, none))
        line = _supervise(lambda: _work(report_fd, SCRATCH, timeout_s, memory, disk, filters), timeout_s, {SIGCHLD})
    except OSError as error:
        line = _failure(error)
    os.write(report_fd, f"{line}\n".encode())


def _enter_root(sources: list[tuple[str, str]], disk: int) -> None:
    """Enter a new root directory: the sources and some devices, all read-only, and an empty scratch directory."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.mkdir("/tmp/.outside")
    _check("pivot_root", _libc.syscall(SYS_PIVOT_ROOT, b"/tmp", b"/tmp/.outside"))
    os.chdir("/")
    os.mkdir(SCRATCH)
    options = f"size={disk},nr_inodes={MAX_FILES},mode=1777"
    _mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    for path, source in sources:
        if os.path.isdir(f"/.outside{source}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        _mount(f"/.outside{source}", path, None, MS_BIND | MS_REC)
        _make_read_only(path, recursive=True)
    os.symlink(SCRATCH, "/dev/shm")
    _check("umount of the outer root", _libc.umount2(b"/.outside", MNT_DETACH))
    os.rmdir("/.outside")
    _make_read_only("/", recursive=False)


def _supervise(work: Callable[[], None], timeout_s: float, wake_on: set[int]) -> str:
    """Run the worker in a child until it ends, its time is up or SIGTERM wakes this process; return how it ended.

    The worker's process group is killed. In process 1, SIGTERM can come only from the code, so it is not in
    ``wake_on``.
    """
    worker = os.fork()
    if worker == 0:
        work()
    deadline = time.monotonic() + timeout_s
    line = ""
    while not line:
        ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        remaining_s = deadline - time.monotonic()
        if ended is not None:
            line = f"{'exit' if ended.si_code == os.CLD_EXITED else 'signal'} {ended.si_status}"
            line = "memory" if line == f"exit {OUT_OF_MEMORY}" else line
        elif remaining_s <= 0:
            line = "timeout"
        else:
            found = sigtimedwait(wake_on, remaining_s)
            line = "cancelled" if found is not None and found.si_signo == SIGTERM else ""
    os.kill(worker, SIGKILL)
    if os.getpgid(worker) == worker:  # not while it is starting
        os.killpg(worker, SIGKILL)
    os.waitpid(worker, 0)
    return line


def _kill_adopted() -> None:
    """Kill the worker's remaining processes in other process groups; this process adopted those whose parent ended."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)


# ---------------------------------------------------------------------------------------------------------------
# The worker


def _work(report_fd: int, scratch: str, timeout_s: float, memory: int, disk: int, filters: bytes) -> None:
    """Set the limits of this process, close what it inherited, and run the code. Does not return."""
    try:
        os.setsid()
        _prctl("prctl PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, SIGKILL)
        os.chdir(scratch)
        _libc.mallopt(M_ARENA_MAX, 1)  # otherwise, every thread takes 64 MiB of address space for its allocations
        stack_size(THREAD_STACK_BYTES)
        _set_limits(timeout_s, memory, disk, confined=bool(filters))
        if filters:
            _install(filters)
        pthread_sigmask(SIG_SETMASK, ())
        os.write(report_fd, b"started\n")
    except OSError as error:
        os.write(report_fd, f"{_failure(error)}\n".encode())
        os._exit(1)
    os.closerange(3, 1 << 20)
    _run_code(scratch)


def _set_limits(timeout_s: float, memory: int, disk: int, confined: bool) -> None:
    limits = {"AS": memory, "CPU": int(timeout_s) + 1, "FSIZE": disk, "NOFILE": MAX_OPEN_FILES, "CORE": 0, "MEMLOCK": 0}
    if confined:  # otherwise the limit on processes would count all of the user's processes
        limits |= {"NPROC": MAX_THREADS + 2, "MSGQUEUE": 0, "RTPRIO": 0, "NICE": 0, "SIGPENDING": 64}
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = limit + 1 if name == "CPU" else limit  # the first limit of CPU time sends SIGXCPU, the second SIGKILL
        inherited = resource.getrlimit(kind)[1]
        if inherited != resource.RLIM_INFINITY:
            limit, hard = min(limit, inherited), min(hard, inherited)
        resource.setrlimit(kind, (limit, hard))


def _install(filters: bytes) -> None:
    class SandboxedProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    program = SandboxedProgram(len(filters) // 8, filters)
    _prctl("prctl PR_SET_SECCOMP", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def _run_code(scratch: str) -> None:
    """Run the code on standard input as the program ``main.py``. Does not return."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    os.environ.clear()
    os.environ |= {"HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"}
    path = f"{scratch}/main.py"
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update(__file__=path, exit=sys.exit, quit=sys.exit)
    sys.argv = [path]
    try:
        source = sys.stdin.buffer.read()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            with open(path, "wb") as file:  # tracebacks quote it
                file.write(source)
        except OSError:
            pass
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        own = error.__traceback__
        theirs = own.tb_next if own is not None else None
        try:
            sys.excepthook(type(error), error.with_traceback(theirs), theirs)
        finally:
            sys.exit(OUT_OF_MEMORY if isinstance(error, MemoryError) else 1)
    sys.exit(0)
