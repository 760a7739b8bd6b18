"""The judge finds what it is there for: faults planted in the record of a run that holds."""

from __future__ import annotations

import json

import pytest

from tests.campaigns.judge import judge
from tests.campaigns.runner import Incarnation, Record
from tests.campaigns.schedule import Schedule, Strike, draw
from tests.campaigns.settings import GROUP_SIZE

NUM_STEPS = 6
KILLED = Strike("SIGKILL", "controller", 3, 0.1)


def state(version, unsettled=(90, 91)):
    """What a checkpoint says after ``version`` steps of two items each, and some more that are out."""
    settled = [item for item in range(2 * version) if item not in unsettled]
    unsettled = [*range(2 * version, 2 * version + 2)] if unsettled == (90, 91) else list(unsettled)
    ledger = {"next_new": len(settled) + len(unsettled), "unsettled": unsettled, "num_trained": len(settled)}
    return {"ledger": {**ledger, "num_dropped": {}, "num_requeued": 0}}


@pytest.fixture
def record(tmp_path):
    """Two incarnations: one killed after step 3, with a checkpoint of step 2, and one that ends well."""
    schedule = Schedule(0, NUM_STEPS, {}, (KILLED,), 0, resumes_at_once=False, is_plain=False)
    found = Record(schedule, tmp_path)
    (found.directory / "checkpoints").mkdir(parents=True)
    (tmp_path / "control").mkdir()
    found.incarnations = [
        Incarnation(0, None, 0, strikes=[KILLED], exit=-9, said="inflight: starting\n", version=3),
        Incarnation(1, state(2), 2, exit=0, said="inflight: done\n", version=NUM_STEPS),
    ]
    write_rows(found, [row(version) for version in range(1, NUM_STEPS + 1)])
    for version in (4, NUM_STEPS):
        write_state(found, version, state(version))
    (found.directory / "checkpoints" / "latest.json").write_text(json.dumps({"version": NUM_STEPS}))
    (found.directory / "summary.json").write_text(json.dumps({"ledger": {"trained": 12}, "failure": None}))
    write_task(found, [range(8), range(4, 14)])
    return found


def row(version, reward=0.3):
    ledger = {"trained": 2 * version}
    return {"version": version, "reward": reward, "num_step_sequences": 2 * GROUP_SIZE, "ledger": ledger}


def write_rows(record, rows):
    (record.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_state(record, version, told):
    (record.directory / "checkpoints" / f"version-{version:06d}").mkdir(exist_ok=True)
    (record.directory / "checkpoints" / f"version-{version:06d}.json").write_text(json.dumps(told))


def write_task(record, incarnations):
    with (record.place / "control" / "record.jsonl").open("w") as file:
        for index, items in enumerate(incarnations):
            file.write(json.dumps({"kind": "incarnation", "index": index}) + "\n")
            for item in items:
                file.write(json.dumps({"kind": "item", "item": item}) + "\n")
                file.write((json.dumps({"kind": "score", "item": item}) + "\n") * GROUP_SIZE)


def test_a_run_that_holds_is_found_to_hold(record):
    assert judge(record) == {}


def repeats_a_step(record):
    write_rows(record, [row(version) for version in (1, 2, 3, 3, 4, 5, 6)])


def skips_a_step(record):
    write_rows(record, [row(version) for version in (1, 2, 4, 5, 6)])


def tears_a_line(record):
    with (record.directory / "metrics.jsonl").open("a") as file:
        file.write('{"version": 7, "rew')


def goes_beyond_its_end(record):
    write_rows(record, [row(version) for version in range(1, NUM_STEPS + 2)])


def goes_back_to_an_older_checkpoint(record):
    record.incarnations.insert(0, Incarnation(0, state(4), 4, strikes=[KILLED], exit=-9))


def loses_an_item(record):
    told = state(NUM_STEPS)
    told["ledger"]["unsettled"].pop()
    write_state(record, NUM_STEPS, told)


def counts_a_trained_item_twice(record):
    told = state(NUM_STEPS)
    told["ledger"]["num_trained"] += 1
    write_state(record, NUM_STEPS, told)


def trains_more_than_the_ledger_says(record):
    write_rows(record, [row(version) | {"num_step_sequences": 12} for version in range(1, NUM_STEPS + 1)])


def issues_a_settled_item_again(record):
    write_task(record, [range(8), range(3, 14)])


def settles_what_was_never_scored(record):
    write_task(record, [range(8), [*range(4, 10), 11, 12, 13]])


def forgets_what_was_out(record):
    write_task(record, [range(8), range(5, 14)])


def unsettles_an_item(record):
    write_state(record, NUM_STEPS, state(NUM_STEPS, (1, 12, 13)))


def collapses(record):
    write_rows(record, [row(version, 0.4 if version < 4 else 0.1) for version in range(1, NUM_STEPS + 1)])


def shows_a_traceback(record):
    record.incarnations[0].said += "Traceback (most recent call last):\n  File ...\nKeyError: 3\n"


def ends_by_a_signal_that_was_not_sent(record):
    record.incarnations[0].exit = -11


def says_nothing(record):
    record.incarnations[0].exit, record.incarnations[0].said = 1, "inflight: starting\n"


def ends_although_one_server_is_left(record):
    record.incarnations[0].strikes = [Strike("SIGKILL", "server-1", 2, 0.1)]
    record.incarnations[0].exit, record.incarnations[0].said = 1, "inflight: no inference server is left (http://...)\n"


def fails_undisturbed(record):
    record.incarnations[1].exit, record.incarnations[1].said = (
        1,
        "inflight: the checkpoint cannot be read: it is torn\n",
    )


def hangs(record):
    record.incarnations[1].hang = "nothing happened for 70 s"


def leaves_a_process(record):
    record.incarnations[0].left.append("process 12 has logs/server-0.log")


def leaves_a_partial_file(record):
    (record.directory / "checkpoints" / "latest.partial").touch()


def keeps_a_checkpoint_too_many(record):
    write_state(record, 2, state(2))


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (repeats_a_step, "versions"),
        (skips_a_step, "versions"),
        (tears_a_line, "versions"),
        (goes_beyond_its_end, "versions"),
        (goes_back_to_an_older_checkpoint, "versions"),
        (loses_an_item, "ledger"),
        (counts_a_trained_item_twice, "ledger"),
        (trains_more_than_the_ledger_says, "ledger"),
        (issues_a_settled_item_again, "items"),
        (settles_what_was_never_scored, "items"),
        (forgets_what_was_out, "items"),
        (unsettles_an_item, "items"),
        (collapses, "reward"),
        (shows_a_traceback, "ends clearly"),
        (ends_by_a_signal_that_was_not_sent, "ends clearly"),
        (says_nothing, "ends clearly"),
        (ends_although_one_server_is_left, "ends clearly"),
        (fails_undisturbed, "ends clearly"),
        (hangs, "in time"),
        (leaves_a_process, "nothing left"),
        (leaves_a_partial_file, "nothing left"),
        (keeps_a_checkpoint_too_many, "nothing left"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_planted_fault_is_found(record, plant, rule):
    plant(record)
    assert rule in judge(record)


def test_a_schedule_comes_from_its_seed_alone():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed)) for seed in range(50)}) == 50


def test_schedules_strike_everything():
    struck = {(strike.label, strike.struck) for seed in range(300) for strike in draw(seed).strikes}
    signals = {(how, what) for how in ("SIGTERM", "SIGKILL") for what in ("controller", "server", "rank")}
    stops = {
        (how, what)
        for how in ("SIGSTOP, then SIGCONT", "SIGSTOP past a deadline", "SIGSTOP for good")
        for what in ("controller", "server", "rank")
    }
    others = {
        ("connections cut", "server"),
        ("connections cut", "rank"),
        ("full disk", "disk"),
        ("full store", "store"),
    }
    rewards = {("slow rewards", "reward"), ("reward raises", "reward"), ("reward hangs", "reward")}
    assert struck == signals | stops | others | rewards
