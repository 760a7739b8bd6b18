"""Harbor's task folders: what they contain, and why one cannot be run here.

A folder has ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/test.sh``. What ``task.toml`` may contain
beyond that and is not listed here is refused, since it may change what the task needs.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inflight.base.toml import Section, load_settings
from inflight.errors import ConfigError

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_RESERVED = re.compile(r"/(bin|dev|etc|lib|lib32|lib64|logs|proc|root|sbin|sys|tests|tmp|usr)(/|\Z)")
"""Directories that belong to the sandbox itself."""

Positive = Annotated[float, Field(gt=0)]
Megabytes = Annotated[int, Field(ge=64, le=2**20)]
Environ = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class _Table(Section):
    model_config = ConfigDict(strict=True)


class AgentTable(_Table):
    """``[agent]``."""

    timeout_sec: Positive = 600.0


class VerifierTable(_Table):
    """``[verifier]``."""

    timeout_sec: Positive = 600.0
    env: Environ = Field(default_factory=dict)
    environment_mode: str = "shared"
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field(default_factory=list)


class EnvironmentTable(_Table):
    """``[environment]``."""

    docker_image: Annotated[str, Field(pattern=r"^[^-\s]\S*$")] | None = None
    """Does not begin with a hyphen, which would be an option on a command line."""
    build_timeout_sec: Positive | None = None
    cpus: Positive = 1.0
    memory_mb: Megabytes = 2048
    storage_mb: Megabytes = 1024
    gpus: int = 0
    gpu_types: list[str] | None = None
    env: Environ = Field(default_factory=dict)
    allow_internet: bool = False
    healthcheck: dict[str, Any] | None = None
    mcp_servers: list[Any] = Field(default_factory=list)


class TaskFile(_Table):
    """``task.toml``. Each field that is not a table is informative only."""

    version: str | None = None
    schema_version: str | None = None
    source: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """A file, or a folder whose contents are copied, below ``environment/``, and its path in the sandbox."""

    source: str
    target: str
    into: bool
    """Whether the target is a directory, into which a file is copied."""


@dataclass(frozen=True)
class HarborTask:
    """A task folder that can be run, unless the machine has nothing to run it with."""

    folder: Path
    instruction: str
    file: TaskFile
    workdir: str
    """Absolute; of a task with an image the image determines it, and this is unused."""
    copies: tuple[Copy, ...]
    """What the working directory contains when the agent begins. Empty for a task with an image."""

    @property
    def image(self) -> str | None:
        """The image that the task needs; None: a directory and the system's programs are enough."""
        return self.file.environment.docker_image


def read_tasks(path: Path) -> tuple[HarborTask, ...]:
    """Return the task of a folder, or those of the folders in it, by name.

    Raises `ConfigError` that lists every reason against every task, also if there is no task.
    """
    folders = [path] if (path / "task.toml").exists() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"{path} contains no Harbor task: neither it nor a folder in it has a task.toml")
    tasks, problems = [], []
    for folder in folders:
        try:
            tasks.append(read_task(folder))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"{len(problems)} of {len(folders)} Harbor tasks cannot be run: " + "; ".join(problems))
    return tuple(tasks)


def read_task(folder: Path) -> HarborTask:
    """Return the task of a folder. Raises `ConfigError` that lists every reason why it cannot be run."""
    file = load_settings(TaskFile, folder / "task.toml", "Harbor task")
    environment = folder / "environment"
    names = frozenset(entry.name for entry in environment.iterdir()) if environment.is_dir() else frozenset()
    dockerfile = (environment / "Dockerfile").read_text(errors="replace") if "Dockerfile" in names else None
    workdir, copies, problems = _layout(names, None if file.environment.docker_image else dockerfile)
    problems = [*reasons_against(file, names), *([] if file.environment.docker_image else problems)]
    problems += [f"{name} is missing" for name in ("instruction.md", "tests/test.sh") if not (folder / name).is_file()]
    problems += [
        f"environment/Dockerfile copies {copy.source}, which does not exist below environment/"
        for copy in copies
        if not _is_below(environment, environment / copy.source)
    ]
    if problems:
        raise ConfigError(f"{folder}: " + "; ".join(problems))
    return HarborTask(folder.resolve(), (folder / "instruction.md").read_text().strip(), file, workdir, copies)


def reasons_against(file: TaskFile, names: frozenset[str]) -> list[str]:
    """Return each reason why no machine runs such a task here; ``names`` are those of the files in ``environment/``."""
    table, verifier = file.environment, file.verifier
    needs = {
        f"environment.gpus is {table.gpus}: GPUs are not passed to tasks": table.gpus != 0,
        "environment.mcp_servers is set: MCP servers are not started": bool(table.mcp_servers),
        "environment.healthcheck is set: services are not started": table.healthcheck is not None,
        "environment.allow_internet is true: tasks have no network here": table.allow_internet,
        f"verifier.environment_mode is {verifier.environment_mode!r}: the verifier runs in the agent's environment "
        "('shared')": verifier.environment_mode != "shared",
        "verifier.environment is set: the verifier has no environment of its own": verifier.environment is not None,
        "verifier.collect is set: files are not collected": bool(verifier.collect),
    }
    reasons = [reason for reason, applies in needs.items() if applies]
    reasons += [f"environment/{name}: services are not composed" for name in _COMPOSE if name in names]
    for where, env in (("environment.env", table.env), ("verifier.env", verifier.env)):
        reasons += [
            f"{where}.{name} is {value!r}: variables of this machine are not passed to tasks"
            for name, value in env.items()
            if "${" in value
        ]
        reasons += [f"{where}.{name} contains a NUL" for name, value in env.items() if "\0" in value]
    return reasons


def _layout(names: frozenset[str], dockerfile: str | None) -> tuple[str, tuple[Copy, ...], list[str]]:
    """Return the working directory, what is copied into it, and why a Dockerfile cannot be replaced by that.

    Without a Dockerfile, everything in ``environment/`` is copied to ``/app``.
    """
    if dockerfile is None:
        return "/app", (Copy(".", "/app", into=True),) if names else (), []
    workdir, copied, problems = "/", list[tuple[list[str], str]](), list[str]()
    has_image = False
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", dockerfile)).splitlines():
        command, _, rest = line.strip().partition(" ")
        try:
            words = shlex.split(rest)
        except ValueError:
            words = []
        is_plain = not re.search(r"[$*?\[\]]|^\s*--", rest)
        match command.upper():
            case "":
                pass
            case "FROM" if not has_image:
                has_image = True
            case "WORKDIR" if len(words) == 1 and is_plain:
                workdir = posixpath.normpath(posixpath.join(workdir, words[0]))
            case "COPY" if len(words) >= 2 and is_plain:
                target = posixpath.join(workdir, words[-1])
                copied.append((words[:-1], target))
            case _:
                problems.append(
                    f"environment/Dockerfile: {line.strip()[:80]!r} is not executed, since Dockerfiles are not built: "
                    "only one FROM, WORKDIR and plain COPY are understood. Set environment.docker_image to an image"
                )
    if workdir == "/":
        workdir = "/app"
    if _RESERVED.match(workdir):
        problems.append(f"environment/Dockerfile: the working directory {workdir} belongs to the sandbox: use /app")
    copies = []
    for sources, target in copied:
        normal = posixpath.normpath(target)
        if not PurePosixPath(normal).is_relative_to(workdir):
            problems.append(f"environment/Dockerfile: COPY to {normal}, which is outside of {workdir}")
        into = target.endswith(("/", "/.")) or len(sources) > 1 or normal == workdir
        copies += [Copy(posixpath.normpath(source.lstrip("/")), normal, into) for source in sources]
    return workdir, tuple(copies), problems


def _is_below(folder: Path, path: Path) -> bool:
    return path.exists() and path.resolve().is_relative_to(folder.resolve())
