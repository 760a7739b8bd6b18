"""Resharding between processes over gloo: values bit for bit, bytes as planned, and failures that end every rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.weights.reshard_program import NUM_RANKS, TIMEOUT_S, TRAINERS, cases
from tests.zygote import python

DEADLINE_S = 60
CASES = {case.name: case for case in cases()}
COMPLETE = ("two servers", "three servers", "stages", "small rounds", "replicas", "same ranks", "converted")
KILLED = {1: "killed", 0: "host killed"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each case."""
    path = tmp_path_factory.mktemp("reshard")
    command = [python(), "-W", "error", "-m", "tests.weights.reshard_program", str(path)]
    log = path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    file = path / "ended.json"
    ended = json.loads(file.read_text()) if file.exists() else None
    assert ended == [-signal.SIGKILL if rank in KILLED else 0 for rank in range(NUM_RANKS)], log.read_text()[-8000:]
    return [json.loads((path / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def of_case(seen: list[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """What each rank of the group saw, but for one that was killed."""
    return {
        rank: seen[process][name] for rank, process in enumerate(CASES[name].members) if KILLED.get(process) != name
    }


@pytest.mark.parametrize("name", COMPLETE)
def test_every_target_has_its_slices_bit_for_bit_in_each_version(seen: list[dict[str, Any]], name: str) -> None:
    for found in of_case(seen, name).values():
        assert found["exact"] == [True, True]


@pytest.mark.parametrize("name", COMPLETE)
def test_the_bytes_handed_to_the_group_are_those_of_the_plan_and_the_fewest(
    seen: list[dict[str, Any]], name: str
) -> None:
    found, plan = of_case(seen, name), CASES[name].plan()
    for rank, bytes_seen in found.items():
        assert bytes_seen["sent"] == [plan.sent_bytes.get(rank, 0)] * 2
        assert bytes_seen["received"] == [plan.received_bytes.get(rank, 0)] * 2
    assert sum(f["sent"][0] for f in found.values()) == plan.lower_bound_bytes


@pytest.mark.parametrize("name", ["two servers", "three servers"])
def test_rank_0_sends_no_more_than_the_largest_other(seen: list[dict[str, Any]], name: str) -> None:
    found = of_case(seen, name)
    # The first rows of a chunked tensor are never fewer than the others, so equality is the best that rank 0 can do.
    assert found[0]["sent"][0] <= max(found[rank]["sent"][0] for rank in TRAINERS[1:])


def test_what_a_target_holds_itself_is_copied_and_not_sent(seen: list[dict[str, Any]]) -> None:
    found = of_case(seen, "same ranks")
    assert found[2]["copied"][0] > 0
    assert found[2]["copied"][0] + found[2]["received"][0] == sum(
        t.size_bytes for t in CASES["same ranks"].plan().transfers if t.target == 2
    )


def test_ranks_that_follow_different_plans_are_told_before_anything_moves(seen: list[dict[str, Any]]) -> None:
    for rank in range(6):
        kind, text = seen[rank]["disagreement"]["error"]
        assert kind == "ConfigError"
        assert "ranks do not follow the same plan" in text
        assert "ranks that differ from rank 0: [5]" in text
        assert seen[rank]["disagreement"]["seconds"] < TIMEOUT_S / 2


def test_a_rank_that_lacks_a_tensor_names_it_and_ends_the_others(seen: list[dict[str, Any]]) -> None:
    found = of_case(seen, "a missing tensor")
    kind, text = found[2]["error"]
    assert kind == "ConfigError"
    assert "no tensor is held here for down at [8:12, 0:15]" in text
    for rank in (4, 5):  # both need what rank 2 has; the other trainers may have sent all they have before
        assert found[rank]["error"][0] == "TransferError"
        assert found[rank]["seconds"] < 5


def test_a_rank_that_never_comes_fails_the_servers_at_the_deadline(seen: list[dict[str, Any]]) -> None:
    found = of_case(seen, "too late")
    for rank in (4, 5):
        assert found[rank]["error"][0] == "TransferError"
        assert found[rank]["seconds"] < 1.0 + 2


def test_an_abort_from_another_thread_ends_that_rank_and_those_that_wait_for_it(seen: list[dict[str, Any]]) -> None:
    found = of_case(seen, "aborted")
    assert found[5]["error"] == ["TransferError", "the resharding group was given up"]
    for rank in (0, 2, 3, 5):
        assert found[rank]["error"][0] == "TransferError"
        assert found[rank]["seconds"] < 1.5
    assert found[4]["error"][0] == "TransferError"  # at its deadline: it waits for rank 1, which did not fail


@pytest.mark.parametrize("name", ["killed", "host killed"])
def test_a_rank_killed_midway_ends_all_others_long_before_the_deadline(seen: list[dict[str, Any]], name: str) -> None:
    for rank, found in of_case(seen, name).items():
        assert found["error"][0] == "TransferError", (rank, found)
        assert found["seconds"] < TIMEOUT_S / 2
