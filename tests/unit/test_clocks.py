"""Durations come from clocks that nobody can set."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

WALL_CLOCK = {
    "inflight/base/clock.py": "the time of day at which the process began",
    "inflight/dialects/pipelinerl/messages.py": "times of day that another program reads",
    "inflight/dialects/tinker/checkpoints.py": "checkpoints expire at a time of day",
    "inflight/dialects/tinker/service.py": "times of day that clients read",
    "inflight/dialects/tinker/tinker_model.py": "times of day that clients read",
    "inflight/environments/proxy/formats.py": "`created` of an answer",
    "inflight/environments/proxy/response_items.py": "`created` of an answer",
    "inflight/http/chat.py": "`created` of an answer",
    "inflight/http/streamed_text.py": "`created` of an answer",
    "inflight/observe/trackers/mlflow.py": "the tracker's times are times of day",
    "inflight/weights/transports/bucket_files.py": "leases are the times of files, which other hosts write",
}
"""Where the wall clock is read, and why."""


def reads_the_wall_clock(tree: ast.Module) -> bool:
    """Return whether a module calls ``time.time``, or imports it under a name that is not looked for."""
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time")
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
        for node in ast.walk(tree)
    )


def test_the_wall_clock_is_read_only_where_a_time_of_day_is_meant() -> None:
    files = {str(file.relative_to(SRC)): file.read_text() for file in SRC.rglob("*.py")}
    likely = {name: text for name, text in files.items() if "time.time" in text or "from time" in text}
    assert {name for name, text in likely.items() if reads_the_wall_clock(ast.parse(text))} == {*WALL_CLOCK}
