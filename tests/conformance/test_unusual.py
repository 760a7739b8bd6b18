"""Right engines that are deliberately unusual pass; faults of a model's computation are told from those of caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.conformance import CheckOutcome, EndpointTarget, Kit, endpoint_checks
from inflight.conformance.endpoint.diagnosis import _EDGE
from inflight.conformance.endpoint.judged import JudgedEndpoint
from inflight.conformance.judge import judge
from inflight.conformance.verdicts import Verdict
from tests.selection import first_of_each

pytestmark = pytest.mark.usefixtures("forks")
UNUSUAL = "tests.conformance.unusual:make"
EMBEDDED = "inflight.engines.embedded.loading:load_endpoint"
CHECK_OF_ID = {check.id: check for check in endpoint_checks()}
DELICATE = ("E-03", "E-27", "E-73", "E-74", "E-75", "E-87", "U-21", "U-26", "U-32", "U-34", "U-35")
"""Checks that have failed for a right engine like these, or may."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(
    scope="module", params=[(UNUSUAL, 4), (UNUSUAL, 1), (EMBEDDED, 1)], ids=["chunks", "one-slot", "embedded"]
)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    factory, max_concurrent = request.param
    options = {"max_concurrent": max_concurrent, **({"context": 256} if factory == UNUSUAL else {})}
    with Kit(EndpointTarget(factory=factory, options=options), deadline_scale=3.0) as kit:
        yield kit


@pytest.mark.parametrize(
    "check", first_of_each((CHECK_OF_ID[name] for name in DELICATE), lambda check: check.level), ids=str
)
def test_an_unusual_engine_passes(kit: Kit, check) -> None:
    verdict = kit.run(check)
    assert verdict.outcome in (CheckOutcome.PASSED, CheckOutcome.SKIPPED), f"{verdict.message}\n{verdict.stacks}"


def verdict_on(target: EndpointTarget, check: str, directory: Path) -> Verdict:
    """Return the verdict of a check that runs in this process."""
    subject = JudgedEndpoint(target, directory, 60)
    try:
        return judge(subject, CHECK_OF_ID[check]).verdict
    finally:
        subject.close()


@pytest.mark.parametrize(("check", "late"), [("U-46", "commit_weight_update"), ("E-35", "request_weight_update")])
def test_a_call_that_arrives_after_the_requests_have_ended_is_rightly_accepted(check: str, late: str, tmp_path: Path):
    target = EndpointTarget(factory="tests.conformance.unusual:make_late", options={"late": late})
    verdict = verdict_on(target, check, tmp_path)
    assert verdict.outcome is CheckOutcome.PASSED, verdict.message


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("window", "U-33", "as if a token saw only the last 60 tokens: a window, not a page or cache"),
        ("positions", "U-33", "if they have more than 101 tokens: a table of positions, a window or a chunk's edge"),
        ("rounding", "E-10", "as much as computing in bfloat16 causes: rounding"),
        ("chunk edges", "U-30", _EDGE),
    ],
)
@pytest.mark.filterwarnings("ignore")  # a faulty endpoint leaves tasks and threads behind
def test_a_fault_of_the_model_is_told_from_one_of_a_cache(fault: str, check: str, words: str, tmp_path: Path) -> None:
    chunk = 1 if fault == "window" else 4
    target = EndpointTarget(factory=UNUSUAL, options={"fault": fault, "chunk": chunk, "context": 256})
    verdict = verdict_on(target, check, tmp_path)
    assert verdict.outcome is CheckOutcome.FAILED, verdict.message
    assert words in verdict.message


@pytest.mark.filterwarnings("ignore")
def test_a_fault_of_a_cache_is_told_from_one_of_the_model(tmp_path: Path) -> None:
    target = EndpointTarget(factory="tests.conformance.mutants:make", options={"mutant": "prefixes outlive LoRA"})
    verdict = verdict_on(target, "U-30", tmp_path)
    assert "what was cached for the prompt is used again" in verdict.message
    assert "the model itself is computed correctly" in verdict.message
