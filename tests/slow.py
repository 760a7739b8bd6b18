"""Which tests are slow: `make test` leaves them out, `make test-slow` runs them, and CI runs both.

This command writes slow.json, which lists the slow tests and the seconds that each of them took:

    INFLIGHT_TESTS_SLOW=tests/slow.json python -m pytest -m "not exhaustive"
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
SLOW_S = 1.0
"""A test is slow if it takes more than this many seconds while other tests run at the same time, on two cores."""
NEVER_SLOW = (
    "tests/conformance/test_endpoint_kit.py::test_the_embedded_endpoint_passes",  # every check of endpoints
    "tests/conformance/test_worker_kit.py::test_the_fsdp_worker_passes",  # every check of workers
    "tests/pretrained/test_smollm2.py",  # what has to hold on a pretrained model
    "tests/unit/test_dispatcher.py",  # the live run and the simulation make the same decisions
)
"""Prefixes of the ids of tests that `make test` always runs: no other test covers what they do."""
_VARIABLE = "INFLIGHT_TESTS_SLOW"


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that slow.json lists as slow."""
    slow = json.loads(FILE.read_text())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")


def write_slow(reports: Iterable[pytest.TestReport]) -> None:
    """Write the slow tests of this session to the file that `INFLIGHT_TESTS_SLOW` names, if it is set."""
    if _VARIABLE not in os.environ:
        return
    seconds: dict[str, float] = {}
    for report in reports:
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    slow = {it: round(s, 1) for it, s in sorted(seconds.items()) if s > SLOW_S and not it.startswith(NEVER_SLOW)}
    Path(os.environ[_VARIABLE]).write_text(json.dumps(slow, indent=1) + "\n")
