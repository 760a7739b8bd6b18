"""What a run writes about itself stays small, and is read piece by piece."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.observe.trace import events, files
from inflight.observe.trace.files import read_events, read_lines
from inflight.rollouts.slots import SlotSeconds
from inflight.run.record.journal import Journal
from inflight.types import Group, Rollout
from inflight.wire import DraftCounts, VersionSpan


def group(reward: float) -> Group:
    spans = [VersionSpan(version=0, start=0, end=2)]
    return Group(0, 0, [Rollout([1], [2, 3], [0.0, 0.0], spans, "stop", reward, 1.0)])


def test_what_runs_is_noted_when_it_changes_and_not_by_the_clock(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    for num_groups in (0, 0, 0, 3, 3, 3, 3, 2, 2, 0):
        journal.running(num_groups)
    journal.close()
    assert [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])] == [0, 3, 2, 0]


def test_durations_do_not_change_when_the_clock_of_the_machine_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, None)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 30.0)
    journal.group_finished(group(1.0))
    row = journal.step(Counter({0: 2}), 2, {}, [0], SlotSeconds(), DraftCounts())
    assert 0 <= row["time_s"] < 30
    assert row["completion_tokens_per_s"] == pytest.approx(2 / row["time_s"], rel=0.5)
    resumed = Journal(tmp_path, journal.state())
    assert 0 <= resumed.elapsed_s() < 30
    journal.close()
    resumed.close()
    assert all(event["start_s"] >= 0 for event in read_events(tmp_path, ["step"]))


def test_events_are_bounded_on_disk_and_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    journal = Journal(tmp_path, None)
    for number in range(1000):
        journal.event(events.RunningGroups, num_groups=number)
    journal.close()
    found = sorted(tmp_path.glob("events*.jsonl"))
    assert len(found) == files.NUM_PARTS
    assert sum(path.stat().st_size for path in found) < files.NUM_PARTS * 1200
    assert all(next(read_lines(path))["kind"] == "run_started" for path in found)
    numbers = [event["num_groups"] for event in read_events(tmp_path, ["running_groups"])]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 50


def test_a_new_run_leaves_no_events_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 100)
    first = Journal(tmp_path, None)
    for number in range(20):
        first.event(events.RunningGroups, num_groups=number)
    first.close()
    Journal(tmp_path, None).close()
    assert [event["kind"] for event in read_events(tmp_path)] == ["run_started"]


def test_events_are_yielded_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "a"}\nnot json\n')
    events = read_events(tmp_path)
    assert next(events) == {"kind": "a"}
    with pytest.raises(ConfigError, match=r"is damaged: .*not json"):
        next(events)


def test_a_fact_that_the_schema_does_not_have_is_refused_and_not_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    with pytest.raises(ValueError, match=r"num_grups\n.*Extra inputs"):
        journal.event(events.RunningGroups, num_groups=1, num_grups=1)
    part = {"number": 0, "num_tokens": 1, "spans": (), "finish_reason": "stop", "colour": "red"}
    with pytest.raises(ValueError, match=r"parts\.0\.colour\n.*Extra inputs"):
        journal.event(
            events.RequestEnded, endpoint="http://a", item=0, request_id="a", numbers=(0,), parts=(part,), error=None
        )
    journal.close()
    assert [event["kind"] for event in read_events(tmp_path)] == ["run_started"]


def test_listeners_hear_what_is_written_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    heard: list[events.Event] = []
    journal = Journal(tmp_path, None, listeners=[heard.append])
    for number in range(50):
        journal.event(events.RunningGroups, num_groups=number)
    journal.close()
    assert [json.loads(event.model_dump_json()) for event in heard][-20:] == list(read_events(tmp_path))[-20:]
    assert [event.num_groups for event in heard if isinstance(event, events.RunningGroups)] == list(range(50))


def test_groups_that_no_step_follows_leave_numbers_and_no_tokens_in_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    for _ in range(100):
        journal.group_finished(group(0.5))
    assert not any(isinstance(value, Group) for name in vars(journal) for value in _items(getattr(journal, name)))
    row = journal.step(Counter([0]), 3, {}, [0], SlotSeconds(), DraftCounts())
    assert (row["reward"], row["completion_length"], row["num_samples"]) == (0.5, 2, 100)
    journal.close()


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


@pytest.mark.parametrize("torn", ["", '{"version": 5, "rew', "{"])
def test_rows_of_steps_that_were_lost_are_removed_on_resume(tmp_path: Path, torn: str) -> None:
    journal = Journal(tmp_path, None)
    states = {}
    for version in range(1, 5):
        journal.group_finished(group(float(version)))
        journal.trained(version, [(0.0, 1.0)])
        journal.step(Counter([0]), 3, {}, [0], SlotSeconds(), DraftCounts())
        states[version] = json.loads(json.dumps(journal.state()))
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed = Journal(tmp_path, states[2], 2)
    resumed.group_finished(group(9.0))
    resumed.trained(3, [(1.0, 2.0)])
    resumed.step(Counter([0]), 3, {}, [0], SlotSeconds(), DraftCounts())
    resumed.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["version"], row["reward"], row["num_samples"]) for row in rows] == [
        (1, 1.0, 1),
        (2, 2.0, 2),
        (3, 9.0, 3),
    ]


def test_slots_and_ages_of_a_row_are_those_since_the_last_one_and_the_summary_has_all_of_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    rows = [
        journal.step(
            Counter([0]),
            3,
            {},
            [0, 0, 2],
            SlotSeconds(all_s=8, open_s=4, running_s=2, free_s=1),
            DraftCounts(num_verifications=2, num_accepted=5),
        ),
        journal.step(
            Counter([0]),
            3,
            {},
            [2],
            SlotSeconds(all_s=2, open_s=2, running_s=2, free_s=0),
            DraftCounts(num_verifications=2),
        ),
    ]
    assert [row["completions_by_age"] for row in rows] == [{"0": 2, "2": 1}, {"2": 1}]
    assert [(row["utilisation"], row["bubble_share"]) for row in rows] == [(0.25, 0.25), (1.0, 0.0)]
    journal.close()
    resumed = Journal(tmp_path, json.loads(json.dumps(journal.state())), 2)
    summary = resumed.summarize({})
    resumed.close()
    assert summary["completions_by_age"] == {"0": 2, "2": 2}
    assert (summary["utilisation"], summary["bubble_share"]) == (0.4, pytest.approx(1 / 6))
    assert [row["accepted_per_verification"] for row in rows] == [2.5, 0.0]
    assert summary["accepted_per_verification"] == 1.25


def test_the_share_of_pauses_is_missing_until_a_server_reports_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    without = journal.step(Counter({0: 2}), 2, {}, [0], SlotSeconds(), DraftCounts())
    journal.paused({})
    assert journal.summarize({})["paused_share"] is None
    journal.paused({"http://127.0.0.1:8000": 0.0})
    shown = journal.step(Counter({0: 2}), 2, {}, [0], SlotSeconds(), DraftCounts())
    journal.close()
    assert (without["paused_share"], shown["paused_share"]) == (None, 0.0)


def test_the_share_of_pauses_counts_servers_that_were_replaced_and_earlier_processes(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    journal.paused({"http://127.0.0.1:8000": 1.0, "http://127.0.0.1:8001": 3.0})
    journal.close()
    resumed = Journal(tmp_path, json.loads(json.dumps(journal.state())), 0)
    resumed.paused({"http://127.0.0.1:8002": 0.5})
    resumed.close()
    assert resumed.state()["paused_s"] == 2.5


def test_a_resumed_run_reports_rewards_of_groups_that_finished_before_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    journal.group_finished(group(0.5))
    journal.close()
    resumed = Journal(tmp_path, json.loads(json.dumps(journal.state())), 0)
    row = resumed.step(Counter([0]), 3, {}, [0], SlotSeconds(), DraftCounts())
    resumed.close()
    assert row["reward"] == 0.5
