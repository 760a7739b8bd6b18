"""Harbor's task folders: their contents, and the reasons why a task cannot be run here.

A folder has ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/test.sh``. Any key of ``task.toml`` that is
not defined below is refused, because it may change what the task needs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inflight.base.toml import Section, load_settings
from inflight.errors import ConfigError

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_RESERVED = re.compile(r"/(bin|dev|etc|lib|lib32|lib64|logs|proc|root|sbin|sys|tests|tmp|usr)(/|\Z)")
"""The directories that belong to the sandbox itself."""

_PLAIN = re.compile(r"(?!\s*\w+\s+--)[^$*?\[\]\"'\\]*")
"""Matches a Dockerfile line without options, variables, patterns and quotes."""
_REFUSED = {
    ("environment", "gpus"): "GPUs are not passed to tasks",
    ("environment", "mcp_servers"): "MCP servers are not started",
    ("environment", "healthcheck"): "services are not started",
    ("environment", "allow_internet"): "tasks have no network here",
    ("verifier", "environment_mode"): "the verifier runs in the agent's environment ('shared')",
    ("verifier", "environment"): "the verifier has no environment of its own",
    ("verifier", "collect"): "files are not collected",
}

MachineProblem = Callable[[str | None], str | None]
"""Returns why this machine cannot run a task that needs an image (None: no image), or None if it can run the task."""
Positive = Annotated[float, Field(gt=0)]
Megabytes = Annotated[int, Field(ge=64, le=2**20)]
Environ = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class _Table(Section):
    model_config = ConfigDict(strict=True)


class AgentTable(_Table):
    """The table ``[agent]``."""

    timeout_sec: Positive = 600.0


class VerifierTable(_Table):
    """The table ``[verifier]``."""

    timeout_sec: Positive = 600.0
    env: Environ = Field(default_factory=dict)
    environment_mode: str = "shared"
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field(default_factory=list)


class EnvironmentTable(_Table):
    """The table ``[environment]``."""

    docker_image: Annotated[str, Field(pattern=r"^[^-\s]\S*$")] | None = None
    """The name may not begin with a hyphen, because it would be an option on a command line."""
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
    """The contents of ``task.toml``. Fields that are not tables are only informative."""

    version: str | None = None
    schema_version: str | None = None
    source: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class HarborTask:
    """A task folder that can be run, provided that the machine has what it needs."""

    folder: Path
    instruction: str
    file: TaskFile
    workdir: str
    """The absolute path of the working directory. Unused for a task with an image, which specifies its own."""
    copies: tuple[tuple[str, str], ...]
    """Paths below ``environment/``, and where their contents are in the sandbox when the agent begins."""

    @property
    def image(self) -> str | None:
        """The image that the task needs; None if a directory and the system's programs suffice."""
        return self.file.environment.docker_image


def read_tasks(path: Path, machine_problem: MachineProblem = lambda image: None) -> tuple[HarborTask, ...]:
    """Return the task in a folder, or the tasks in its subfolders in order of their names.

    Raises `ConfigError` if there are no tasks, or if some cannot be run: the message lists every reason for each task,
    one per line.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: set the parameter tasks to a Harbor task folder, or to a folder of them"
        )
    folders = [path] if (path / "task.toml").exists() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"{path} contains no Harbor task: neither it nor a folder in it has a task.toml")
    tasks, problems = [], []
    for folder in folders:
        try:
            tasks.append(read_task(folder, machine_problem))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"{len(problems)} of {len(folders)} Harbor tasks cannot be run:\n" + "\n".join(problems))
    return tuple(tasks)


def read_task(folder: Path, machine_problem: MachineProblem = lambda image: None) -> HarborTask:
    """Return the task in a folder. Raises a `ConfigError` that lists every reason why it cannot be run."""
    file = load_settings(TaskFile, folder / "task.toml", "Harbor task")
    environment = folder / "environment"
    problems = reasons_against(file)
    if reason := machine_problem(file.environment.docker_image):
        problems.append(reason)
    composed = [name for name in _COMPOSE if (environment / name).exists()]
    problems += [f"environment/{name}: Docker Compose is not supported" for name in composed]
    problems += [f"{name} is missing" for name in ("instruction.md", "tests/test.sh") if not (folder / name).is_file()]
    workdir, copies = "/app", [(".", "/app")] if environment.is_dir() else []
    if file.environment.docker_image is None and (environment / "Dockerfile").is_file():
        workdir, copies, reasons = _read_dockerfile(environment)
        problems += [f"environment/Dockerfile: {reason}" for reason in reasons]
    if problems:
        raise ConfigError("\n".join(f"{folder}: {problem}" for problem in problems))
    instruction = (folder / "instruction.md").read_text(encoding="utf-8", errors="replace").strip()
    return HarborTask(folder.resolve(), instruction, file, workdir, tuple(copies))


def reasons_against(file: TaskFile) -> list[str]:
    """Return every reason, apart from the machine, why a task with this file cannot be run."""
    reasons = []
    for (table, key), why in _REFUSED.items():
        value = getattr(getattr(file, table), key)
        if value and value != "shared":
            reasons.append(f"{table}.{key} is {value!r}: {why}")
    for table, env in (("environment", file.environment.env), ("verifier", file.verifier.env)):
        reasons += [
            f"{table}.env.{name} is {value!r}: write the value itself, without NUL, because variables of this "
            "machine are not passed to tasks"
            for name, value in env.items()
            if "${" in value or "\0" in value
        ]
    return reasons


def _read_dockerfile(environment: Path) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the working directory, the copied paths, and the reasons why these cannot replace the Dockerfile."""
    text = (environment / "Dockerfile").read_text(encoding="utf-8", errors="replace")
    workdir, has_image, copied, reasons = "/", False, list[tuple[str, str, bool]](), list[str]()
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines():
        command, *words = line.split() or [""]
        match command.upper() if _PLAIN.fullmatch(line) else "other":
            case "":
                pass
            case "FROM" if not has_image:
                has_image = True
            case "WORKDIR" if len(words) == 1:
                workdir = posixpath.join(workdir, words[0])
            case "COPY" if len(words) >= 2:
                *sources, target = words
                is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
                copied += [(source, posixpath.join(workdir, target), is_folder) for source in sources]
            case _:
                reasons.append(
                    f"{line.strip()[:80]!r} is not supported: Dockerfiles are not built, and only a single FROM, "
                    "WORKDIR and plain COPY lines can be interpreted. Set environment.docker_image to an image"
                )
    workdir, copies = posixpath.normpath(workdir) if workdir != "/" else "/app", []
    if _RESERVED.match(workdir):
        reasons.append(f"the working directory {workdir} belongs to the sandbox: use /app")
    for written, target, is_folder in copied:
        source, normal = posixpath.normpath(written.lstrip("/") or "."), posixpath.normpath(target)
        path = environment / source
        if not path.exists() or not path.resolve().is_relative_to(environment.resolve()):
            reasons.append(f"COPY of {written}, which does not exist below environment/")
        if not PurePosixPath(normal).is_relative_to(workdir):
            reasons.append(f"COPY to {normal}, which is outside {workdir}")
        is_inside = path.is_file() and (is_folder or normal == workdir)
        copies.append((source, posixpath.join(normal, path.name) if is_inside else normal))
    return workdir, copies, reasons
