"""Where a Harbor task runs: bubblewrap with a directory of the episode, or a container of Docker or Podman.

Both give the agent's commands a file system that lasts for the episode, no network, and neither ``/tests`` nor
``/logs/verifier``. The verifier starts after every process of the agent has ended, and writes its reward to a directory
of the host that nothing else has had access to.

Under bubblewrap each command is process 1 of a new process namespace, whose end ends all other processes in it. Where
the caller is root, commands run as nobody, since the kernel does not limit the number of root's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import posixpath
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from inflight.environments.adapters.harbor_tasks import HarborTask
from inflight.environments.tools.processes import CommandResult, run_bounded
from inflight.errors import ConfigError, TaskError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

MAX_PROCESSES = 128
MAX_FILES = 20_000
MAX_DEPTH = 64
_MAX_OPEN_FILES = 1024
_MAX_COMMAND_BYTES = 100_000
_WATCH_S = 1.0
_CONTROL_S = 60.0
"""How long a command of the container engine may take that does not run the task's own."""
_INSIDE_ID, _NOBODY = 1000, 65534
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITED = 'ulimit -c 0 -t "$1" -v "$2" -f "$3" -u "$4" -n "$5" && shift 5 && "$@"; exit $?'
"""Process 1. It does not replace itself with the command, in which signals then have their usual effect."""
_USERS = {"passwd": "agent:x:1000:1000::/root:/bin/bash\nroot:x:0:0::/root:/bin/bash\n", "group": "agent:x:1000:\n"}


class TaskSandbox(Protocol):
    """Where the commands of one episode run."""

    async def run(self, command: str, timeout_s: float, max_output_bytes: int) -> CommandResult:
        """Run a command of the agent. Raises `TaskError` if the sandbox fails or its files exceed a limit."""

    async def verify(self, max_output_bytes: int) -> tuple[Path, CommandResult]:
        """End everything of the agent and run the tests; return the directory that they wrote to. Raises as `run`."""


@contextlib.asynccontextmanager
async def open_sandbox(task: HarborTask) -> AsyncIterator[TaskSandbox]:
    """Yield a sandbox with the files of a task; nothing of it is left when the context has been left.

    One thread does all work on the sandbox's directory, in order. Its removal is the last, and is not cancelled.
    """
    base = Path(tempfile.mkdtemp(prefix="inflight-harbor-"))
    thread = ThreadPoolExecutor(1)
    sandbox: BubblewrapSandbox | ContainerSandbox
    if task.image is None:
        sandbox = BubblewrapSandbox(task, base, thread)
    else:
        engine, name = container_engine(task.image), f"inflight-harbor-{secrets.token_hex(8)}"
        sandbox = ContainerSandbox(task, base, thread, engine, name)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        thread.submit(sandbox.remove)
        thread.submit(_remove, base)
        thread.shutdown(wait=False)
        await asyncio.to_thread(thread.shutdown)


def check_machine(task: HarborTask) -> None:
    """Raise `ConfigError` that states why this machine cannot run a task."""
    if task.image is not None:
        container_engine(task.image)
        return
    problem = _bubblewrap_problem()
    if problem:
        raise ConfigError(
            f"{task.folder} needs bubblewrap 0.8 or later with unprivileged user namespaces and Linux 5.14 or later: "
            f"{problem}"
        )


# ---------------------------------------------------------------------------------------------------------------
# bubblewrap


@dataclass(frozen=True)
class BubblewrapSandbox(TaskSandbox):
    """A directory of the host for each directory that a task may write to, and a new sandbox for each command."""

    task: HarborTask
    base: Path
    thread: Executor

    async def start(self) -> None:
        """Write what the agent finds in its directories."""
        await _in(self.thread, self._fill)

    def remove(self) -> None:
        """Do nothing: there is only the directory."""

    async def run(self, command: str, timeout_s: float, max_output_bytes: int) -> CommandResult:
        _check_command(command)
        return await self._run(["bash", "-c", command], {"home": "/root"}, {}, timeout_s, max_output_bytes)

    async def verify(self, max_output_bytes: int) -> tuple[Path, CommandResult]:
        await _in(self.thread, self._prepare)
        binds = {"verifier-home": "/root", "tests": "/tests", "logs": "/logs/verifier"}
        verifier = self.task.file.verifier
        words = ["bash", "/tests/test.sh"]
        result = await self._run(words, binds, verifier.env, verifier.timeout_sec, max_output_bytes)
        return self.base / "logs", result

    def _fill(self) -> None:
        for name, text in _USERS.items():
            (self.base / name).write_text(text)
            (self.base / name).chmod(0o644)
        for name in ("work", "tmp", "home"):
            (self.base / name).mkdir()
        for copy in self.task.copies:
            source = self.task.folder / "environment" / copy.source
            target = self.base / "work" / posixpath.relpath(copy.target, self.task.workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
                if copy.source == ".":
                    (target / "Dockerfile").unlink(missing_ok=True)
            else:
                shutil.copy2(source, target / source.name if copy.into or target.is_dir() else target)
        _give_to_nobody(self.base)

    def _prepare(self) -> None:
        for name in ("logs", "verifier-home"):
            (self.base / name).mkdir()
        shutil.copytree(self.task.folder / "tests", self.base / "tests", symlinks=True)
        _give_to_nobody(*(self.base / name for name in ("logs", "verifier-home", "tests")))

    async def _run(
        self,
        words: Sequence[str],
        binds: Mapping[str, str],
        env: Mapping[str, str],
        timeout_s: float,
        max_output_bytes: int,
    ) -> CommandResult:
        environment = self.task.file.environment
        variables = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **environment.env, **env}
        arguments = [*_bubblewrap(), "--clearenv"]
        for name, value in variables.items():
            arguments += ["--setenv", name, value]
        for name, target in {"work": self.task.workdir, "tmp": "/tmp", **binds}.items():
            arguments += ["--bind", str(self.base / name), target]
        for name in _USERS:
            arguments += ["--ro-bind", str(self.base / name), f"/etc/{name}"]
        kibibytes = [1024 * environment.memory_mb, 1024 * environment.storage_mb]
        limits = [int(timeout_s) + 1, *kibibytes, MAX_PROCESSES, _MAX_OPEN_FILES]
        arguments += ["--remount-ro", "/", "--chdir", self.task.workdir, "--"]
        arguments += ["bash", "-c", _LIMITED, "bash", *map(str, limits), *words]
        result = await run_bounded(
            arguments,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            kill=_kill_namespace,
            watch=self._watch,
        )
        await self._check_files()
        return result

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._check_files()

    async def _check_files(self) -> None:
        """Raise `TaskError` if the files of the episode exceed a limit."""
        if problem := await _in(self.thread, self._problem):
            raise TaskError(problem)

    def _problem(self) -> str:
        """Return which limit the files of the episode exceed, or an empty text."""
        storage_mb = self.task.file.environment.storage_mb
        num_files = size_bytes = 0
        folders = [(self.base, 0)]
        while folders:
            folder, depth = folders.pop()
            if depth > MAX_DEPTH:
                return f"the task's files are in more than {MAX_DEPTH} levels of directories"
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        num_files += 1
                        if num_files > MAX_FILES:
                            return f"the task has more than {MAX_FILES} files"
                        with contextlib.suppress(FileNotFoundError):
                            size_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                            if entry.is_dir(follow_symlinks=False):
                                folders.append((Path(entry.path), depth + 1))
            except FileNotFoundError:
                continue
            except OSError as error:
                return f"the task's files cannot be measured: {error.strerror}"
        if size_bytes > storage_mb * 2**20:
            return f"the task's files take more than environment.storage_mb = {storage_mb}"
        return ""


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """Return the beginning of every command line: namespaces, and the system's programs, read-only."""
    drop = ["setpriv", "--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups", "--"]
    words = [
        *(drop if os.geteuid() == 0 else ()),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent"),
        *("--cap-drop", "ALL", "--uid", str(_INSIDE_ID), "--gid", str(_INSIDE_ID)),
        *("--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev", "--size", str(64 * 2**20)),
        *("--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--ro-bind", "/usr", "/usr"),
    ]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs"):
        words += ["--ro-bind-try", name, name]
    return tuple(words)


@functools.cache
def _bubblewrap_problem() -> str:
    """Return why bubblewrap does not run here, or an empty text."""
    missing = [name for name in ("bwrap", "bash", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    probe = subprocess.run([*_bubblewrap(), "--", "bash", "-c", "true"], capture_output=True, timeout=_CONTROL_S)
    return probe.stderr.decode(errors="replace").strip() if probe.returncode else ""


def _remove(base: Path) -> None:
    """Remove a directory; it may be too deep for Python, and have parts that its owner may not read."""
    script = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'
    _logged(["sh", "-c", script, "sh", str(base)])


def _logged(words: Sequence[str]) -> None:
    """Run a command that removes something; its failure is logged, since the episode is over."""
    ended = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if ended.returncode != 0:
        _LOG.warning("%s failed at the end of a Harbor task: %s", shlex.join(words), ended.stderr.strip()[-500:])


def _give_to_nobody(*paths: Path) -> None:
    """Make files belong to the user whom commands run as, where that is not the caller."""
    if os.geteuid() != 0:
        return
    for path in paths:
        for folder, _, files in os.walk(path):
            for name in (folder, *(os.path.join(folder, file) for file in files)):
                os.chown(name, _NOBODY, _NOBODY, follow_symlinks=False)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _kill_namespace(pid: int) -> None:
    """Kill process 1 of a sandbox, which bwrap reaps after all others in it have ended, or bwrap while it has none."""
    for found in _children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
        return
    _kill_group(pid)  # and process 1, if it is being started now


# ---------------------------------------------------------------------------------------------------------------
# Docker and Podman


@dataclass(frozen=True)
class ContainerSandbox(TaskSandbox):
    """A container for the agent, and after its end one for the verifier, with the files that the agent left."""

    task: HarborTask
    base: Path
    thread: Executor
    engine: str
    name: str

    async def start(self) -> None:
        """Start the agent's container. Raises `TaskError` if the engine refuses it."""
        await self._control(*self._run_words(), "--detach", "--init", "--entrypoint", "sleep", self._image, "infinity")

    async def run(self, command: str, timeout_s: float, max_output_bytes: int) -> CommandResult:
        _check_command(command)
        words = [self.engine, "exec", self.name, "bash", "-c", command]
        result = await run_bounded(words, timeout_s=timeout_s, max_output_bytes=max_output_bytes, kill=_kill_group)
        if result.exit_code is None:  # the client has ended, but not what it started in the container
            await self._control("restart", "--time", "0", self.name)
        return result

    async def verify(self, max_output_bytes: int) -> tuple[Path, CommandResult]:
        logs, verifier = self.base / "logs", self.task.file.verifier
        await self._control("commit", self.name, self.name)
        await self._control("rm", "--force", self.name)
        await _in(self.thread, self._prepare)
        words = [self.engine, *self._run_words(verifier.env)]
        words += [f"--volume={self.base / 'tests'}:/tests", f"--volume={logs}:/logs/verifier"]
        words += ["--entrypoint", "bash", self.name, "-c", _SHARED_LOGS]
        timeout_s = verifier.timeout_sec
        result = await run_bounded(words, timeout_s=timeout_s, max_output_bytes=max_output_bytes, kill=_kill_group)
        await self._control("rm", "--force", self.name)
        return logs, result

    def _prepare(self) -> None:
        (self.base / "logs").mkdir()
        (self.base / "logs").chmod(0o777)
        shutil.copytree(self.task.folder / "tests", self.base / "tests", symlinks=True)

    def remove(self) -> None:
        """Remove the container and the image of what the agent left, whether or not there are any."""
        for words in (["rm", "--force", self.name], ["rmi", "--force", self.name]):
            _logged([self.engine, *words])

    @property
    def _image(self) -> str:
        return self.task.image or ""

    def _run_words(self, env: Mapping[str, str] | None = None) -> list[str]:
        environment = self.task.file.environment
        memory = f"{environment.memory_mb}m"
        words = ["run", "--name", self.name, "--pull", "never", "--network", "none", "--memory", memory]
        words += ["--memory-swap", memory, "--cpus", f"{environment.cpus:g}", "--pids-limit", str(MAX_PROCESSES)]
        words += ["--security-opt", "no-new-privileges", "--ulimit", f"fsize={environment.storage_mb * 2**20}"]
        return [*words, *(f"--env={name}={value}" for name, value in (environment.env | (dict(env or {}))).items())]

    async def _control(self, *words: str) -> None:
        result = await run_bounded([self.engine, *words], timeout_s=_CONTROL_S, max_output_bytes=2000, kill=_kill_group)
        if result.exit_code != 0:
            raise TaskError(f"{Path(self.engine).name} {words[0]} failed for {self._image}: {result.text()}")


_SHARED_LOGS = 'bash /tests/test.sh; status=$?; chmod -R a+rwX /logs/verifier /tests; exit "$status"'
"""Runs the tests; the caller can then read and remove what they wrote, even if it belongs to the container's root."""


@functools.cache
def container_engine(image: str) -> str:
    """Return the path of the first engine that has an image. Raises `ConfigError` with what each one answered."""
    answers = []
    for name in ("docker", "podman"):
        path = shutil.which(name)
        if path is None:
            answers.append(f"{name} is not installed")
            continue
        for words in (["info"], ["image", "inspect", image]):
            asked = subprocess.run([path, *words], capture_output=True, timeout=_CONTROL_S)
            if asked.returncode != 0:
                lines = asked.stderr.decode(errors="replace").strip().splitlines()
                answers.append(f"`{name} {' '.join(words)}`: {lines[-1] if lines else 'failed'}")
                break
        else:
            return path
    raise ConfigError(f"the image {image!r} needs Docker or Podman, which must have it already: {'; '.join(answers)}")


def _check_command(command: object) -> None:
    if not isinstance(command, str) or "\0" in command or len(command.encode()) > _MAX_COMMAND_BYTES:
        raise ValueError(f"the command must be a text without NUL of at most {_MAX_COMMAND_BYTES} bytes")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _in(thread: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
