"""A tool that runs a model's Python code in a sandbox.

    tool = PythonTool(timeout_s=5.0)
    result = await tool.run("print(sum(range(10)))")
    result.status, result.text  # ("ok", "45\n")

Every call runs in a new sandbox, which is removed when the call returns or is cancelled. Under ``namespaces``, the code

- sees Python's standard library, the system's shared libraries and four devices, all read-only, and an empty
  directory, ``/tmp``, of ``disk_bytes``; no other file, no ``/proc``, no environment variable of the caller's;
- has no network, not even a loopback interface, and reaches no socket, process or shared memory outside the sandbox;
- is one unprivileged process, limited to ``timeout_s``, ``memory_bytes``, 32 threads and 64 open files, which cannot
  start another process or program.

A refused operation raises the usual exception in the code (`PermissionError`, `OSError`, `MemoryError`), and the
result's text states which limit ended the code. User namespaces, a private root directory, resource limits, dropped
capabilities and a seccomp filter are layers of protection. The code shares the host's kernel: it could still escape
through a kernel bug, and it can observe timing and load. Run code from malicious users in a virtual machine.

``limits`` is for machines without user namespaces, and is NOT a security boundary: the code is an ordinary process of
the caller's user, with limits on time, memory and file sizes and a clean environment. The code can access files,
processes and the network, and can leave processes running.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.abc import Process

from inflight.environments.tools.processes import FLOOD, BoundedOutput, send_all
from inflight.environments.tools.seccomp import seccomp_filter
from inflight.errors import ConfigError, TaskError, UnsupportedError

Isolation = Literal["namespaces", "limits"]
Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]

_SANDBOX = str(Path(__file__).with_name("sandbox.py"))
_START = (  # runs the compiled module that Python keeps next to its source
    "import sys; from importlib.machinery import SourceFileLoader; names = {'__name__': 'sandbox'}; "
    "exec(SourceFileLoader('sandbox', sys.argv[1]).get_code('sandbox'), names); names['main'](sys.argv[2:])"
)
_MIN_MEMORY_BYTES = 64 * 2**20
_GRACE_S = 60.0
"""How long starting and ending a sandbox may take on a busy machine. The sandbox itself enforces ``timeout_s``."""

_ADVICE = (
    "The sandbox needs Linux 5.14 or later with unprivileged user namespaces: sysctl user.max_user_namespaces above 0; "
    "kernel.unprivileged_userns_clone=1 (Debian); kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker, "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined. "
    "PythonTool(isolation='limits') runs code without this protection"
)


@dataclass(frozen=True)
class PythonResult:
    """The result of a run of code.

    ``text`` is for the model: standard output and error in the order in which they were written, shortened to
    ``max_output_bytes`` characters with a note of what was cut, and a last line in brackets if the code did not end
    normally. ``exit_code`` is None if the code was killed.
    """

    status: Status
    text: str
    exit_code: int | None


@dataclass(frozen=True)
class PythonTool:
    """Runs Python code, each call in its own sandbox.

    ``timeout_s`` counts from when the code starts. ``memory_bytes`` is address space and includes the interpreter's own
    30 MB. ``disk_bytes`` limits the size of the scratch directory or, under ``limits``, of each file. The constructor
    raises `UnsupportedError` on systems other than Linux, and `ConfigError` for impossible limits.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 64 * 2**20
    max_output_bytes: int = 10_000
    isolation: Isolation = "namespaces"

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise UnsupportedError(f"PythonTool requires Linux, but this system is {sys.platform}")
        if self.isolation not in ("namespaces", "limits"):
            raise ConfigError(f"isolation is {self.isolation!r}; known: namespaces, limits")
        if self.memory_bytes < _MIN_MEMORY_BYTES:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}; Python needs at least {_MIN_MEMORY_BYTES}")
        for name in ("timeout_s", "disk_bytes", "max_output_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive and finite")

    @property
    def name(self) -> str:
        """The function's name in a tool call."""
        return "python"

    @property
    def description(self) -> str:
        """A description of the tool and its limits, for the model."""
        return (
            f"Runs Python {sys.version_info.major}.{sys.version_info.minor} code as a new program and returns what it "
            "printed. Only the standard library is installed. There is no network. Files can be written in the current "
            f"directory and are gone after the call. Limits: {self.timeout_s:g} s, {_mebibytes(self.memory_bytes)} of "
            "memory, no subprocesses."
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        code = {"type": "string", "description": "The program. Print what you want to see."}
        return {"type": "object", "properties": {"code": code}, "required": ["code"], "additionalProperties": False}

    def definition(self) -> dict[str, Any]:
        """Return the tool as an entry of ``tools`` in an OpenAI chat request."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def run(self, code: object) -> PythonResult:
        """Run the code until it ends or reaches a limit. When this call returns, raises or is cancelled, none of the
        code's processes is left.

        Raises `UnsupportedError` if the machine refuses a part of the isolation, and `TaskError` if the sandbox cannot
        be started or does not end. In either case, the code has not run or has been killed.
        """
        if not isinstance(code, str):  # a model may pass anything
            return PythonResult("error", f"[the code must be a string, not {type(code).__name__}]", None)
        output = BoundedOutput(self.max_output_bytes)
        async with self._sandbox() as (process, report_fd):
            assert process.stdin is not None and process.stdout is not None
            with anyio.move_on_after(self.timeout_s + _GRACE_S) as deadline:
                async with anyio.create_task_group() as group:
                    group.start_soon(send_all, process.stdin, code.encode("utf-8", errors="surrogatepass"))
                    if await output.read(process.stdout):
                        await process.wait()
                    group.cancel_scope.cancel()
            await _end(process)
            report = os.read(report_fd, 4096).decode(errors="replace")
        if deadline.cancelled_caught:
            raise TaskError(f"the Python sandbox did not end within {self.timeout_s + _GRACE_S:g} s and was killed")
        return self._result(report, output)

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[tuple[Process, int]]:
        """Start the sandbox's process, which has ended when the context exits."""
        arguments = [self.timeout_s, self.memory_bytes, self.disk_bytes]
        with contextlib.ExitStack() as stack:
            if self.isolation == "namespaces":
                scratch, confinement = "/tmp", [seccomp_filter().hex(), *_visible_paths()]
            else:
                scratch, confinement = stack.enter_context(tempfile.TemporaryDirectory()), [""]
            report_fd, written_fd = os.pipe()
            stack.callback(os.close, report_fd)
            try:
                head = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, _SANDBOX]
                settings = [self.isolation, scratch, os.getpid(), written_fd, *arguments, *confinement]
                process = await anyio.open_process(
                    [*head, *map(str, settings)],
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    start_new_session=True,
                    pass_fds=(written_fd,),
                )
            except OSError as error:
                raise TaskError(f"the Python sandbox cannot be started: {error}") from error
            finally:
                os.close(written_fd)
            try:
                yield process, report_fd
            finally:
                await _end(process)
                with anyio.CancelScope(shield=True):
                    await process.aclose()

    def _result(self, report: str, output: BoundedOutput) -> PythonResult:
        """Translate the sandbox's report. Raises `UnsupportedError` or `TaskError` if the code did not run."""
        lines = report.splitlines()
        what, _, value = lines[-1].partition(" ") if lines else ("", "", "")
        text = output.text()
        if "started" not in lines:
            if what == "failed" and self.isolation == "namespaces":
                raise UnsupportedError(f"the Python sandbox cannot be set up: {value}. {_ADVICE}")
            raise TaskError(f"the Python sandbox ended before the code ran: {value or text or 'it was killed'}")
        status: Status = "killed"
        exit_code, note = None, ""
        if output.is_flood:
            status, note = "output", f"the code was ended: it wrote more than {FLOOD * self.max_output_bytes} bytes"
        elif what == "exit":
            exit_code = int(value)
            status = "ok" if exit_code == 0 else "error"
            note = f"exit status {exit_code}" if exit_code else "" if text else "no output"
        elif what == "memory":
            status, note = "memory", f"memory limit of {_mebibytes(self.memory_bytes)}"
        elif what == "timeout" or (what == "signal" and int(value) == signal.SIGXCPU):
            status, note = "timeout", f"the code was ended after {self.timeout_s:g} s"
        elif what == "signal":
            note = f"the code was ended by {signal.Signals(int(value)).name}"
        else:
            note = "the code was ended"
        if note:
            text += f"{'' if not text or text.endswith(chr(10)) else chr(10)}[{note}]"
        return PythonResult(status, text, exit_code)


async def _end(process: Process) -> None:
    """Make the sandbox kill its processes and end, whether or not the caller is cancelled."""
    with anyio.CancelScope(shield=True):
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number) if number == signal.SIGTERM else os.killpg(process.pid, number)
            with anyio.move_on_after(_GRACE_S / 4):
                assert process.stdout is not None
                async for _ in process.stdout:  # asyncio sees the end of a process only when its output is read
                    pass
                await process.wait()


@functools.cache
def _visible_paths() -> tuple[str, ...]:
    """Return the paths that the code can read: the standard library, shared libraries, time zones and devices."""
    own = [
        f"{prefix}/{folder}" for prefix in (sys.base_prefix, sys.base_exec_prefix) for folder in ("lib", sys.platlibdir)
    ]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    found: list[str] = []
    for path in sorted({os.path.abspath(path) for path in (*own, *system, *devices)}):
        if os.path.exists(path) and not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return tuple(found)


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:g} MiB"
