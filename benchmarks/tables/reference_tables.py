"""Reference pages of docs, generated from what they describe: settings, commands, errors, routes, metrics."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator

from benchmarks.tables.kept import ROOT
from pydantic import BaseModel

from inflight import errors
from inflight.base.described_settings import DescribedField, describe_sections
from inflight.cli import GROUPS, command_parser
from inflight.errors import InflightError
from inflight.http.routes import ROUTES, STATUS_OF_CODE
from inflight.http.server import MetricsCollector
from inflight.observe.exports.prometheus import COUNTERS, GAUGES, HISTOGRAMS, OF_STEPS
from inflight.run.config import RunConfig
from inflight.types import EngineStats
from inflight.wire import EndpointState, WeightVersion


def configuration_table() -> str:
    """Return a section with a table for each table of a configuration file."""
    parts = []
    for section in describe_sections(RunConfig):
        parts += [f"## `{section.header}`", section.meaning]
        rows = ((_assignment(it), f"{it.meaning} *{it.accepted}*") for it in section.fields)
        parts.append(_table(("field", "meaning"), rows))
    return "\n\n".join(parts)


def _assignment(field: DescribedField) -> str:
    return f"`{field.name} = {field.toml_default}`" if field.toml_default else f"`{field.name}`"


def commands_table() -> str:
    """Return a section for each command, in the groups of ``inflight --help``."""
    parts = []
    for title, commands in GROUPS.items():
        parts.append(f"## {title}")
        for name, command in commands.items():
            parts += [f"### inflight {name}", *_described(command_parser(name), f"```sh\n{command.example}\n```")]
    return "\n\n".join(parts)


def _described(parser: argparse.ArgumentParser, example: str = "") -> Iterator[str]:
    """Yield what the help of a command says and an example, then the same of its subcommands."""
    yield _cell(parser.description or "")
    rows, inner = [], []
    for action in parser._actions:  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.items()
            rows += [(f"`{it.dest}`", _cell(it.help or "")) for it in action._choices_actions]
        elif not isinstance(action, argparse._HelpAction):
            shown = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
            value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else str(shown)
            flags = ", ".join(action.option_strings)
            text = (action.help or "") % {"default": action.default, "prog": parser.prog}
            rows.append((f"`{f'{flags} {value}'.strip() if action.nargs != 0 else flags}`", _cell(text)))
    yield _table(("argument", "meaning"), [(flags.replace("|", "\\|"), meaning) for flags, meaning in rows])
    if rest := _cell((parser.epilog or "").partition("Example:")[0]):
        yield rest
    if example:
        yield example
    for name, subparser in inner:
        yield f"#### {parser.prog} {name}"
        yield from _described(subparser)


def errors_table() -> str:
    """Return the tree of errors and one row for each of them."""
    tree = inspect.cleandoc((errors.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0])
    rows = (
        (f"`{kind.__name__}`", f"`{kind.code}`", str(STATUS_OF_CODE.get(kind.code, 500)), _cell(kind.__doc__ or ""))
        for kind in _kinds(InflightError)
    )
    return f"```text\n{tree}\n```\n\n" + _table(("error", "`code`", "HTTP status", "state that it leaves"), rows)


def _kinds(kind: type[InflightError]) -> Iterator[type[InflightError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _kinds(child)


def routes_table() -> str:
    """Return one row for each route, with links to its messages."""
    rows = (
        (
            f"`{route.method} {route.path}`",
            _cell(route.summary),
            _message(route.request),
            _message(route.response) or "text",
            "yes" if route.control else "",
        )
        for route in ROUTES
    )
    return _table(("route", "what it does", "request", "response", "token"), rows)


def _message(model: type[BaseModel] | None) -> str:
    return f"[`{model.__name__}`](python-api-wire.md#inflight.wire.{model.__name__})" if model else ""


def run_metrics_table() -> str:
    """Return one row for each metric of a run."""
    kinds = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}
    rows = [
        (f"`inflight_run_{name}{'_total' if kind == 'counter' else ''}`", kind, ", ".join(labels), f"{text}.")
        for kind, metrics in kinds.items()
        for name, (text, *labels) in metrics.items()
    ]
    rows += [(f"`{name}`", "gauge", "", f"{text}.") for name, text in OF_STEPS.values()]
    return _table(("metric", "kind", "labels", "meaning"), sorted(rows))


def server_metrics_table() -> str:
    """Return one row for each metric of a server."""
    version = WeightVersion(run_id="run", version=0, state=EndpointState.READY)
    families = MetricsCollector(version, EngineStats(*[0] * 8)).collect()
    rows = (
        (f"`{it.name}{'_total' if it.type == 'counter' else ''}`", it.type, f"{it.documentation}.") for it in families
    )
    return _table(("metric", "kind", "meaning"), rows)


_PACKAGES = (
    "pydantic",
    "httpx",
    "torch",
    "transformers",
    "torchtitan",
    "deepspeed",
    "megatron-core",
    "vllm",
    "sglang",
    "ray",
)


def packages_table() -> str:
    """Return the oldest and the tested release of each package on which engines, trainers or the wire depend."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(it for extra in project["optional-dependencies"].values() for it in extra)]
    pins = "\n".join(file.read_text() for file in (ROOT / "constraints.txt", *ROOT.glob("tests/*/*.txt")))
    engines = (ROOT / "Makefile").read_text()
    rows = [("Python", project["requires-python"].removeprefix(">="), "3.11")]
    for name in _PACKAGES:
        oldest = re.search(rf"^{name}>=([\d.]+)", "\n".join(reversed(required)), re.MULTILINE)
        tested = re.search(rf"^{name}==([\d.]+)", pins, re.MULTILINE)
        tested = tested or re.search(rf"^{name.upper()} +\?= ([\d.]+)", engines, re.MULTILINE)
        assert oldest is not None and tested is not None, name
        rows.append((name, oldest[1], tested[1]))
    return _table(("package", "oldest", "tested"), rows)


def certificates_table() -> str:
    """Return one row for each kept certificate."""
    rows = []
    for file in sorted((ROOT / "docs" / "certificates").glob("*.json")):
        certificate = json.loads(file.read_text())
        num_passed = sum(verdict["outcome"] == "passed" for verdict in certificate["verdicts"])
        rows.append((f"[{file.stem}](certificates/{file.name})", certificate["started_at"][:10], str(num_passed)))
    return _table(("certificate", "date", "requirements that hold"), rows)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def _cell(text: str) -> str:
    """Return a docstring or help text as one line of a table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;").split())


REFERENCE_TABLES = {
    "configuration": configuration_table,
    "packages": packages_table,
    "certificates": certificates_table,
    "commands": commands_table,
    "errors": errors_table,
    "routes": routes_table,
    "run_metrics": run_metrics_table,
    "server_metrics": server_metrics_table,
}
