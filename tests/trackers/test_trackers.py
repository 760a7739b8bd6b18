"""Trackers store what the run told them, also over a kill and a resume; none of them can harm the run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.observe.trace import events
from inflight.observe.trackers import Reporting, TrackedRun, Tracker, load_trackers
from inflight.observe.trackers import reporting as reporting_module
from inflight.observe.trackers.tracker import numbers_of
from inflight.run.config import load_config
from tests.gates import NEVER_S, SOON_S
from tests.trackers.tracked import CONFIG, FAILURE, RUN_ID, loss_of
from tests.zygote import python

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("INFLIGHT_TRACKERS", Path(sys.prefix) / "trackers"))
"""Where ``make`` installs trackers apart."""


def stored_by(name: str, options: Mapping[str, Any], directory: Path, **environment: str) -> dict[str, Any]:
    """Return what a tracker has stored of the run of `tests.trackers.tracked`."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "src"), str(FOLDER)])
    ran = subprocess.run(
        [python(), "-m", "tests.trackers.tracked", name, json.dumps(options), str(directory)],
        capture_output=True,
        text=True,
        timeout=NEVER_S,
        env={**os.environ, "PYTHONPATH": path.lstrip(os.pathsep), **environment},
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def check_steps(stored: Mapping[str, Any], third: list[float]) -> None:
    """Check every value; ``third`` is what the step that was made twice has."""
    losses = {version: values["loss"] for version, values in stored["steps"].items()}
    assert losses == {
        "1": [loss_of(1, 0)],
        "2": [loss_of(2, 0)],
        "3": third,
        "4": [loss_of(4, 1)],
        "5": [loss_of(5, 1)],
    }
    step = stored["steps"]["4"]
    assert step["publish/paused_s/127.0.0.1:8000"] == [0.5]
    assert step["publish/version"] == [4.0]
    assert step["num_trained_tokens"] == [12.0]
    assert math.isnan(step["unknown"][0])
    assert "reward" not in step, "no rollout was finished"


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    stored = stored_by("tensorboard", {}, tmp_path)
    check_steps(stored, [loss_of(3, 1)])
    assert stored["config"] == CONFIG
    assert stored["told"][0] == f"tracker 'tensorboard': tensorboard --logdir {tmp_path / 'tensorboard'}"


def test_wandb_continues_the_same_run_offline(tmp_path: Path) -> None:
    patience = {"WANDB__SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}  # W&B starts a process of its own
    options = {"project": "letters", "mode": "offline"}
    stored = stored_by("wandb", options, tmp_path, WANDB_DIR=str(tmp_path), **patience)
    assert all(line.startswith("tracker 'wandb': wandb sync ") for line in stored["told"]), stored["told"]
    check_steps(stored, [loss_of(3, 0), loss_of(3, 1)])
    assert stored["runs"] == [RUN_ID]
    assert stored["config"] == CONFIG
    assert stored["failure"] == FAILURE
    assert stored["ends"] == [0, 1]


def test_wandb_without_a_login_fails_and_does_not_ask_on_the_terminal_of_the_run(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ran = subprocess.run(
        [python(), "-m", "tests.trackers.tracked", "wandb", "{}", str(tmp_path)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        timeout=NEVER_S,
        env=environment | {"HOME": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TERM": "xterm"},
        cwd=ROOT,
    )
    os.close(terminal)
    os.close(ours)
    told = json.loads(ran.stdout.splitlines()[-1])["told"]
    assert all("failed and receives no more steps: UsageError: No API key" in line for line in told), told


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make installs trackers apart")
def test_trackio_continues_the_same_run(tmp_path: Path) -> None:
    options = {"project": "letters", "auto_log_cpu": False}
    stored = stored_by("trackio", options, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    check_steps(stored, [loss_of(3, 0), loss_of(3, 1)])
    assert stored["runs"] == [RUN_ID]
    assert stored["config"] == CONFIG


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make installs trackers apart")
def test_mlflow_continues_the_same_run(tmp_path: Path) -> None:
    uri = {"MLFLOW_TRACKING_URI": f"file://{tmp_path / 'mlruns'}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    stored = stored_by("mlflow", {"experiment": "letters"}, tmp_path, **uri)
    check_steps(stored, [loss_of(3, 0), loss_of(3, 1)])
    assert stored["runs"] == [RUN_ID]
    assert stored["config"] == {"run.num_steps": "5", "train.learning_rate": "0.25"}
    assert stored["failure"] == FAILURE
    assert stored["ends"] == ["FAILED"]


# ---------------------------------------------------------------------------------------------------------------
# Trackers that misbehave


class Recorded(Tracker):
    """Remembers what it is told, and does what the test wants at each call."""

    def __init__(self, on_call: Callable[[str], None] = lambda _: None) -> None:
        self.on_call = on_call
        self.calls: list[object] = []

    def begin(self, run: TrackedRun) -> str:
        self.on_call("begin")
        self.calls.append(run.run_id)
        return "here"

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self.on_call("step")
        self.calls.append((version, dict(metrics)))

    def end(self, failure: str | None) -> None:
        self.on_call("end")
        self.calls.append(failure)


def step_of(version: int) -> events.StepCompleted:
    return events.StepCompleted(start_s=1, end_s=1, version=version, time_s=1, reward=0.5)


def reporting_to(tracker: Tracker, directory: Path, told: list[str]) -> Reporting:
    return Reporting({"ours": tracker}, TrackedRun("run-1", directory, {}, 0), told.append)


def test_a_tracker_is_told_the_run_its_steps_and_its_end(tmp_path: Path) -> None:
    tracker, told = Recorded(), []
    reporting = reporting_to(tracker, tmp_path, told)
    reporting.report(events.RunningGroups(start_s=0, end_s=0, num_groups=1))
    reporting.report(step_of(1))
    reporting.end("the disk is full")
    assert tracker.calls == ["run-1", (1, {"time_s": 1.0, "reward": 0.5}), "the disk is full"]
    assert told == ["tracker 'ours': here"]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("where", ["begin", "step", "end"])
def test_a_tracker_that_fails_is_told_of_once_and_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    def fail(call: str) -> None:
        if call == where:
            raise error("no network")

    tracker, told = Recorded(fail), []
    reporting = reporting_to(tracker, tmp_path, told)
    for version in range(1, 4):
        reporting.report(step_of(version))
    reporting.end(None)
    monkeypatch.setattr(reporting_module, "_MAX_WAITING", 0)
    reporting.report(step_of(4))
    assert [line for line in told if line != "tracker 'ours': here"] == [
        f"tracker 'ours' failed and receives no more steps: {error.__name__}: no network"
    ]
    assert len(tracker.calls) == {"begin": 0, "step": 1, "end": 4}[where]


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_module, "_MAX_WAITING", 5)
    goes_on, told = threading.Event(), []
    tracker = Recorded(lambda call: goes_on.wait(NEVER_S) and None if call == "step" else None)
    reporting = reporting_to(tracker, tmp_path, told)
    begun = time.monotonic()
    for version in range(1, 100):
        reporting.report(step_of(version))
    reporting.end(None, within_s=0.1)
    assert time.monotonic() - begun < SOON_S
    assert sorted(told) == [
        "tracker 'ours' did not finish in time: its data may be incomplete",
        "tracker 'ours' is 5 steps behind: further steps are dropped until it catches up",
        "tracker 'ours': here",
    ]
    goes_on.set()
    reporting.end(None)


def test_the_tracker_of_the_example_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    file = tmp_path / "steps.txt"
    trackers = load_trackers(["line_tracker:LineTracker"], {"line_tracker:LineTracker": {"file": str(file)}})
    reporting = Reporting(trackers, TrackedRun(RUN_ID, tmp_path, {}, 6), lambda _: None)
    reporting.report(events.StepCompleted.model_validate({**step_of(7).model_dump(), "lag_mean": 1.5}))
    reporting.end(None)
    assert file.read_text().splitlines() == [f"{RUN_ID} from step 7", "7: reward 0.5, lag 1.5", "done"]


# ---------------------------------------------------------------------------------------------------------------
# Names and options


def test_trackers_are_listed_on_the_command_line_and_in_the_file() -> None:
    example = ROOT / "examples" / "quickstart.toml"
    assert load_config(example).run.trackers == ()
    assert load_config(example, ["--run.trackers", "wandb"]).run.trackers == ("wandb",)
    assert load_config(example, ["--run.trackers", "wandb, mlflow"]).run.trackers == ("wandb", "mlflow")
    assert load_config(example, ["--run.trackers", '["wandb", "mlflow"]']).run.trackers == ("wandb", "mlflow")
    config = load_config(example, ["--run.tracker_options.wandb.mode", "offline"])
    assert config.run.tracker_options == {"wandb": {"mode": "offline"}}


def test_a_tracker_whose_package_is_missing_ends_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.delitem(sys.modules, "inflight.observe.trackers.trackio", raising=False)
    with pytest.raises(ConfigError, match=r"tracker 'trackio' cannot be loaded: .*; pip install 'inflight\[trackio\]'"):
        load_trackers(["trackio"], {})


def test_names_and_options_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker 'wanbd' \(did you mean 'wandb'\?\); known: .*wandb"):
        load_trackers(["wanbd"], {})
    with pytest.raises(ConfigError, match=r"run\.tracker_options has 'wandb', which run\.trackers does not list"):
        load_trackers([], {"wandb": {}})
    with pytest.raises(ConfigError, match=r"tracker 'tensorboard' could not be created: TypeError: .*colour"):
        load_trackers(["tensorboard"], {"tensorboard": {"colour": "red"}})
    with pytest.raises(ConfigError, match=r"tracker 'wandb' could not be created: TypeError: .*projekt"):
        load_trackers(["wandb"], {"wandb": {"projekt": "letters"}})
    with pytest.raises(ConfigError, match="is a dict, not a Tracker: it needs begin, end, step"):
        load_trackers(["builtins:dict"], {})


def test_numbers_of_nested_metrics_have_names_that_every_tracker_takes() -> None:
    row = {"a": 1, "b": None, "c": "text", "d": {"http://10.0.0.1:80": 2.5, "e": {"f": True}}, "g": [1, 2]}
    assert dict(numbers_of(row)) == {"a": 1.0, "d/10.0.0.1:80": 2.5, "d/e/f": 1.0}
