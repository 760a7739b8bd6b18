"""What the pages show of checks, mutants and files is what there is."""

from __future__ import annotations

import json
import subprocess

import pytest
from benchmarks.tables.pages import PAGES, ROOT, rendered

from tests.conformance.mutation import RESULTS, subjects
from tests.zygote import python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_current(page):
    assert page.read_text() == rendered(page.read_text()), "run: make docs"


def test_every_mutant_was_caught_when_the_table_was_made():
    results = json.loads(RESULTS.read_text())
    missed = [s.name for s in subjects() if s.caught_by not in results.get(s.kind, {}).get(s.name, {})]
    assert not missed, f"run: python -m tests.conformance.mutation run; not caught, or not run: {missed}"


def test_the_example_of_checks_in_ones_own_tests_runs():
    # A forked process has imported plugins already, and pytest states that it cannot rewrite their assertions.
    forked = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    command = [python(), "-m", "pytest", "-q", "examples/test_contract.py", "-k", "E-01 or U-02", *forked]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert "2 passed" in run.stdout
