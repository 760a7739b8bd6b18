"""The numbered requirements of docs/contract.md as tables, between ``<!-- checks: LEVEL -->`` and ``<!-- end -->``.

There is one table for every level of endpoints, one for workers, and one for transports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from inflight.conformance.checks import Check
from inflight.conformance.child import checks_of

_TABLE = re.compile(r"<!-- checks: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill_tables(page: str) -> str:
    """Return the page with every table filled in. Raises ``KeyError`` for a level without checks."""
    levels: dict[str, list[Check]] = {"worker": [*checks_of("worker")], "transport": [*checks_of("transport")]}
    for check in checks_of("endpoint"):
        levels.setdefault(check.level, []).append(check)
    return _TABLE.sub(lambda found: f"<!-- checks: {found[1]} -->\n{table(levels[found[1]])}<!-- end -->", page)


def table(checks: Iterable[Check]) -> str:
    """Return the requirements of these checks as a Markdown table."""
    rows = [f"| {check.id} | {check.requirement} |\n" for check in checks]
    return "| id | what must be true |\n|---|---|\n" + "".join(rows)
