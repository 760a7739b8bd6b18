"""The planner: exact endpoints, Little's law, costs that are found again in events, plans, and what they write."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tables.kept import kept_rows
from benchmarks.tables.weight_tables import planned_s
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.planning import Endpoint, Prompted, PublishCost, Setup, SimulationResult, TokenTime, TrainerCost, simulate
from inflight.planning.applying import apply
from inflight.planning.calibration import Costs, calibrate, factors_of
from inflight.planning.candidates import Candidate, candidate_of, predict
from inflight.planning.costs import Contention
from inflight.planning.parts import parts_of
from inflight.planning.servers import SimulatedServer
from inflight.planning.traces import measurements_of
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.littles_law import WINDOW, LittlesLaw
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.staleness import STALENESS

# ---------------------------------------------------------------------------------------------------------- endpoints


class PlainServer:
    """What `SimulatedServer` does, one completion and one moment at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.now = self.blocked_until = 0.0
        self.slowdown = 1.0
        self.done: dict[int, float] = {}
        self.wanted: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.versions: dict[int, list[int]] = {}
        self.version = 0

    def next_end(self) -> float:
        left = [self.wanted[key] - done for key, done in self.done.items()]
        return max(self.now, self.blocked_until) + self.duration(min(left)) if left else math.inf

    def duration(self, num_tokens: float) -> float:
        """Return the time of so many tokens of each completion; the longest grows meanwhile."""
        longest = max(self.before[key] + done for key, done in self.done.items()) + num_tokens / 2
        context = self.endpoint.context_time * len(self.done) * longest
        return (self.endpoint.token_time(len(self.done)) + context) * self.slowdown * num_tokens

    def advance(self, now: float) -> None:
        sampling = max(0.0, now - max(self.now, self.blocked_until))
        low, high = 0.0, 1e4
        for _ in range(80 if self.done else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.duration(middle) < sampling else (low, middle)
        for key in self.done:
            self.done[key] += low
            self.note(key)
        self.now = now

    def note(self, key: int) -> None:
        """Give the tokens that are whole by now the present version."""
        num = min(self.wanted[key], math.floor(self.done[key] + 1e-6))
        self.versions[key] += [self.version] * (num - len(self.versions[key]))


@given(
    points=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=4),
    context_time=st.sampled_from([0.0, 0.001, 0.05]),
    orders=st.lists(
        st.tuples(st.sampled_from(["begin", "end", "remove", "block", "slow", "serve"]), st.integers(1, 40)),
        max_size=40,
    ),
)
@settings(max_examples=150)
def test_the_clock_of_an_endpoint_agrees_with_counting_every_completion(
    points: list[float], context_time: float, orders: list[tuple[str, int]]
) -> None:
    curve = TokenTime(tuple((4.0 * i + 1, time) for i, time in enumerate(points)))
    endpoint = Endpoint("one", 1000, curve, context_time)
    server, plain = SimulatedServer(endpoint), PlainServer(endpoint)
    for number, (what, size) in enumerate(orders):
        now = min(server.now + size / 7, server.next_end())
        if what == "end" and server.num_running:
            now = server.next_end()
            assert now == pytest.approx(plain.next_end())
        if now < math.inf:
            server.advance(now)
            plain.advance(now)
        ended = server.take_ended(at_least_one=what == "end")
        done = [key for key, num in plain.done.items() if num >= plain.wanted[key] - 1e-7]
        assert sorted(job.key[0] for job in ended) == sorted(done)
        for job in ended:
            spans = server.spans_of(job, plain.wanted[job.key[0]])
            plain.done[job.key[0]] = float(plain.wanted[job.key[0]])
            plain.note(job.key[0])
            del plain.done[job.key[0]]
            assert [v for start, end, v in spans for _ in range(start, end)] == plain.versions[job.key[0]]
        if what == "begin":
            server.begin((number, 0), size, number)
            plain.done[number], plain.wanted[number], plain.versions[number] = 0.0, size, []
            plain.before[number] = number
        elif what == "remove" and server.jobs:
            key = min(server.jobs)
            assert server.remove(key) == min(math.floor(plain.done.pop(key[0]) + 1e-6), plain.wanted[key[0]] - 1)
        elif what == "block":
            server.block(server.now + size / 10)
            plain.blocked_until = max(plain.blocked_until, plain.now + size / 10)
        elif what == "slow":
            server.slowdown = plain.slowdown = 1 + size / 20
        elif what == "serve":
            plain.version += 1
            server.serve(plain.version)


# --------------------------------------------------------------------------------------------------------- little's law


def prompted(item: int, version: int) -> Prompted:
    draw = random.Random(item)
    lengths = tuple(max(1, round(draw.lognormvariate(math.log(60), 0.5))) for _ in range(4))
    return Prompted(lengths, str(item % 40), 10, tuple(float(draw.randrange(3)) for _ in range(4)))


def outcome_of(scheduler: str = "least_loaded", num_steps: int = 60, **others: Any) -> SimulationResult:
    history = HistoryStore()
    endpoints = [Endpoint(f"endpoint-{i}", 24, TokenTime.roofline(1.0, 12), request_time=0.3) for i in range(2)]
    own: dict[str, Any] = {
        "endpoints": endpoints,
        "prompted": prompted,
        "step_size": 4000,
        "num_steps": num_steps,
        "staleness": MaxLag(4),
        "trainer": TrainerCost(5.0, 0.02),
        "publish": PublishCost(2.0, 1.0, 0.5),
        "score_time": 0.5,
        "whole_requests": True,
        "trains_on_equal_rewards": False,
    }
    scheduler_of_run = SCHEDULERS[scheduler](group_size=4, history=history)
    return simulate(Setup(scheduler_of_run, history, **own | others))


@pytest.mark.parametrize("conventional_steps", [0, 1, 3])
@pytest.mark.parametrize("scheduler", ["least_loaded", "probe_first", "over_provision"])
def test_ages_are_what_is_under_way_over_a_step_in_simulation(scheduler: str, conventional_steps: int) -> None:
    outcome = outcome_of(scheduler, 60, conventional_steps=conventional_steps)
    terms = outcome.law.terms()
    assert terms is not None and outcome.dropped["equal rewards"] > 0
    # What is under way at both ends of the window may differ.
    assert terms.age == pytest.approx(terms.expected_age, rel=0.02, abs=terms.edge / WINDOW)
    assert outcome.law.alarm() is None


@pytest.mark.parametrize("name", STALENESS)
def test_no_token_beyond_the_lag_bound_is_trained_on_in_simulation(name: str) -> None:
    outcome = outcome_of(staleness=STALENESS[name](max_lag=1), trainer=TrainerCost(1.0))
    assert outcome.lags and max(outcome.lags) <= 1


def test_littles_law_is_an_alarm_where_ages_and_counts_part() -> None:
    law, steady = LittlesLaw(), LittlesLaw()
    for version in range(4 * WINDOW):
        for _ in range(8):
            law.left(max(0, version - 6), is_trained=True)
            steady.left(max(0, version - 1), is_trained=True)
        law.stepped(in_flight=4, queued=4, training=8)
        steady.stepped(in_flight=4, queued=4, training=8)
        assert (law.alarm() is not None) == (version % WINDOW == WINDOW - 1)
        assert steady.alarm() is None
    assert law.num_alarms == 4
    row = steady.row()
    assert row is not None and row["age"] == row["expected_age"] == 2.0


def test_endpoints_that_fail_lose_tokens_and_the_run_goes_on() -> None:
    endpoints = [
        Endpoint(f"endpoint-{i}", 24, TokenTime.roofline(1.0, 12), mean_time_to_failure=400.0, restart_time=50.0)
        for i in range(2)
    ]
    failing, well = outcome_of(endpoints=endpoints), outcome_of()
    assert failing.num_lost_tokens > 0
    assert failing.tokens_per_time < well.tokens_per_time
    assert len(failing.steps) == len(well.steps)


# ---------------------------------------------------------------------------------------------------------- calibration

TRUE = Costs(
    TokenTime(((1.0, 0.011),)),
    0.05,
    Contention({1: 1.0, 2: 1.15, 3: 1.7}, {0: 1.0, 1: 2.0, 2: 3.0}),
    TrainerCost(0.5, 4e-4),
    PublishCost(0.06, 0.02, 0.01),
    0.02,
    lambda group_size: prompted,
    context_time=1.2e-5,
    admission_time=0.03,
)
CONFIG = {
    "run": {"mode": "pipeline", "conventional_steps": 1, "seed": 0},
    "sampling": {"group_size": 4},
    "servers": {"count": 1, "max_concurrent": 24},
    "train": {"tokens_per_worker": 4000, "num_ranks": 1, "train_on_equal_rewards": False},
    "rollouts": {
        "max_lag": 4, "scheduler": "least_loaded", "scheduler_params": {}, "staleness": "max_lag",
        "staleness_params": {}, "composer": "token_budget", "composer_params": {},
    },
}  # fmt: skip


def make_run(
    directory: Path, num_endpoints: int, *, conventional: bool = False, scheduler: str = "least_loaded"
) -> Path:
    """Write the events of a simulated run as a live run would."""
    directory.mkdir()
    mode = "conventional" if conventional else "pipeline"
    config = CONFIG | {
        "run": CONFIG["run"] | {"mode": mode},
        "servers": CONFIG["servers"] | {"count": num_endpoints},
        "rollouts": CONFIG["rollouts"] | {"scheduler": scheduler},
    }
    began = {"kind": "run_started", "start_s": 0.0, "end_s": 0.0, "schema_version": 1, "began_at": 0.0}
    began |= {"inflight": "0", "config": config}
    events: list[dict[str, Any]] = [began]
    history = HistoryStore()
    simulate(
        Setup(
            SCHEDULERS[scheduler](group_size=4, history=history),
            history,
            [
                Endpoint(
                    str(i),
                    24,
                    TRUE.token_time,
                    TRUE.context_time,
                    admission_time=TRUE.admission_time,
                    request_time=TRUE.request_time,
                )
                for i in range(num_endpoints)
            ],
            prompted,
            4000,
            30,
            staleness=MaxLag(4),
            conventional_steps=int(conventional),
            trainer=TRUE.trainer,
            publish=TRUE.publish,
            contention=TRUE.contention,
            whole_requests=True,
            score_time=TRUE.score_time,
            trains_on_equal_rewards=False,
            record=lambda kind, fields: events.append({"kind": kind, **fields}),
        )
    )
    for name, is_step in (("events.jsonl", False), ("metrics.jsonl", True)):
        lines = [json.dumps(event) for event in events if (event["kind"] == "step") == is_step]
        (directory / name).write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("runs")
    return {
        "one, conventional, single": make_run(parent / "a", 1, conventional=True, scheduler="shortest_first"),
        "two, pipeline": make_run(parent / "b", 2),
        "one, pipeline": make_run(parent / "c", 1),
        "one, conventional": make_run(parent / "d", 1, conventional=True),
        "two, conventional": make_run(parent / "e", 2, conventional=True),
        "two, conventional, over": make_run(parent / "f", 2, conventional=True, scheduler="over_provision"),
        "one, pipeline, probing": make_run(parent / "g", 1, scheduler="probe_first"),
    }


def test_costs_are_found_again_in_events_and_predict_other_runs(runs: dict[str, Path]) -> None:
    """Requests of several completions are taken to advance evenly, which they do not quite."""
    costs = calibrate([runs["one, conventional, single"], runs["two, pipeline"]], 3)
    for found, true in (
        (costs.token_time(1) + 2000 * costs.context_time, TRUE.token_time(1) + 2000 * TRUE.context_time),
        (costs.admission_time, TRUE.admission_time),
        (costs.contention.of(3), TRUE.contention.of(3)),
    ):
        assert found == pytest.approx(true, rel=0.15)
    assert costs.contention.of_publish(2) == pytest.approx(TRUE.contention.of_publish(2), rel=0.1)
    assert costs.publish.total == pytest.approx(TRUE.publish.total, rel=0.1)
    assert costs.publish.turnaround == pytest.approx(TRUE.publish.turnaround)
    assert costs.score_time == pytest.approx(TRUE.score_time)
    for name, directory in runs.items():
        predicted, found = predict(costs, candidate_of(directory), 30, 3), measurements_of(directory, 3)
        assert predicted.tokens_per_s == pytest.approx(found.tokens_per_s, rel=0.1), name
        assert predicted.age == pytest.approx(found.age, rel=0.1, abs=0.1), name
        assert predicted.lag == pytest.approx(found.lag, rel=0.1, abs=0.1), name


@pytest.mark.exhaustive
def test_one_run_predicts_others_roughly_and_is_said_to_be_of_one_load(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in runs.values():
        costs = calibrate([directory], 3)
        for other in runs.values():
            assert predict(costs, candidate_of(other), 10, 3).tokens_per_s > 0
    assert main(["plan", "--from", str(runs["two, conventional"])]) == 0
    assert "about the same load" in capsys.readouterr().err
    both = ["--from", str(runs["one, conventional, single"]), "--from", str(runs["two, pipeline"])]
    assert main(["plan", *both]) == 0
    assert "about the same load" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- plans

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan.toml"
QUICKSTART = EXAMPLE.with_name("quickstart.toml")


def test_the_command_prints_what_none_beats_and_where_the_speed_up_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "all.json", tmp_path / "plan.png"
    assert main(["plan", str(EXAMPLE), "--json", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    page = (EXAMPLE.parents[1] / "docs" / "planner.md").read_text()
    assert f"```text\n{printed.partition('plot: ')[0].rstrip()}\n```\n" in page, (
        "docs/planner.md shows another output: replace it"
    )
    rows = json.loads(out.read_text())
    best = max(row["tokens_per_s"] for row in rows)
    assert f"{best:,.0f}" in printed and "bubbles" in printed
    assert {row["mode"] for row in rows} == {"pipeline", "conventional"}
    assert all(row["endpoints"] + row["training_gpus"] == 8 for row in rows if row["mode"] == "pipeline")
    assert plot.stat().st_size > 10_000


def test_a_run_is_planned_from_its_events_and_the_choice_becomes_a_copy_of_its_file(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[search]\nmode = ["pipeline"]\nmax_lag = [1, 3]\nnum_steps = 8\n')
    target = tmp_path / "new.toml"
    order = ["plan", str(plan), "--from", str(runs["one, pipeline"]), "--apply", str(QUICKSTART)]
    assert main([*order, "--output", str(target)]) == 0
    text = target.read_text()
    assert "# any reasoning-gym dataset" in text and "group_size = 4\n" in text and 'mode = "pipeline"' in text
    assert main([*order, "--output", str(target)]) == 1
    assert "exists" in capsys.readouterr().err


def test_a_configuration_is_not_written_over_a_list_of_servers(tmp_path: Path) -> None:
    source = tmp_path / "run.toml"
    source.write_text('[servers.attach]\nurls = ["http://127.0.0.1:1"]\n')
    with pytest.raises(ConfigError, match="configures a mixed fleet"):
        apply(Candidate(1, 8, 4, 4000), source, tmp_path / "new.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[search]\nlag = [1]\n", "search.lag"),
        ("[search]\ngroup_size = []\n", "search.group_size: List should have at least 1 item"),
        ("[publish]\ntotal_s = inf\n", "publish.total_s: Input should be a finite number"),
        ("[generation]\ntoken_s = [[2, 0.1], [1, 0.2]]\n", "ascending"),
        ("[search]\nmax_lag = [1]\n", "no section generation"),
    ],
)
def test_a_plan_that_cannot_be_searched_says_why(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    assert main(["plan", str(plan)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"), [("gpus = 8", "gpus = 1_000_000_000"), ("= 150_000", "= 1_000_000_000_000")]
)
def test_a_plan_that_would_take_hours_to_simulate_is_refused(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(EXAMPLE.read_text().replace(before, after))
    assert main(["plan", str(plan)]) == 1
    assert "take hours: lower hardware.gpus" in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(tmp_path)]) == 1
    assert "does not contain the events of a run" in capsys.readouterr().err


def test_the_parts_of_a_speed_up_multiply_to_it() -> None:
    costs = dataclasses.replace(TRUE, tokens_per_forward=1.5)
    conventional = Candidate(2, 16, 4, 4000, conventional_steps=1, trains_on_equal_rewards=True)
    pipeline = dataclasses.replace(conventional, conventional_steps=0, max_concurrent=24, max_lag=4)
    parts = parts_of(costs, conventional, pipeline, 20)
    plain = predict(dataclasses.replace(costs, tokens_per_forward=1.0), conventional, 20, 4)
    assert parts.product == pytest.approx(predict(costs, pipeline, 20, 4).tokens_per_s / plain.tokens_per_s)
    assert parts.memory > 1 and parts.stragglers > 1 and parts.drafts > 1


def test_what_shares_cores_fairly_is_at_most_as_many_times_slower_as_there_are_processes() -> None:
    assert factors_of([1, 3], [1.0, 0.01]) == {1: 1.0, 3: 3.0}
    assert factors_of([1, 3], [1.0, 0.5]) == {1: 1.0, 3: 2.0}


def test_links_predict_the_publishes_that_were_measured_between_hosts() -> None:
    """The plan adds 0.1 s for all but the transfer. Five hosts on two cores do not reach their links' bandwidth."""
    rows = [row for row in kept_rows("rows", "sharded") if not row["delta"] and not row["overlaps"]]
    for row in rows:
        of_row = (row["transport"], row["num_ranks"], row["num_servers"])
        measured_s = statistics.median(it["wall_s"] for it in row["rounds"]["sharded"])
        allowed = 0.2 if of_row == ("http", 4, 1) else 0.1
        assert abs(planned_s(row) + 0.1 - measured_s) <= allowed * measured_s, of_row
    assert len({(row["transport"], row["num_ranks"]) for row in rows}) == 6
