"""Schedules with a real engine, the judge's rule about it, and the server that the campaign keeps running."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.contracts import EngineOptions
from tests.campaigns.campaign import combine
from tests.campaigns.engine import GroupsOfEngine, LiveEngine
from tests.campaigns.engine_schedule import LARGE_DEADLINES, TINY_DEADLINES, draw_with_engine
from tests.campaigns.judge import judge
from tests.campaigns.schedule import ENGINE_PARTS, EngineUse, Strike, draw
from tests.campaigns.settings import settings_of
from tests.campaigns.task import Letters
from tests.campaigns.test_judge import record, row, write_rows, write_task  # noqa: F401
from tests.engines.fake_engines import FakeKind
from tests.gates import SOON_S, wait_until
from tests.run.runs import ends_within, is_alive

NUM_DRAWN = 2000
ADDRESS = "http://127.0.0.1:8000"
ENGINE_KILLED = Strike("SIGKILL", "engine", 2, 0.1)


# ---------------------------------------------------------------------------------------------------------------
# Schedules


def test_a_schedule_with_an_engine_comes_from_its_seed_and_the_engine_alone():
    drawn = [draw_with_engine(seed, "vllm") for seed in range(50)]
    assert drawn == [draw_with_engine(seed, "vllm") for seed in range(50)]
    assert drawn != [replace(draw_with_engine(seed, "sglang"), engine=drawn[seed].engine) for seed in range(50)]
    assert all(draw(seed).engine is None for seed in range(50))


def test_schedules_with_an_engine_strike_every_part_of_it_in_every_way():
    drawn = [draw_with_engine(seed, "vllm") for seed in range(NUM_DRAWN)]
    struck = {(use.is_attached, strike.label, strike.struck) for use, strike in strikes_of(drawn)}
    both = {"SIGKILL", "SIGSTOP, then SIGCONT", "SIGSTOP past a deadline", "connections cut"}
    of_engine = {(True, label, part) for label in both for part in ("engine", "engine core")}
    of_engine |= {(False, label, part) for label in both for part in ENGINE_PARTS}
    of_engine |= {(False, label, part) for label in ("SIGTERM", "SIGSTOP for good") for part in ENGINE_PARTS}
    assert {one for one in struck if one[2] in ENGINE_PARTS} == of_engine
    assert {one[2] for one in struck} == {*ENGINE_PARTS, "controller", "server", "rank", "disk", "store", "reward"}


def test_about_half_of_the_strikes_hit_the_engine_and_most_runs_attach_to_it():
    drawn = [draw_with_engine(seed, "sglang") for seed in range(NUM_DRAWN)]
    hits = [strike.target in ENGINE_PARTS for _, strike in strikes_of(drawn)]
    assert 0.4 < sum(hits) / len(hits) < 0.6
    assert 0.7 < sum(one.engine.is_attached for one in drawn) / NUM_DRAWN < 0.9
    assert any(one.is_leased for one in drawn if not one.engine.is_attached)
    assert not any(one.is_leased for one in drawn if one.engine.is_attached)


def test_a_strike_past_a_deadline_lasts_longer_than_the_deadlines_of_its_run():
    for is_large, deadlines in ((False, TINY_DEADLINES), (True, LARGE_DEADLINES)):
        drawn = [draw_with_engine(seed, "vllm", is_large=is_large) for seed in range(NUM_DRAWN)]
        lasting = [it.lasts_s for _, it in strikes_of(drawn) if it.label == "SIGSTOP past a deadline"]
        assert lasting and min(lasting) > max(deadlines.generate_s, deadlines.publish_s)


def test_a_real_model_is_trained_for_few_steps_and_no_disk_is_filled():
    drawn = [draw_with_engine(seed, "vllm", model="real", is_large=True) for seed in range(NUM_DRAWN)]
    assert {one.num_steps for one in drawn} == {3, 4, 5}
    assert not any(one.needs_disk for one in drawn)
    settings = settings_of(drawn[0], Path("place"), Path("real"), Path("python"))
    assert (settings["model.dtype"], settings["train.learning_rate"]) == ("bfloat16", "1e-5")


def test_a_run_attaches_to_the_engine_by_a_file_of_urls_or_starts_it():
    attached, started = (
        next(one for one in (draw_with_engine(seed, "vllm") for seed in range(50)) if one.engine.is_attached is it)
        for it in (True, False)
    )
    assert settings_of(attached, Path("place"), Path("tiny"), None)["servers.attach.urls_file"].startswith("place/")
    fleet = settings_of(started, Path("place"), Path("tiny"), Path("env/bin/python"))["servers.fleet"]
    assert fleet == '[{ engine = "embedded" }, { engine = "vllm", python = "env/bin/python" }]'


def strikes_of(schedules):
    return [(schedule.engine, strike) for schedule in schedules for strike in schedule.strikes]


# ---------------------------------------------------------------------------------------------------------------
# The rule


@pytest.fixture
def with_engine(record):  # noqa: F811
    """The run of `record`, attached to an engine that sampled in both incarnations."""
    use = EngineUse("vllm", is_attached=True, model="tiny", deadlines=TINY_DEADLINES, is_large=False)
    record.schedule = replace(record.schedule, engine=use)
    for incarnation in record.incarnations:
        incarnation.num_engine_groups = incarnation.num_groups_since = 9
    write_rows(record, [aged(version) for version in range(1, record.schedule.num_steps + 1)])
    write_groups(record, (0, 0), (1, 3))
    return record


def aged(version, lag=1.0, ages=("0", "2")):
    return row(version) | {"lag_mean": lag, "lag_max": 2, "completions_by_age": dict.fromkeys(ages, 1)}


def write_groups(record, *versions):  # noqa: F811
    groups = [
        {"kind": "group", "endpoint": ADDRESS, "item": 5, "oldest": oldest, "newest": newest}
        for oldest, newest in versions
    ]
    lines = [json.dumps(group, separators=(",", ":")) + "\n" for group in groups]
    (record.directory / "events.jsonl").write_text("".join(lines))


def test_a_run_with_an_engine_is_found_to_hold(with_engine):
    assert judge(with_engine) == {}


def trains_on_a_negative_lag(record):  # noqa: F811
    write_rows(record, [aged(version, lag=-0.1) for version in range(1, record.schedule.num_steps + 1)])


def trains_on_a_lag_beyond_the_limit(record):  # noqa: F811
    write_rows(record, [aged(version, ages=("0", "9")) for version in range(1, record.schedule.num_steps + 1)])


def samples_from_a_version_that_never_was(record):  # noqa: F811
    write_groups(record, (0, record.schedule.num_steps + 1))


def samples_backwards(record):  # noqa: F811
    write_groups(record, (3, 2))


def never_uses_the_engine(record):  # noqa: F811
    record.incarnations[1].num_engine_groups = record.incarnations[1].num_groups_since = 0


def does_not_use_the_engine_again(record):  # noqa: F811
    record.incarnations[1].strikes = [ENGINE_KILLED]
    record.incarnations[1].num_groups_since = 0
    record.incarnations[1].engine_up_s = TINY_DEADLINES.back_s + 1


def leaves_the_engine_broken(record):  # noqa: F811
    record.engine_problem = "the engine did not answer"


@pytest.mark.parametrize(
    "plant",
    [
        trains_on_a_negative_lag,
        trains_on_a_lag_beyond_the_limit,
        samples_from_a_version_that_never_was,
        samples_backwards,
        never_uses_the_engine,
        does_not_use_the_engine_again,
        leaves_the_engine_broken,
    ],
)
def test_a_planted_fault_of_an_engine_is_found(with_engine, plant):
    plant(with_engine)
    assert "engine" in judge(with_engine)


@pytest.mark.parametrize("plant", [never_uses_the_engine, does_not_use_the_engine_again])
def test_an_engine_that_joined_after_the_last_request_may_have_sampled_nothing(with_engine, plant):
    plant(with_engine)
    with_engine.incarnations[1].num_issued_since_joined = 0
    assert judge(with_engine) == {}


def test_an_engine_that_was_down_may_have_sampled_nothing(with_engine):
    never_uses_the_engine(with_engine)
    with_engine.incarnations[1].was_engine_down = True
    assert judge(with_engine) == {}


def test_a_run_has_to_survive_the_death_of_the_engine_unless_its_other_server_is_stopped_for_good(with_engine):
    first = with_engine.incarnations[0]
    first.strikes, first.exit, first.said = [ENGINE_KILLED], 1, "inflight: no inference server is left (http://...)\n"
    assert "ends clearly" in judge(with_engine)
    first.strikes.append(Strike("SIGSTOP", "server-0", 2, 0.1))
    assert judge(with_engine) == {}


# ---------------------------------------------------------------------------------------------------------------
# What is seen of a run, and delays it


def test_groups_of_the_engine_are_counted_from_a_mark_on(tmp_path):
    events = tmp_path / "events.jsonl"
    groups = GroupsOfEngine(events)
    groups.addresses.add(ADDRESS)

    def write(*endpoints, torn=""):
        with events.open("a") as file:
            file.write("".join(f'{{"kind":"group","endpoint":"{it}"}}\n' for it in endpoints) + torn)

    groups.begin()
    assert groups.look() == 0  # there is no file yet
    write(ADDRESS, "http://127.0.0.1:1", ADDRESS, torn='{"kind":"group","endp')
    assert groups.look() == 2
    groups.mark()
    assert groups.look() == 0
    write(torn=f'oint":"{ADDRESS}"}}\n')
    assert (groups.look(), groups.num_groups) == (1, 3)
    groups.begin()
    write(ADDRESS)
    assert (groups.look(), groups.num_groups) == (1, 1)


def test_requests_are_counted_from_the_time_on_at_which_the_engine_joined(tmp_path):
    events = tmp_path / "events.jsonl"
    groups = GroupsOfEngine(events)
    groups.addresses.add(ADDRESS)
    groups.begin()
    elsewhere = {"kind": "request", "endpoint": "http://127.0.0.1:1"}
    joins = {"kind": "fleet_changed", "end_s": 5.0, "joined": [ADDRESS], "restored": []}
    before, after = (elsewhere | {"start_s": start_s} for start_s in (4.0, 6.0))

    def write(*lines):
        with events.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    write(before)
    groups.look()
    assert groups.num_issued == 1  # it takes part from the beginning until it joins again
    write(joins, before)
    groups.look()
    assert groups.num_issued == 0
    write(after, joins | {"joined": [], "restored": ["http://127.0.0.1:1"]})
    groups.look()
    assert groups.num_issued == 1


def test_rewards_wait_for_the_engine_once_for_each_item(tmp_path):
    task, wait = Letters(tmp_path, 0), tmp_path / "wait"
    wait.touch()
    item = task.item(0)
    scoring = threading.Thread(target=task.score, args=(item, "letters"))
    scoring.start()
    wait.unlink()
    scoring.join(SOON_S)
    assert not scoring.is_alive()
    wait.touch()
    began = time.monotonic()
    assert task.score(item, "letters") == 1.0
    assert time.monotonic() - began < 1.0


def test_combined_results_hold_no_paths_and_no_logs():
    run = {
        "seed": 0,
        "logs": {"server-0.log": ["..."]},
        "outputs": [],
        "problems": {"nothing left": ["/tmp/a/b is left"]},
    }
    record = {"benchmark": "campaign", "rows": {"rules": ["ledger"], "wall_s": 5, "num_jobs": 1, "runs": [run]}}  # noqa: F811
    said = f"no inference server is left ({ADDRESS})"
    other = {**record, "rows": {**record["rows"], "runs": [{"seed": 1, "problems": {"ends clearly": [said]}}]}}
    rows = combine([record, other])["rows"]
    assert rows["wall_s"] == 10
    assert rows["runs"] == [
        {"seed": 0, "problems": {"nothing left": ["... is left"]}},
        {"seed": 1, "problems": {"ends clearly": [said]}},
    ]


# ---------------------------------------------------------------------------------------------------------------
# The server that outlives the runs

HEALTHY = """
import http.server, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def live(tmp_path):
    engine = LiveEngine(FakeKind("healthy", HEALTHY), EngineOptions(model=Path("model")), sys.executable, tmp_path)
    yield engine
    engine.close()


def test_an_engine_that_dies_is_started_again_on_its_port(live):
    assert live.wait_until_up() is None
    url, first, since = live.url, live.process_ids()["engine"], live.up_since
    assert url.startswith("healthy+http://127.0.0.1:")
    live.condemn()
    assert live.process_ids() == {}
    os.kill(first, signal.SIGKILL)
    assert live.wait_until_up() is None
    second = live.process_ids()["engine"]
    assert (live.url, live.num_starts) == (url, 2)
    assert live.up_since > since and second != first
    live.close()
    assert not is_alive(first) and ends_within(second)


def test_an_engine_is_started_again_on_demand(live):
    live.wait_until_up()
    first = live.process_ids()["engine"]
    live.replace()
    assert live.wait_until_up() is None
    assert live.process_ids()["engine"] != first and not is_alive(first)


def test_an_engine_that_never_starts_is_an_error_with_its_cause(tmp_path):
    program = "import sys; print('the engine knows no such model'); sys.exit(3)"
    engine = LiveEngine(FakeKind("failing", program), EngineOptions(model=Path("model")), sys.executable, tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)does not start: failing ended with status 3.*knows no such model"):
        engine.wait_until_up()
    engine.close()


def test_an_engine_is_closed_while_it_starts(tmp_path):
    program = "import time; time.sleep(600)"
    engine = LiveEngine(FakeKind("slow", program), EngineOptions(model=Path("model")), sys.executable, tmp_path)
    wait_until(lambda: engine.num_starts == 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.wait_until_up)
        engine.close()
        assert isinstance(waiting.exception(SOON_S), KeyboardInterrupt)
    assert engine.up_since is None
