"""The worker kit: the FSDP worker passes it, and every check catches a worker that is wrong in just that way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

from inflight.conformance.checks import Check
from inflight.conformance.judge import verdict_of
from inflight.conformance.kit import Kit
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict, merged
from inflight.conformance.worker.catalogue import CHECKS
from tests.conformance.broken import require_not_broken
from tests.conformance.worker_mutants import MUTANTS
from tests.selection import first_of_each

pytestmark = pytest.mark.usefixtures("forks")
FSDP, MUTANT = "inflight_fsdp:FSDP", "tests.conformance.worker_mutants:KIND"
BY_ID = {check.id: check for check in CHECKS}
OF_SEVERAL_RANKS = {
    *("W-02", "W-18", "W-19", "W-20", "W-27", "W-38", "W-39", "W-45"),
    *(f"W-{number}" for number in range(68, 74)),
}
FOR_OTHER_WORKERS = {"W-65", "W-67"}
"""What workers refuse that do not support it."""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("experts", "checks"),
    [
        pytest.param(False, CHECKS, id="dense"),
        pytest.param(True, [first for _, (first, *_) in groupby(CHECKS, lambda check: check.level)], id="experts"),
        pytest.param(True, CHECKS, marks=pytest.mark.exhaustive, id="experts, every check"),
    ],
)
def test_the_fsdp_worker_passes_on_one_rank(experts: bool, checks: Sequence[Check]) -> None:
    """On more, CI writes its certificates: make certificates-trainers."""
    with Kit(WorkerTarget(factory=FSDP, num_ranks=1, options={"device": "cpu"}, experts=experts)) as kit:
        verdicts = [kit.run(check) for check in checks]
        assert kit.facts["implementation"] == "inflight_fsdp.worker.FsdpWorker"
    assert [
        str(verdict) for verdict in verdicts if verdict.outcome not in (CheckOutcome.PASSED, CheckOutcome.SKIPPED)
    ] == []
    skipped = {verdict.id for verdict in verdicts if verdict.outcome is CheckOutcome.SKIPPED}
    expected = OF_SEVERAL_RANKS | FOR_OTHER_WORKERS | ({"W-61"} if experts else set())
    assert skipped == expected & {check.id for check in checks}
    assert all(verdict.evidence for verdict in verdicts if verdict.outcome is CheckOutcome.PASSED)


def test_every_check_has_a_mutant() -> None:
    assert {mutant.caught_by for mutant in MUTANTS.values()} == set(BY_ID)
    assert len(BY_ID) == len(CHECKS)


@pytest.fixture(scope="module")
def check_mutant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Check], Verdict]]:
    """Run a check over a mutant; mutants of as many ranks share their processes."""
    file = tmp_path_factory.mktemp("mutant") / "name"
    file.write_text("")
    kits: dict[int, Kit] = {}

    def run(name: str, check: Check) -> Verdict:
        num_ranks = MUTANTS[name].num_ranks
        if num_ranks not in kits:
            options = {"mutant_file": str(file)}
            kits[num_ranks] = Kit(WorkerTarget(factory=MUTANT, num_ranks=num_ranks, options=options))
        file.write_text("")
        assert kits[num_ranks].facts  # the ranks are up, and made a worker that is right
        file.write_text(name)
        return kits[num_ranks].run(check)

    yield run
    for kit in kits.values():
        kit.close()


@pytest.mark.parametrize(
    "name",
    first_of_each(
        (name for name, mutant in MUTANTS.items() if not mutant.hangs),
        lambda name: BY_ID[MUTANTS[name].caught_by].level,
    ),
)
def test_a_faulty_worker_is_caught_by_its_check(check_mutant: Callable[[str, Check], Verdict], name: str) -> None:
    verdict = check_mutant(name, BY_ID[MUTANTS[name].caught_by])
    assert verdict.outcome is CheckOutcome.FAILED, verdict
    assert verdict.message and verdict.look_at
    require_not_broken(verdict)


@pytest.mark.parametrize("name", first_of_each((n for n, mutant in MUTANTS.items() if mutant.hangs), lambda _: "hangs"))
def test_a_hanging_worker_is_shown_with_the_stacks_of_every_rank(
    check_mutant: Callable[[str, Check], Verdict], name: str
) -> None:
    verdict = check_mutant(name, BY_ID[MUTANTS[name].caught_by])
    assert verdict.outcome is CheckOutcome.HUNG, verdict
    require_not_broken(verdict)
    ranks = verdict.stacks.split("--- rank ")[1:]
    assert [rank[0] for rank in ranks] == ["0", "1"]
    function = BY_ID[MUTANTS[name].caught_by].function.__name__
    assert all(f"in {function}" in rank for rank in ranks)
    assert "worker_mutants.py" in ranks[0]


def test_the_rank_that_raised_is_blamed_for_the_ranks_that_wait_for_it() -> None:
    check = BY_ID["W-18"]
    verdicts = [
        verdict_of(check, CheckOutcome.HUNG, message="it did not end within 20 s", stacks="in all_reduce"),
        verdict_of(check, CheckOutcome.FAILED, message="ValueError was raised at worker.py:7 in forward: no"),
    ]
    verdict = merged(verdicts)
    assert verdict.outcome is CheckOutcome.HUNG
    assert verdict.message.startswith("rank 1: ValueError was raised at worker.py:7 in forward: no; rank 0 hung")


# ---------------------------------------------------------------------------------------------------------------
# Under torchrun


def torchrun(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    return subprocess.run(
        [sys.executable, *launcher, "inflight", "check", "worker", target, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.exhaustive
def test_ranks_that_torchrun_starts_make_one_certificate(tmp_path: Path) -> None:
    asked = ("W-01", "W-02", "W-18", "W-20", "W-26", "W-38", "W-40")
    ids = [word for name in asked for word in ("--check", name)]
    done = torchrun(FSDP, *ids, "--option", "device=cpu", "--json", str(tmp_path / "certificate.json"))
    assert done.returncode == 0, done.stderr
    found = Certificate.model_validate_json((tmp_path / "certificate.json").read_text())
    assert [verdict.id for verdict in found.verdicts] == list(asked)
    skipped = [verdict for verdict in found.verdicts if verdict.outcome is not CheckOutcome.PASSED]
    assert [verdict.id for verdict in skipped] == ["W-20", "W-38"]
    assert all("one rank" in verdict.message for verdict in skipped)
    assert found.flags["ranks"] == "2"


@pytest.mark.exhaustive
def test_a_rank_that_hangs_under_torchrun_ends_the_run_with_what_was_found(tmp_path: Path) -> None:
    asked = ("W-01", "W-26", "W-27")
    ids = [word for name in asked for word in ("--check", name)]
    file = tmp_path / "certificate.json"
    done = torchrun(MUTANT, *ids, "--option", "mutant=hang_in_gather", "--json", str(file))
    assert done.returncode != 0
    verdicts = json.loads(file.read_text())["verdicts"]
    assert [(verdict["id"], verdict["outcome"]) for verdict in verdicts] == [("W-01", "passed"), ("W-26", "hung")]
    assert "--- rank 0" in verdicts[1]["stacks"] and "--- rank 1" in verdicts[1]["stacks"]
