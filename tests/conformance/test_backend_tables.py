"""The table of backends says of certificates what they say, and the weekly run calls what there is."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from benchmarks.tables.backend_tables import BACKENDS, certified_since
from benchmarks.tables.kept import ROOT


def certificate(release: str, day: str, *outcomes: str, problem: str = "") -> dict[str, Any]:
    return {
        "kind": "endpoint",
        "implementation": "vllm",
        "implementation_version": release,
        "started_at": f"{day}T10:00:00+00:00",
        "problem": problem,
        "verdicts": [{"outcome": outcome} for outcome in outcomes],
    }


def test_a_release_is_certified_since_its_first_certificate_without_a_failure_and_newer_releases_come_first() -> None:
    found = certified_since(
        [
            certificate("0.9.0", "2026-01-03", "passed"),
            certificate("0.10.0", "2026-01-05", "passed", "skipped", "expected failure"),
            certificate("0.9.0", "2026-01-02", "passed"),
            certificate("0.11.0", "2026-01-06", "passed", "failed"),
            certificate("0.12.0", "2026-01-07", "passed", problem="it ended"),
        ]
    )
    assert list(found.items()) == [("0.10.0", "2026-01-05"), ("0.9.0", "2026-01-02")]


def test_every_backend_is_certified_or_says_why_not() -> None:
    for backend in BACKENDS:
        kept = list((ROOT / "docs" / "certificates").glob(backend.files)) if backend.files else []
        assert kept or backend.why_not or backend.entry[0], backend.name


def test_the_weekly_run_calls_targets_that_there_are_and_names_no_host() -> None:
    workflow = (ROOT / ".github" / "workflows" / "engine-releases.yml").read_text()
    targets = re.findall(r"^certificate-(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    engines = re.findall(r"engine: (\w+)", workflow)
    assert engines == ["vllm", "sglang"]
    assert set(engines) <= set(targets)
    assert "http" not in workflow


@pytest.mark.parametrize("engine", ["", "llama"])
def test_an_engine_that_is_not_known_has_no_newest_release(engine: str) -> None:
    run = subprocess.run(["engines/newest", engine], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "known: vllm, sglang" in run.stderr
