"""The complete settings of one server, as an object and as the command line of ``inflight serve``.

Each option of the command is a field of one of these dataclasses; the field's metadata contains its help text.
"""

from __future__ import annotations

import argparse
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from inflight.base.sizes import parse_size_bytes
from inflight.contracts.engine_kind import EMBEDDED, EngineOptions, option
from inflight.http.tokens import GENERATION_TOKEN_VARIABLE, TOKEN_VARIABLE


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where, to whom and for how long the server serves the contract."""

    host: str | None = option("address to listen on (default: the address that a launcher sets, or loopback only)")
    port: int = option("port to listen on, 0 for any free one (default: 8000)", 8000)
    token_file: Path | None = option(f"file with the control token (default: ${TOKEN_VARIABLE}, or a new one)")
    generation_token_file: Path | None = option(
        f"file with a token for clients that may only generate and score; the control token permits this too (default: "
        f"${GENERATION_TOKEN_VARIABLE}; if neither is set, generation and scoring require the control token, unless "
        "--host is loopback)"
    )
    open_generation: bool = option("let every client that reaches --host generate without a token", False)
    tls_certificate: Path | None = option("PEM file with the server's certificate: serve HTTPS")
    tls_key: Path | None = option("PEM file with the key of the certificate")
    tls_client_ca: Path | None = option(
        "PEM file of CA certificates: answer only clients whose certificate one of these CAs has signed"
    )
    ready_file: Path | None = option("JSON file in which the server stores its url and pid once it is ready")
    exit_with_stdin: bool = option("stop when standard input ends", False)
    lease_s: float = option(
        "with --exit-with-stdin, keep running until no call with the token has arrived for this long",
        0.0,
        flag="lease",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The run that the server joins, and how it leaves."""

    join: str | None = option(
        f"join the run that listens at this URL; ${TOKEN_VARIABLE} must be the token of the run", metavar="URL"
    )
    join_as: str | None = option(
        "URL at which the run can reach this server (default: the address it listens on)", metavar="URL"
    )
    grace_s: float = option(
        "when this server is stopped, how long to wait for the run to take back running requests (default: 20)",
        20.0,
        flag="grace",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """The stored versions that the server loads by itself."""

    follow: str | None = option("directory or URL from which to load the newest stored version", metavar="DIR_OR_URL")
    follow_run: str | None = option("run_id under which the versions are stored", metavar="RUN_ID")
    follow_token_file: Path | None = option("file with the token for the URL of --follow")


@dataclass(frozen=True, slots=True)
class EngineProcessOptions:
    """How to start an engine that runs in a separate process."""

    python: str | None = option("Python interpreter of the engine's environment (default: the current one)")
    engine_port: int = option("port of the engine itself (default: any free one)", 0)
    start_timeout_s: float = option(
        "how long the engine may take to start (default: 300)", 300.0, flag="start-timeout", metavar="SECONDS"
    )
    log: Path | None = option("file for the engine's output (default: a temporary file)")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The complete settings of one server, except for its token and its placement."""

    options: EngineOptions
    engine: str = option(
        "embedded (the default), vllm, sglang, another installed engine, or module:function, which is called in this "
        "process with MODEL_DIR and the options that you set, as keyword arguments",
        EMBEDDED,
    )
    listen: ListenOptions = ListenOptions()
    joining: JoinOptions = field(
        default=JoinOptions(), metadata={"group": "to join a run that sets servers.attach.join"}
    )
    following: FollowOptions = field(
        default=FollowOptions(), metadata={"group": "to load new weights that a trainer stores"}
    )
    process: EngineProcessOptions = field(
        default=EngineProcessOptions(), metadata={"group": "for an engine that runs in a separate process on loopback"}
    )

    def to_argv(self) -> list[str]:
        """Return the arguments of ``inflight serve`` that start this server; default values are omitted."""
        model = str(self.options.model)
        words = [f"./{model}" if model.startswith("-") else model]
        for it in _options():
            value = getattr(getattr(self, it.section) if it.section else self, it.name)
            if value != it.default:
                words += it.words(value)
        return words

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ServerSpec:
        """Return the settings of the server that these arguments of ``inflight serve`` start.

        If they are invalid, the process exits, as it does with argparse.
        """
        parser = argparse.ArgumentParser()
        add_server_arguments(parser)
        return server_spec_of(parser.parse_args(argv))


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `server_spec_of` reads."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="Hugging Face checkpoint with safetensors")
    titles = {it.name: it.metadata.get("group") for it in fields(ServerSpec)}
    groups = {section: parser.add_argument_group(title) for section, title in titles.items() if title}
    for it in _options():
        groups.get(it.section, parser).add_argument(it.flag, dest=it.name, help=it.help, **it.parsing())


def server_spec_of(arguments: argparse.Namespace) -> ServerSpec:
    """Return the settings of the server that parsed arguments start. Raises `ConfigError` for an invalid size."""
    own: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {"options": {"model": arguments.model}}
    for it in _options():
        (sections.setdefault(it.section, {}) if it.section else own)[it.name] = it.value(getattr(arguments, it.name))
    kinds = get_type_hints(ServerSpec)
    return ServerSpec(**own, **{name: kinds[name](**values) for name, values in sections.items()})


def flag_of(name: str) -> str:
    """Return the command-line flag for the field with this name."""
    return next(it.flag for it in _options() if it.name == name)


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of the command: a field of `ServerSpec`, or of one of its sections."""

    section: str
    name: str
    kind: Any
    """The field's type, without None."""
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return f"--{self.metadata.get('flag', self.name).replace('_', '-')}"

    @property
    def help(self) -> str:
        return str(self.metadata["help"])

    @property
    def is_size(self) -> bool:
        return self.metadata.get("metavar") == "SIZE"

    def parsing(self) -> dict[str, Any]:
        """Return the keyword arguments of ``add_argument`` for this option."""
        if self.kind is bool:
            return {"action": "store_true"}
        if get_origin(self.kind) is tuple:
            return {"action": "append", "default": [], "metavar": self.metadata["metavar"]}
        if get_origin(self.kind) is Literal:
            return {"choices": (_NONE, *get_args(self.kind)), "default": _NONE}
        more = {key: self.metadata[key] for key in ("metavar", "choices") if key in self.metadata}
        return {"type": str if self.is_size else self.kind, "default": self.default, **more}

    def value(self, parsed: Any) -> Any:
        """Return the field's value for the value that argparse parsed."""
        if isinstance(parsed, list):
            return tuple(parsed)
        if self.is_size and parsed is not None:
            return parse_size_bytes(parsed)
        return None if get_origin(self.kind) is Literal and parsed == _NONE else parsed

    def words(self, value: Any) -> list[str]:
        """Return the command-line words that set the option."""
        if value is True:
            return [self.flag]
        if isinstance(value, tuple):
            return [f"{self.flag}={one}" for one in value]
        text = f"{value}B" if self.is_size else str(value)
        return [f"{self.flag}={text}"] if text.startswith("-") else [self.flag, text]


_NONE = "off"
"""The command-line form of None for options with choices."""


@functools.cache
def _options() -> tuple[_Option, ...]:
    found = []
    for section, kind in get_type_hints(ServerSpec).items():
        owner, name = (kind, section) if is_dataclass(kind) else (ServerSpec, "")
        hints = get_type_hints(owner)
        for it in fields(owner):
            if "help" in it.metadata and (name or it.name == section):
                found.append(_Option(name, it.name, _without_none(hints[it.name]), it.default, it.metadata))
    return tuple(found)


def _without_none(kind: Any) -> Any:
    """Return X of ``X | None``, and any other type unchanged."""
    kinds = [it for it in get_args(kind) if it is not types.NoneType]
    return kinds[0] if types.NoneType in get_args(kind) else kind
