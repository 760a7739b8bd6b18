"""The sandboxes of Harbor tasks: bubblewrap with a directory for the episode, or a Docker or Podman container.

In both, the agent's commands have a file system that lasts for the episode, but no network and no access to ``/tests``
and ``/logs/verifier``. The verifier starts after every process of the agent has ended, and writes its reward to a
directory on the host to which nothing else has had access.

Under bubblewrap, each command runs in a new PID namespace, and all processes in the namespace end with the command. If
the caller is root, commands run as the user nobody, because the kernel does not limit the number of root's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import posixpath
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
"""Time limit, in seconds, for a command that does not belong to the task."""
_INSIDE_ID, _NOBODY = 1000, 65534
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITED = 'ulimit -c 0 -t "$1" -v "$2" -f "$3" -u "$4" -n "$5" && shift 5 && "$@"; exit $?'
"""The script that is process 1 of a sandbox. It does not exec the command, so signals affect the command as usual."""
_REMOVE = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'
_USERS = {"passwd": "agent:x:1000:1000::/root:/bin/bash\nroot:x:0:0::/root:/bin/bash\n", "group": "agent:x:1000:\n"}


@contextlib.asynccontextmanager
async def open_sandbox(task: HarborTask, max_output_bytes: int) -> AsyncIterator[TaskSandbox]:
    """Yield a sandbox with the files of a task; nothing remains of the sandbox after the context has exited.

    One thread does all work on the sandbox's directory, in order. The removal comes last, and cannot be cancelled.
    """
    base = Path(tempfile.mkdtemp(prefix="inflight-harbor-"))
    thread = ThreadPoolExecutor(1)
    sandbox: TaskSandbox
    if task.image is None:
        sandbox = BubblewrapSandbox(task, base, thread, max_output_bytes)
    else:
        sandbox = ContainerSandbox(task, base, thread, max_output_bytes, container_engine(task.image))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        thread.submit(sandbox.remove)
        thread.shutdown(wait=False)
        await asyncio.to_thread(thread.shutdown)


def machine_problem(image: str | None) -> str | None:
    """Return why this machine cannot run a task, or None if it can. ``image`` is None for a task without an image."""
    if image is not None:
        try:
            container_engine(image)
        except ConfigError as error:
            return str(error)
        return None
    if problem := _bubblewrap_problem():
        return f"needs bubblewrap 0.8 or later with unprivileged user namespaces and Linux 5.14 or later: {problem}"
    return None


# ---------------------------------------------------------------------------------------------------------------
# bubblewrap


@dataclass(frozen=True)
class BubblewrapSandbox:
    """A directory on the host for each directory that a task may write to, and a new sandbox for each command."""

    task: HarborTask
    base: Path
    thread: Executor
    max_output_bytes: int

    async def start(self) -> None:
        """Write the files that the agent finds in its directories."""
        await _run_in(self.thread, self._fill)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command of the agent. Raises `TaskError` if the episode's files exceed a limit."""
        _check_command(command)
        return await self._run(["bash", "-c", command], {"home": "/root"}, {}, timeout_s)

    async def verify(self) -> tuple[Path, CommandResult]:
        """Run the tests; return the directory that they wrote to. Raises the same errors as `run`."""
        await _run_in(self.thread, self._prepare)
        binds = {"verifier-home": "/root", "tests": "/tests", "logs": "/logs/verifier"}
        verifier = self.task.file.verifier
        return self.base / "logs", await self._run(
            ["bash", "/tests/test.sh"], binds, verifier.env, verifier.timeout_sec
        )

    def remove(self) -> None:
        """Remove the directory, which may be nested too deeply for Python and may contain parts that its owner cannot
        read.
        """
        _execute("sh", "-c", _REMOVE, "sh", str(self.base))

    def _fill(self) -> None:
        for name, text in _USERS.items():
            (self.base / name).write_text(text)
        for name in ("work", "tmp", "home"):
            (self.base / name).mkdir()
        for source, destination in self.task.copies:
            path = self.task.folder / "environment" / source
            target = self.base / "work" / posixpath.relpath(destination, self.task.workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
                if source == ".":
                    (target / "Dockerfile").unlink(missing_ok=True)
            else:
                shutil.copy2(path, target)
        _give_to_nobody(self.base)

    def _prepare(self) -> None:
        folders = [self.base / name for name in ("logs", "verifier-home", "tests")]
        for folder in folders[:2]:
            folder.mkdir()
        shutil.copytree(self.task.folder / "tests", folders[2], symlinks=True)
        _give_to_nobody(*folders)

    async def _run(
        self, words: Sequence[str], binds: Mapping[str, str], env: Mapping[str, str], timeout_s: float
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
        result = await run_bounded(arguments, timeout_s, self.max_output_bytes, _kill_namespace, self._watch)
        await _run_in(self.thread, self._check_files)
        return result

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            await _run_in(self.thread, self._check_files)

    def _check_files(self) -> None:
        """Raise `TaskError` if the files of the episode exceed a limit, or cannot be measured."""
        storage_mb = self.task.file.environment.storage_mb
        num_files = size_bytes = 0
        for folder, folders, files in os.walk(self.base, onerror=_refuse):
            if folder.count("/") > str(self.base).count("/") + MAX_DEPTH:  # os.walk is recursive
                raise TaskError(f"the task's files are in more than {MAX_DEPTH} nested directories")
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    size_bytes += 512 * os.lstat(os.path.join(folder, name)).st_blocks
            num_files += len(folders) + len(files)
            if num_files > MAX_FILES:
                raise TaskError(f"the task has more than {MAX_FILES} files")
            if size_bytes > storage_mb * 2**20:
                raise TaskError(f"the task's files take more than environment.storage_mb = {storage_mb}")


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise TaskError(f"the task's files cannot be measured: {error.strerror}")


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """Return the first words of every command line: they set up namespaces and show the system's programs read-only."""
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
    """Return why bubblewrap does not run here, or an empty string."""
    missing = [name for name in ("bwrap", "bash", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return _problem_of(*_bubblewrap(), "--", "bash", "-c", "true")


def _problem_of(*words: str) -> str:
    """Run a command for up to `_CONTROL_S` and return why it failed, or an empty string."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_CONTROL_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CONTROL_S:g} s"
    lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
    return lines[-1][-500:] if ended.returncode else ""


def _execute(*words: str) -> None:
    """Run a command that prepares or removes something. A failure is logged."""
    if problem := _problem_of(*words):
        _LOG.warning("%s failed for a Harbor task: %s", words[0], problem)


def _give_to_nobody(*paths: Path) -> None:
    """Change the owner of files to the user that runs the commands, unless that is the caller."""
    if os.geteuid() == 0:
        _execute("chown", "--recursive", "--no-dereference", f"{_NOBODY}:{_NOBODY}", *map(str, paths))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _kill_namespace(pid: int) -> None:
    """Kill process 1 of a sandbox, or bwrap itself before it has started process 1.

    bwrap reaps process 1 after all other processes have ended.
    """
    for found in _children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
        return
    _kill_group(pid)  # and process 1, if it is being started now


# ---------------------------------------------------------------------------------------------------------------
# Docker and Podman


@dataclass(frozen=True)
class ContainerSandbox:
    """A container for the agent and then another one for the verifier, with the files that the agent left."""

    task: HarborTask
    base: Path
    thread: Executor
    max_output_bytes: int
    engine: str

    async def start(self) -> None:
        """Start the agent's container. Raises `TaskError` if the engine refuses it."""
        image = self.task.image or ""
        await self._control(*self._run_words({}), "--detach", "--init", "--entrypoint", "sleep", image, "infinity")

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command of the agent. Raises `TaskError` if the engine fails."""
        _check_command(command)
        result = await self._client(timeout_s, "exec", self._name, "bash", "-c", command)
        if result.exit_code is None:  # the client has ended, but not what it started in the container
            await self._control("restart", "--time", "0", self._name)
        return result

    async def verify(self) -> tuple[Path, CommandResult]:
        """End the agent's container and run the tests; return the directory that they wrote to.

        Raises the same errors as `run`.
        """
        logs, verifier = self.base / "logs", self.task.file.verifier
        await self._control("commit", self._name, self._name)
        await self._control("rm", "--force", self._name)
        await _run_in(self.thread, self._prepare)
        words = [
            *self._run_words(verifier.env),
            f"--volume={self.base}/tests:/tests",
            f"--volume={logs}:/logs/verifier",
        ]
        words += ["--entrypoint", "bash", self._name, "-c", _SHARED_LOGS]
        result = await self._client(verifier.timeout_sec, *words)
        await self._control("rm", "--force", self._name)
        return logs, result

    def remove(self) -> None:
        """Remove the container, the image with the agent's files, and the directory."""
        for words in (["rm", "--force", self._name], ["rmi", "--force", self._name]):
            _execute(self.engine, *words)
        _execute("sh", "-c", _REMOVE, "sh", str(self.base))

    def _prepare(self) -> None:
        (self.base / "logs").mkdir()
        (self.base / "logs").chmod(0o777)
        shutil.copytree(self.task.folder / "tests", self.base / "tests", symlinks=True)

    @property
    def _name(self) -> str:
        """The name of the container and of the image."""
        return self.base.name.lower().replace("_", "-").rstrip("-")

    def _run_words(self, env: Mapping[str, str]) -> list[str]:
        environment = self.task.file.environment
        memory = f"{environment.memory_mb}m"
        words = ["run", "--name", self._name, "--pull", "never", "--network", "none", "--memory", memory]
        words += ["--memory-swap", memory, "--cpus", f"{environment.cpus:g}", "--pids-limit", str(MAX_PROCESSES)]
        words += ["--security-opt", "no-new-privileges", "--ulimit", f"fsize={environment.storage_mb * 2**20}"]
        return [*words, *(f"--env={name}={value}" for name, value in {**environment.env, **env}.items())]

    async def _client(self, timeout_s: float, *words: str) -> CommandResult:
        return await run_bounded([self.engine, *words], timeout_s, self.max_output_bytes, _kill_group)

    async def _control(self, *words: str) -> None:
        result = await self._client(_CONTROL_S, *words)
        if result.exit_code != 0:
            raise TaskError(f"{Path(self.engine).name} {words[0]} failed for {self.task.image}: {result.text()}")


TaskSandbox = BubblewrapSandbox | ContainerSandbox
"""The sandbox in which the commands of one episode run."""

_SHARED_LOGS = 'bash /tests/test.sh; status=$?; chmod -R a+rwX /logs/verifier /tests; exit "$status"'
"""Runs the tests; the caller can then read and remove what they wrote, even if it belongs to the container's root."""


@functools.cache
def container_engine(image: str) -> str:
    """Return the path of the first engine that has an image.

    If none has it, raises a `ConfigError` that states what each engine answered.
    """
    answers = []
    for name in ("docker", "podman"):
        path = shutil.which(name)
        if path is None:
            answers.append(f"{name} is not installed")
            continue
        for words in (["info"], ["image", "inspect", image]):
            if problem := _problem_of(path, *words):
                answers.append(f"`{name} {' '.join(words)}`: {problem}")
                break
        else:
            return path
    raise ConfigError(f"the image {image!r} must already be present in Docker or Podman: {'; '.join(answers)}")


def _check_command(command: object) -> None:
    if not isinstance(command, str) or "\0" in command or len(command.encode()) > _MAX_COMMAND_BYTES:
        raise ValueError(f"the command must be a string without NUL of at most {_MAX_COMMAND_BYTES} bytes")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _run_in(thread: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
