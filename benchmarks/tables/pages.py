"""Fills in what pages of docs/ show of other files: ``python -m benchmarks.tables.pages`` writes them again.

Requirements of the contract come from their checks, code from the files that the tests run, the table of mutants from
mutation.json, tables of engines from kept certificates and benchmark results.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from benchmarks.tables.mutant_table import mutant_table
from benchmarks.tables.tables import TABLES

from inflight.conformance.specification import fill_tables

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FILE = re.compile(r"<!-- file: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
_SOURCE = re.compile(r"<!-- source: (\S+) (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_MUTANTS = re.compile(r"<!-- mutants -->\n.*?<!-- end -->", re.DOTALL)
_TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml"}


def rendered(page: str) -> str:
    """Return a page with everything filled in that it takes from elsewhere."""

    def shown(found: re.Match[str]) -> str:
        file = ROOT / found[1]
        return (
            f"<!-- file: {found[1]} -->\n```{_LANGUAGES[file.suffix]}\n{file.read_text().rstrip()}\n```\n<!-- end -->"
        )

    page = _SOURCE.sub(_quoted, _FILE.sub(shown, fill_tables(page)))
    page = _TABLE.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", page)
    return _MUTANTS.sub(lambda _: f"<!-- mutants -->\n{mutant_table()}<!-- end -->", page)


def _quoted(found: re.Match[str]) -> str:
    """Return one function or method of a source file, as it stands there."""
    text = (ROOT / found[1]).read_text()
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    node = next(node for node in nodes if node.name == found[2])
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    code = textwrap.dedent("\n".join(lines))
    return f"<!-- source: {found[1]} {found[2]} -->\n```py\n{code}\n```\n<!-- end -->"


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(rendered(file.read_text()))
