"""The command ``inflight config``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.base.described_settings import DescribedSection

_WIDTH = 100
_EXAMPLES = {"run.directory": '"runs/first"', "model.path": '"models/tiny"', "task.name": '"spell_backward"'}
"""Example values for the fields that every run must set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("section", nargs="?", metavar="SECTION", help="print only this table, such as train")


def run(arguments: argparse.Namespace) -> int:
    """Print a configuration file with every field and its default."""
    from inflight.base.described_settings import describe_sections
    from inflight.errors import ConfigError
    from inflight.run.config import RunConfig

    sections = list(describe_sections(RunConfig))
    wanted = [it for it in sections if arguments.section in (None, it.key, it.key.partition(".")[0])]
    if not wanted:
        names = ", ".join(it.key for it in sections)
        raise ConfigError(f"there is no section {arguments.section!r}; the sections are {names}")
    print("\n\n".join("\n".join(_table(section)) for section in wanted))
    return 0


def _table(section: DescribedSection) -> Iterator[str]:
    yield from _comment(section.meaning)
    yield ("# " if section.is_optional else "") + section.header
    for field in section.fields:
        yield ""
        yield from _comment(f"{field.meaning} ({field.accepted})")
        example = _EXAMPLES.get(f"{section.key}.{field.name}")
        yield f"# {field.name} = {field.toml_default}".rstrip() if example is None else f"{field.name} = {example}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
