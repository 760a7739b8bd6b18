"""A fleet that grows while training waits for samples, and shrinks where slots stand free."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ConfigError
from inflight.rollouts.scaling import ScaleRule
from inflight.run.config import load_config
from tests.gates import reserved_port
from tests.run.runs import CONFIG, RunProcess

pytestmark = pytest.mark.usefixtures("forks")


def told(*notes: tuple[float, bool, int], window_s: float = 10.0) -> list[tuple[float, str]]:
    """Return what the rule says, and when, of a fleet with ten slots: time, whether training waits, free slots."""
    rule = ScaleRule(window_s, wait_share=0.3, free_share=0.5)
    found = [(at, rule.note(at, is_waiting=waits, num_slots=10, num_free=free)) for at, waits, free in notes]
    return [(at, change) for at, change in found if change is not None]


def test_it_grows_where_training_waits_and_shrinks_where_slots_stand_free() -> None:
    assert told((0, True, 0), (9, True, 0), (10, True, 0)) == [(10, "grow")]
    assert told((0, False, 0), (7.1, True, 0), (10, True, 0)) == []  # it waited for less than 3 s
    assert told((0, False, 0), (6.9, True, 0), (10, True, 0)) == [(10, "grow")]
    assert told((0, True, 6), (10, True, 0)) == [(10, "shrink")]  # more servers would stand free as well
    assert told((0, False, 4), (10, False, 0)) == []
    assert told((0, False, 10), (4.9, False, 0), (10, False, 0)) == []
    assert told((0, True, 0), (10, True, 0), (15, True, 0), (20, True, 0)) == [(10, "grow"), (20, "grow")]


@given(st.lists(st.tuples(st.floats(0.01, 5), st.booleans(), st.integers(0, 10)), max_size=50))
def test_it_speaks_once_in_a_window_at_most(steps: list[tuple[float, bool, int]]) -> None:
    at, notes = 0.0, []
    for elapsed_s, waits, free in steps:
        at += elapsed_s
        notes.append((at, waits, free))
    times = [at for at, _ in told(*notes)]
    assert all(later - earlier >= 10 for earlier, later in pairwise(times))


def test_without_a_fleet_it_says_that_training_waits() -> None:
    rule = ScaleRule(1.0, 0.3, 0.5)
    rule.note(0.0, is_waiting=True, num_slots=0, num_free=0)
    assert rule.note(1.0, is_waiting=True, num_slots=0, num_free=0) == "grow"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "needs servers.attach.join"),
        ({"attach.join": "127.0.0.1:1", "lease_s": 5}, "leave out servers.lease_s"),
        ({"attach.join": "127.0.0.1:1", "scaling": {"most": 1, "server": {"count": 2}}}, "leave out count"),
        ({"attach.join": "127.0.0.1:1", "scaling": {"most": 0}}, "most"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], text: str, tmp_path: Path, model_dir: Path
) -> None:
    values = {"scaling": {"most": 1}, **settings}
    overrides = [word for name, value in values.items() for word in (f"--servers.{name}", _toml(value))]
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    with pytest.raises(ConfigError, match=text):
        load_config(file, overrides)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)


@pytest.mark.timeout(400)
def test_a_run_starts_a_server_and_lets_it_go_and_its_items_add_up(start_run: Callable[..., RunProcess]) -> None:
    at = f"127.0.0.1:{reserved_port()}"
    # Four slots are too few for a step; with the other server's 512, most stand free.
    scale = "{ most = 1, window_s = 1, wait_share = 0.05, free_share = 0.6, server = { max_concurrent = 512 } }"
    settings = ("--servers.attach.join", at, "--servers.count", "1", "--servers.max_concurrent", "4")
    run = start_run(*settings, "--servers.scaling", scale, "--run.num_steps", "100000", "--rollouts.max_lag", "1")
    run.wait_for_output("starting extra-1")
    (grown, *_) = run.wait_for_events("fleet_scaled", lambda event: event["change"] == "grow")
    (extra,) = grown["servers"]
    run.wait_for_output("stopping extra-1 at " + extra)
    run.wait_for_output(f"{extra} is no longer listed: it is handing on its partial completions and leaving")
    run.wait_for_events("fleet_scaled", lambda event: event["change"] == "shrink")

    def extras() -> set[str]:  # one after another: the fleet grows and shrinks as long as the run continues
        return {url for event in run.events("fleet_scaled") if event["change"] == "grow" for url in event["servers"]}

    run.wait_until(lambda: extras() & {group["endpoint"] for group in run.events("group")})
    run.wait_for_steps(len(run.rows()) + 1)
    run.interrupt()
    assert run.wait() == 130, run.output()
    ledger = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])
    assert "failed" not in ledger["num_dropped"]
