"""Adapters written from the docs alone, around a server and a trainer that are not ours, get right verdicts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.conformance import CheckOutcome, EndpointTarget, Kit, WorkerTarget, endpoint_checks, worker_checks
from inflight.conformance.checks import Check, CheckSkipped
from inflight.conformance.endpoint import images
from inflight.conformance.expected import apply_expected, load_expected
from tests.selection import first_of_each

pytestmark = pytest.mark.usefixtures("forks")
EXPECTED = Path(__file__).with_name("plain") / "expected.toml"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Kit]:
    with Kit(EndpointTarget(factory="tests.conformance.plain.factory:start")) as kit:
        yield kit


@pytest.fixture(scope="module")
def threaded() -> Iterator[Kit]:
    with Kit(EndpointTarget(factory="tests.conformance.plain.threaded:make")) as kit:
        yield kit


REFUSALS = ("E-72", "E-73", "E-81")
"""What an adapter forgets that ignores the fields of a request that it does not know."""


def level_or_refusal(check: Check) -> str:
    return check.id if check.id in REFUSALS else check.level


@pytest.mark.parametrize("check", first_of_each(endpoint_checks(), level_or_refusal), ids=str)
def test_the_endpoint_of_the_docs(endpoint, check):
    expected = load_expected(EXPECTED, endpoint_checks())
    verdict = apply_expected(endpoint.run(check), expected)
    verdict.raise_unless_good()
    assert (verdict.outcome is CheckOutcome.EXPECTED_FAILURE) == (check.id in expected)
    if verdict.outcome is CheckOutcome.SKIPPED:
        reasons = (
            "not supported",
            "version binding is admission",
            "speaks HTTP",
            "kit started",
            "one sequence",
            "is supported",
            "the kit cannot make an update fail",
            "serves no model that accepts images",
            "does not start with a mixture of experts",
        )
        assert any(reason in verdict.message for reason in reasons), verdict.message


@pytest.mark.parametrize("id", ["E-73", "E-75"])
def test_why_images_are_not_checked_is_one_short_sentence(endpoint, id):
    (check,) = [check for check in endpoint_checks() if check.id == id]
    verdict = endpoint.run(check)
    assert verdict.outcome is CheckOutcome.SKIPPED
    assert verdict.message == "this kind of endpoint serves no model that accepts images"


def test_a_missing_package_is_not_blamed_on_the_endpoint(monkeypatch, tmp_path):
    def missing(path):
        raise ModuleNotFoundError("No module named 'PIL'")

    monkeypatch.setattr(images, "make_seeing_model", missing)
    subject = SimpleNamespace(directory=tmp_path, capabilities=SimpleNamespace(images=False))
    with pytest.raises(CheckSkipped, match="the kit cannot create a model that accepts images: No module named 'PIL'"):
        asyncio.run(images.images_are_seen(subject))


def test_what_the_server_cannot_do_is_said(endpoint):
    (check,) = [check for check in endpoint_checks() if check.id == "E-22"]
    verdict = endpoint.run(check)
    assert verdict.outcome is CheckOutcome.FAILED
    assert "the id of a running request" in verdict.message
    assert verdict.look_at


THREADED_LEVELS = ("control", "versions", "caches", "faults", *REFUSALS)
"""Where a thread makes a difference; `inflight check` goes through all of them."""


@pytest.mark.parametrize(
    "check",
    first_of_each((c for c in endpoint_checks() if level_or_refusal(c) in THREADED_LEVELS), level_or_refusal),
    ids=str,
)
def test_the_engine_with_a_thread_of_the_docs(threaded, check):
    verdict = threaded.run(check)
    verdict.raise_unless_good()
    if verdict.outcome is CheckOutcome.SKIPPED:
        reasons = (
            "not supported",
            "speaks HTTP",
            "kit started",
            "is supported",
            "serves no model that accepts images",
        )
        assert any(reason in verdict.message for reason in reasons), verdict.message


def test_a_label_that_comes_from_the_receiver_is_too_late_for_the_first_tokens():
    (check,) = [check for check in endpoint_checks() if check.id == "U-21"]
    with Kit(EndpointTarget(factory="tests.conformance.mislabelled:make")) as kit:
        verdict = kit.run(check)
    assert verdict.outcome is CheckOutcome.FAILED, verdict


@pytest.mark.parametrize("kind", first_of_each(["columns", "worker"], lambda _: "any"))
def test_the_worker_of_the_docs_passes_every_check_however_it_stores_its_matrices(kind):
    with Kit(WorkerTarget(factory=f"tests.conformance.plain.{kind}:KIND")) as kit:
        for check in worker_checks():
            verdict = kit.run(check)
            verdict.raise_unless_good()
            if verdict.outcome is CheckOutcome.SKIPPED:
                assert re.search(
                    "several ranks|no LoRA|not supported|does not report|has no schedule", verdict.message
                ), verdict
