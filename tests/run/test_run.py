"""The run as its user sees it: real servers, real trainer ranks, real signals."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from inflight.rollouts.composers import COMPOSERS
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.staleness import STALENESS
from tests.gates import StartGate, StepGate
from tests.models import make_model
from tests.run.runs import GROUP_SIZE, ROOT, RunProcess, ends_within
from tests.run.tasks import TEACHING_ITEMS
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess

pytestmark = pytest.mark.timeout(300)


def test_pipeline_run_trains_publishes_every_step_and_writes_everything_down(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    gate = StepGate(tmp_path / "steps", 1)
    words = ("--run.trackers", "tensorboard", "--run.metrics_port", "0", *gate.settings)
    run = start_run(*words, environment={"INFLIGHT_TESTS_PLOTS": "1"})
    run.wait_for_output("metrics for Prometheus at")
    (url,) = re.findall(r"metrics for Prometheus at (\S+)", run.output())
    run.wait_for_steps(1)
    assert re.search(r"^inflight_run_steps_total 1(\.0)?$", httpx.get(url).text, re.MULTILINE)
    gate.open()
    assert run.wait() == 0, run.output()
    rows, summary = run.rows(), run.summary()
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["publish"]["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(0 < row["effective_sample_size"] <= 1 + 1e-6 for row in rows)
    assert all(row["lag_max"] <= 8 for row in rows)
    assert rows[0]["mismatch_k3"] < 1e-4  # float32 on both sides: trainer and server agree at lag 0
    assert summary["version"] == 6
    assert not summary["interrupted"]
    assert sum(summary["completions_by_num_versions"].values()) == summary["num_samples"]
    assert sum(summary["completions_by_length"].values()) == summary["num_samples"]
    assert 0 < summary["paused_share"] < 1
    assert all(0 <= row["utilisation"] <= 1 and 0 <= row["bubble_share"] <= 1 for row in rows)
    law = rows[-1]["littles_law"]
    in_edges = law["expected_age"] ** 2 / len(rows)  # what is under way at the end has not left
    assert abs(law["age"] - law["expected_age"]) <= 0.25 * law["expected_age"] + in_edges
    assert 0 < summary["utilisation"] < 1
    assert 0 < summary["bubble_share"] < 1
    assert sum(summary["completions_by_age"].values()) == sum(row["num_step_sequences"] for row in rows)
    ledger = summary["ledger"]
    assert ledger["trained"] >= 6
    for name in ("reward", "token_lag", "lengths", "timeline"):
        assert (run.directory / "plots" / f"{name}.png").stat().st_size > 5000
    assert list((run.directory / "tensorboard").iterdir())
    assert json.loads((run.directory / "config.json").read_text())["run"]["num_steps"] == 6
    assert all(map(ends_within, run.servers()))
    checkpoint = run.directory / "checkpoints" / "version-000006"
    assert load_file(checkpoint / "model.safetensors")


def test_conventional_run_is_on_policy_at_one_step_and_lags_by_steps_otherwise(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--run.mode", "conventional", "--run.conventional_steps", "2", "--run.num_steps", "4")
    assert run.wait() == 0, run.output()
    assert [(row["lag_mean"], row["lag_max"]) for row in run.rows()] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert [row["publish"] is not None for row in run.rows()] == [False, True, False, True]
    assert set(run.summary()["completions_by_num_versions"]) == {"1"}


RELEASING = ("--run.mode", "conventional", "--run.conventional_steps", "2", "--servers.release_memory", "true")


def test_servers_release_their_memory_while_the_trainer_trains(start_run: Callable[..., RunProcess]) -> None:
    run = start_run(*RELEASING, "--run.num_steps", "4", "--servers.count", "2")
    assert run.wait() == 0, run.output()
    assert [row["lag_max"] for row in run.rows()] == [0, 1, 0, 1]
    assert [row["publish"] is not None for row in run.rows()] == [False, True, False, True]
    turns = sorted(
        run.events("memory_released", "memory_restored", "train", "publish"), key=lambda event: event["start_s"]
    )
    phase = ["memory_released", "train", "train", "memory_restored", "publish"]
    assert [event["kind"] for event in turns] == ["memory_restored", "publish", *phase, *phase]
    borders = run.events("memory_released", "memory_restored")
    assert all(set(event["servers"]) == set(run.server_urls()) for event in borders)
    for group in run.events("group"):
        (*_, last) = (event["kind"] for event in borders if event["end_s"] <= group["end_s"])
        assert last == "memory_restored"
    assert run.summary()["failure"] is None


def test_a_server_that_finds_no_memory_to_restore_is_left_out_until_it_does(
    start_run: Callable[..., RunProcess], model_dir: Path, tmp_path: Path
) -> None:
    failing = "tests.run.failing_servers:without_memory_once"
    servers = [ServerProcess(model_dir, tmp_path / "a", "--engine", failing), ServerProcess(model_dir, tmp_path / "b")]
    try:
        for server in servers:
            server.wait_until_ready()
        urls = json.dumps([server.url for server in servers])
        run = start_run(
            *RELEASING,
            "--run.num_steps",
            "100000",
            "--servers.attach.urls",
            urls,
            environment={"INFLIGHT_TOKEN": TOKEN},
        )
        (back,) = run.wait_for_events("fleet_changed", lambda event: servers[0].url in event["restored"])
        for server in servers:
            run.wait_for_events(
                "request",
                lambda event, url=server.url: event["endpoint"] == url and event["start_s"] > back["end_s"],
            )
        run.interrupt()
        assert run.wait() == 130, run.output()
        assert f"{servers[0].url} did not restore its memory and is left out: the memory could not be" in run.output()
        assert [event["servers"] for event in run.events("memory_restored")][1] == [servers[1].url]
        assert [event["removed"] for event in run.events("fleet_changed")] == [[servers[0].url], []]
        for server in servers:  # they continue after the run, with their memory
            assert httpx.get(f"{server.url}/weight_version").json()["state"] == "ready"
    finally:
        for server in servers:
            server.kill()


@pytest.mark.exhaustive
def test_two_ranks_and_two_servers_train_together(start_run: Callable[..., RunProcess]) -> None:
    options = "{ activation_checkpointing = true, shard_size = 1 }"
    run = start_run(
        *("--train.num_ranks", "2", "--servers.count", "2", "--run.num_steps", "3"),
        *("--train.trainer_options", options),
    )
    assert run.wait() == 0, run.output()
    rows = run.rows()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert len(rows[-1]["publish"]["paused_s"]) == 2


def test_a_run_cannot_tell_that_its_trainer_is_torchtitan(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--train.trainer", "torchtitan", "--run.num_steps", "2", "--loss.reference_kl", "0.01")
    assert run.wait() == 0, run.output()
    assert [row["version"] for row in run.rows()] == [1, 2]
    assert run.rows()[0]["reference_kl_k3"] == pytest.approx(0.0, abs=1e-6)
    assert (run.directory / "checkpoints").is_dir()


def test_an_option_that_the_worker_does_not_know_ends_the_run_with_the_nearest_one(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--train.trainer_options", "{ shards = 1 }")
    assert run.wait() == 1, run.output()
    assert "FSDP worker: unknown key 'shards'; did you mean shard_size?" in run.output()
    assert "shard_size" in run.output()


def test_interrupt_saves_and_resume_goes_on_without_losing_or_repeating_items(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(4)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert "--resume" in run.output()
    stopped_at = run.rows()[-1]["version"]
    assert run.summary()["interrupted"]
    before = run.summary()["ledger"]
    resumed = start_run("--run.num_steps", str(stopped_at + 2), "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert f"continuing from the checkpoint of step {stopped_at}" in resumed.output()
    rows = resumed.rows()
    assert [row["version"] for row in rows] == list(range(1, stopped_at + 3))
    assert rows[stopped_at]["num_samples"] >= rows[stopped_at - 1]["num_samples"]
    assert resumed.summary()["ledger"]["trained"] > before["trained"]
    finished = {event["item"] for event in resumed.events("group")}
    # Some may have finished after the checkpoint and not again yet.
    assert resumed.summary()["num_samples"] <= GROUP_SIZE * len(finished)


def test_a_second_interrupt_kills_the_run_s_processes_and_says_so_and_the_run_can_be_resumed(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    gate = StepGate(tmp_path / "steps", 1)
    run = start_run("--run.checkpoint_every_steps", "1", *gate.settings)
    run.wait_for_steps(1)
    run.interrupt()
    run.wait_for_output("press Ctrl-C again")
    assert run.process.poll() is None  # the step waits at the gate
    run.interrupt()
    assert run.wait(60) == 130, run.output()
    assert "stopping at once" in run.output()
    assert "killed by signal" not in run.output()
    assert run.summary()["interrupted"]
    assert run.summary()["failure"] is None
    gate.open()
    resumed = start_run("--resume", *gate.settings)
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.exhaustive
def test_interrupt_while_waiting_for_data_keeps_the_steps_since_the_last_checkpoint(
    start_run: Callable[..., RunProcess],
) -> None:
    settings = ("--task.name", "tests.run.tasks:stops_teaching", "--run.checkpoint_every_steps", "1000")
    run = start_run("--run.num_steps", "100000", *settings)
    run.wait_until(lambda: {group["item"] for group in run.events("group")} >= set(range(TEACHING_ITEMS)))
    steps = 0
    while steps != len(run.rows()):  # until no step has come for many groups: every further reward is equal
        steps, num_groups = len(run.rows()), len(run.events("group"))
        run.wait_until(lambda num_groups=num_groups: len(run.events("group")) >= num_groups + 60)
    assert steps > 0
    run.interrupt()
    assert run.wait(60) == 130, run.output()
    pointer = json.loads((run.directory / "checkpoints" / "latest.json").read_text())
    assert pointer["version"] == run.rows()[-1]["version"] >= steps


def test_a_new_run_never_overwrites_an_old_one(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.num_steps", "1")
    assert run.wait() == 0, run.output()
    again = start_run("--run.num_steps", "1")
    assert again.wait() == 1
    assert "already holds a run" in again.output()


def test_killed_server_is_left_out_started_again_and_given_work_again(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    start = StartGate(tmp_path / "python", "serve")
    settings = ("--servers.count", "2", "--run.num_steps", "100000", "--updates.deadline_s", "20")
    run = start_run(*settings, environment=start.environment)
    run.wait_for_steps(3)
    victim, survivor = run.servers()
    url = run.server_urls()[0]
    start.close()
    os.kill(victim, signal.SIGKILL)
    run.wait_for_output("was killed by signal 9")
    start.wait_for_somebody()
    run.wait_for_steps(len(run.rows()) + 3)  # the run continues without it
    num_steps = len(run.rows())
    start.open()
    (back,) = run.wait_for_events("fleet_changed", lambda event: url in event["restored"])
    run.wait_for_events("group", lambda event: event["endpoint"] == url and event["oldest"] >= back["version"])
    assert back["version"] >= num_steps
    again, _ = run.servers()
    assert again != victim
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert "server-0 was restarted" in run.output()
    assert all(map(ends_within, (again, survivor)))


@pytest.mark.exhaustive
def test_the_last_server_is_started_again_and_the_run_goes_on(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.num_steps", "100000", "--updates.deadline_s", "20")
    run.wait_for_steps(3)
    os.kill(run.servers()[0], signal.SIGTERM)  # a graceful end: it answers that its engine is closed
    run.wait_for_output("server-0 was restarted")
    run.wait_for_steps(len(run.rows()) + 2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert run.summary()["failure"] is None


@pytest.mark.exhaustive
def test_a_server_that_cannot_be_started_again_is_given_up_and_the_run_says_which_and_how(
    start_run: Callable[..., RunProcess], model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    run = start_run("--run.num_steps", "100000", "--updates.deadline_s", "20", model=model)
    run.wait_for_steps(3)
    for weights in model.glob("*.safetensors"):  # checkpoints still need the tokenizer
        weights.unlink()
    os.kill(run.servers()[0], signal.SIGKILL)
    assert run.wait(90) == 1
    assert "server-0 was killed by signal 9" in run.output()
    assert "server-0 will not be restarted" in run.output()
    assert "no inference server is left" in run.output()
    assert (run.directory / "checkpoints" / "latest.json").exists()


def test_killed_trainer_rank_ends_the_run_and_its_servers(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(2)
    trainer = run.processes()["trainer-0"]
    os.kill(trainer, signal.SIGKILL)
    assert run.wait(60) == 1
    assert "trainer-0 was killed by signal 9" in run.output()
    assert all(map(ends_within, run.servers()))


@pytest.mark.parametrize("transport", first_of_each(["shm", "http"], lambda _: "any"))
def test_weights_that_a_killed_trainer_rank_has_stored_are_removed_with_the_run(
    start_run: Callable[..., RunProcess], tmp_path: Path, transport: str
) -> None:
    run = start_run(
        *("--run.num_steps", "100000", "--updates.transport", transport), environment={"TMPDIR": str(tmp_path)}
    )
    run.wait_for_steps(2)
    trainer = run.processes()["trainer-0"]
    os.kill(trainer, signal.SIGSTOP)  # it opens and closes files all the time
    opened = [os.readlink(link) for link in Path(f"/proc/{trainer}/fd").iterdir() if link.is_symlink()]
    (stored,) = {Path(path).parent for path in opened if "/inflight-weights-" in path and path.endswith("/lock")}
    assert stored.exists()
    os.kill(trainer, signal.SIGKILL)
    assert run.wait(60) == 1
    assert not stored.exists()


def test_killed_run_takes_its_servers_and_trainers_with_it(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(2)
    processes = run.processes()
    run.kill()
    assert set(processes) == {"controller", "server-0", "trainer-0"}
    assert all(map(ends_within, processes.values()))


def test_reward_that_raises_ends_the_run_with_the_item_and_the_cause(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--task.params", "{ fail_from = 9 }", "--run.num_steps", "100000")
    assert run.wait(90) == 1
    assert "raised on item" in run.output()
    assert "ZeroDivisionError" in run.output()


def test_reward_that_hangs_ends_the_run_at_its_deadline(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--task.params", "{ hang_from = 9 }", "--task.reward_timeout_s", "2", "--run.num_steps", "100000")
    assert run.wait(90) == 1
    assert "took longer than 2 s" in run.output()


def test_loss_that_is_not_finite_stops_the_run_and_names_the_step(start_run: Callable[..., RunProcess]) -> None:
    settings = ("--run.mode", "conventional", "--run.conventional_steps", "2", "--run.checkpoint_every_steps", "1")
    diverging = ("--train.learning_rate", "1000", "--train.weight_decay", "1e12")
    run = start_run(*diverging, "--run.num_steps", "100000", *settings)
    assert run.wait(120) == 1
    assert "of step 2 is nan" in run.output()
    assert "Traceback" not in run.output()
    pointer = json.loads((run.directory / "checkpoints" / "latest.json").read_text())
    assert (run.directory / "checkpoints" / f"version-{pointer['version']:06d}" / "model.safetensors").exists()


def test_server_of_another_model_is_refused_before_any_byte_is_sent(
    start_run: Callable[..., RunProcess], start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", hidden_size=48)
    server = start_server(other)
    run = start_run("--servers.attach.urls", json.dumps([server.url]), environment={"INFLIGHT_TOKEN": "test-token"})
    assert run.wait(90) == 1
    assert "shapes differ" in run.output()


def test_prompts_longer_than_the_context_end_the_run_with_both_numbers(start_run: Callable[..., RunProcess]) -> None:
    limit = ("--train.max_tokens_per_micro_batch", "2048")
    run = start_run("--task.params", "{ prompt_tokens = 1200 }", *limit)
    assert run.wait(90) == 1
    assert "the prompt has 1201 tokens, but the context has only 1024" in run.output()


@pytest.mark.exhaustive
def test_prompts_that_are_refused_now_and_then_are_counted_and_the_run_goes_on_and_resumes(
    start_run: Callable[..., RunProcess],
) -> None:
    settings = ("--task.params", "{ overlong_every = 4 }", "--train.max_tokens_per_micro_batch", "2048")
    run = start_run(*settings, "--run.num_steps", "3")
    assert run.wait() == 0, run.output()
    assert "item 3 was dropped (unusable): the request was refused: " in run.output()
    assert "the prompt has 1201 tokens, but the context has only 1024" in run.output()
    before = run.summary()["ledger"]["dropped"]["unusable"]
    resumed = start_run(*settings, "--run.num_steps", "6", "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert resumed.summary()["ledger"]["dropped"]["unusable"] > before > 0
    assert "dropped groups: " in resumed.output()


def test_a_completion_that_no_micro_batch_holds_is_refused_before_anything_is_started(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--sampling.max_tokens", "512")
    assert run.wait(60) == 1
    assert "sampling.max_tokens 512 plus a prompt do not fit into train.max_tokens_per_micro_batch 512" in run.output()
    assert not run.directory.exists()


@pytest.mark.exhaustive
def test_a_task_without_signal_is_told_within_a_few_dozen_groups_and_counted_at_the_end(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--task.name", "tests.run.tasks:always_zero", "--run.step_timeout_s", "30")
    run.wait_for_output("the last 24 groups were dropped; dropped: 24 equal rewards")
    assert "have the reward 0, so there is no signal" in run.output()
    assert run.wait(90) == 1
    assert "Check whether all rewards are equal" in run.output()
    dropped = run.summary()["ledger"]["dropped"]["equal rewards"]
    assert f"dropped groups: {dropped:,} equal rewards" in run.output()


def test_full_disk_ends_the_run_with_what_could_not_be_written(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.checkpoint_every_steps", "1", max_file_bytes=65536)
    assert run.wait(90) == 1
    assert "checkpoint" in run.output()
    assert "File too large" in run.output()
    assert "Traceback" not in run.output()
    assert not list((run.directory / "checkpoints").glob("version-*"))


@pytest.mark.parametrize("policy", first_of_each(["recompute", "drain", "abort"], lambda _: "any"))
def test_every_in_flight_policy_trains(start_run: Callable[..., RunProcess], policy: str) -> None:
    # So much may be outstanding that no server is ever idle: requests run whenever an update comes.
    settings = ("--sampling.max_tokens", "100", "--rollouts.max_lag", "1000")
    run = start_run("--updates.in_flight", policy, "--run.num_steps", "4", *settings)
    assert run.wait() == 0, run.output()
    rows, summary = run.rows(), run.summary()
    assert [row["publish"]["version"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["mismatch_k3"] < 1e-4  # float32 on both sides
    if policy in ("drain", "abort"):
        assert set(summary["completions_by_num_versions"]) == {"1"}
    if policy == "abort":
        assert summary["ledger"]["requeued"] > 0


@pytest.mark.exhaustive
def test_reference_kl_is_zero_at_the_start_and_then_measured(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--loss.reference_kl", "0.05", "--run.num_steps", "3")
    assert run.wait() == 0, run.output()
    first, *_, last = [row["reference_kl_k3"] for row in run.rows()]
    assert abs(first) < 1e-6  # float32: the same weights on both sides
    assert last > 10 * abs(first)


def test_a_loss_that_counts_over_the_whole_step_trains_on_two_ranks(start_run: Callable[..., RunProcess]) -> None:
    """Second moments of all ranks, prompts of all ranks, and what corrections leave of both."""
    policy = """{
        gate = { kind = "ppo_clip" },
        corrections = [
            { kind = "second_moment", bound = 1e-15, between = "trainer/behaviour" },
            { kind = "max_age", versions = 8 },
        ],
        aggregation = { kind = "prompt_mean", counted = "after" },
    }"""
    run = start_run(
        *("--loss.policy", " ".join(policy.split()).replace(", ]", " ]").replace(", }", " }")),
        *("--loss.advantages", "batch_std", "--train.num_ranks", "2", "--run.num_steps", "3"),
        *("--run.mode", "conventional", "--run.conventional_steps", "3"),
    )
    assert run.wait() == 0, run.output()
    first, *later = run.rows()
    assert [row["lag_mean"] for row in run.rows()] == [0, 1, 2]
    # float32 on both sides: some logprobs differ in their last bit. Stale ones differ by more, nearly all of them.
    assert 0 < first["kept_fraction"] < 1
    assert first["effective_sample_size_used"] < first["effective_sample_size"]
    assert all(row["kept_fraction"] < first["kept_fraction"] for row in later)


def test_a_run_takes_its_task_and_its_policies_from_outside(start_run: Callable[..., RunProcess]) -> None:
    parts = tomllib.loads((ROOT / "examples" / "own_parts.toml").read_text())
    run = start_run(
        *("--task.name", parts["task"]["name"], "--task.params", '{ letter = "a" }'),
        *("--rollouts.staleness", parts["rollouts"]["staleness"], "--rollouts.composer", parts["rollouts"]["composer"]),
        *("--rollouts.composer_params", "{ num_groups = 3 }", "--run.num_steps", "2"),
        *("--rollouts.scheduler", parts["rollouts"]["scheduler"]),
        environment={"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "examples"))},
    )
    assert run.wait() == 0, run.output()
    assert run.summary()["ledger"]["trained"] == 6


@pytest.mark.parametrize(
    "scheduler",
    # The first predicts lengths from a history, the second cancels what it has more of than it needs.
    first_of_each(
        ["histopipe", "over_provision", *sorted(SCHEDULERS.keys() - {"least_loaded", "histopipe", "over_provision"})],
        lambda name: name == "over_provision",
    ),
)
def test_every_scheduler_trains_and_the_ledger_adds_up(start_run: Callable[..., RunProcess], scheduler: str) -> None:
    settings = ("--servers.count", "2", "--servers.max_concurrent", "16", "--run.num_steps", "4")
    run = start_run("--rollouts.scheduler", scheduler, *settings)
    assert run.wait() == 0, run.output()
    assert [row["version"] for row in run.rows()] == [1, 2, 3, 4]
    state = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())
    ledger = state["ledger"]
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])
    assert state["scheduler_name"] == scheduler
    assert len(state["history"]) > 4


@pytest.mark.parametrize(
    ("key", "name"),
    first_of_each(
        [
            *(("staleness", name) for name in STALENESS if name != "max_lag"),
            *(("composer", name) for name in COMPOSERS if name != "token_budget"),
        ],
        lambda case: case[0],
    ),
)
def test_every_policy_trains(start_run: Callable[..., RunProcess], key: str, name: str) -> None:
    more = ("--rollouts.min_ess", "0.01") if key == "staleness" else ()
    if name == "solvable_only":  # the rewards of the tests' task are small
        more = ("--rollouts.composer_params", "{ success = 0.0 }")
    run = start_run(f"--rollouts.{key}", name, "--run.num_steps", "3", *more)
    assert run.wait() == 0, run.output()
    assert [row["version"] for row in run.rows()] == [1, 2, 3]


def test_a_run_whose_effective_sample_size_is_too_low_stops_if_told_to(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--rollouts.min_ess", "1.0", "--rollouts.on_low_ess", "stop", "--train.learning_rate", "0.05")
    assert run.wait() == 1, run.output()
    assert "below rollouts.min_ess 1" in run.output()


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("mode", ["pipeline", "conventional"])
def test_a_run_that_is_killed_loses_nothing_and_trains_nothing_twice(
    start_run: Callable[..., RunProcess], scheduler: str, mode: str
) -> None:
    """Killed with everything at a moment of chance, and resumed from the last checkpoint, partial completions too."""
    killed_and_resumed(start_run, "--rollouts.scheduler", scheduler, "--run.mode", mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [name for name in STALENESS if name != "max_lag"])
@pytest.mark.parametrize("mode", ["pipeline", "conventional"])
def test_a_run_under_any_staleness_policy_that_is_killed_loses_nothing_and_trains_nothing_twice(
    start_run: Callable[..., RunProcess], staleness: str, mode: str
) -> None:
    """With a small bound, and an effective sample size that some steps fall below: the guard's state is restored."""
    policy = ("--rollouts.staleness", staleness, "--rollouts.max_lag", "2", "--rollouts.min_ess", "0.9")
    scheduler = ("--rollouts.scheduler", "over_provision") if mode == "conventional" else ()
    rows, state = killed_and_resumed(start_run, *policy, *scheduler, "--run.mode", mode)
    assert state["staleness_name"] == staleness
    assert set(state["staleness"]) == {"floor", "policy"}
    assert all(row["lag_max"] <= 2 for row in rows)
    if staleness != "windowed_fifo":  # which bounds the lag of each token, not of a completion's first
        assert all(int(age) <= 2 for row in rows for age in row["completions_by_age"])


COMPOSED = {
    "token_budget": "{}",
    "constant_tokens": "{ budget = 150 }",
    "shuffled_pairs": "{}",
    "solvable_only": "{ success = 0.03 }",
}
"""Each composer with parameters under which it leaves something of each group out."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("composer", COMPOSED)
@pytest.mark.parametrize("mode", ["pipeline", "conventional"])
def test_a_run_under_any_composer_that_is_killed_loses_nothing_and_trains_nothing_twice(
    start_run: Callable[..., RunProcess], tmp_path: Path, composer: str, mode: str
) -> None:
    """What a composer leaves out of a step is settled with its group, and a group that it drops is counted."""
    settings = ("--rollouts.composer", composer, "--rollouts.composer_params", COMPOSED[composer])
    rows, state = killed_and_resumed(start_run, *settings, "--run.mode", mode)
    for before, row in itertools.pairwise(rows):
        largest = GROUP_SIZE * (row["ledger"]["trained"] - before["ledger"]["trained"])
        assert 0 < row["num_step_sequences"] <= largest
        if composer == "shuffled_pairs":  # pairs: as many draws as there were completions
            assert row["num_step_sequences"] % 2 == 0
    if composer == "constant_tokens":
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert sum(summary["tokens_by_lag"].values()) == 150 * len(rows)
    if composer == "solvable_only":
        assert state["ledger"]["num_dropped"]["filtered"] > 0


def killed_and_resumed(
    start_run: Callable[..., RunProcess], *settings: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Kill a run with everything at a moment of chance, resume it for a few steps, and check its ledger.

    Returns the rows of both incarnations, and the state of the checkpoint that it was resumed from.
    """
    settings = (*settings, "--run.checkpoint_every_steps", "2")
    fleet = ("--servers.count", "2", "--servers.max_concurrent", "16")
    run = start_run(*settings, *fleet, "--run.num_steps", "100000")
    run.wait_for_steps(4)
    time.sleep(random.Random(" ".join(settings)).random())
    run.kill()
    checkpoints = run.directory / "checkpoints"
    version = json.loads((checkpoints / "latest.json").read_text())["version"]  # a later one may be half written
    state = json.loads((checkpoints / f"version-{version:06d}.json").read_text())
    saved = state["partials"]
    assert {int(item) for item in saved} <= {*state["ledger"]["unsettled"]}
    last = state["version"] + 4
    resumed = start_run(*settings, *fleet, "--run.num_steps", str(last), "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == [*range(1, last + 1)]
    after = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = after["num_trained"] + sum(after["num_dropped"].values())
    assert after["next_new"] == settled + len(after["unsettled"])
    assert after["num_trained"] > state["ledger"]["num_trained"]
    # An item is finished at most once in each incarnation of the run: saved parts are continued, not sampled again.
    items = [event["item"] for event in resumed.events("group")]
    assert max(Counter(items).values()) <= 2
    return resumed.rows(), state


def test_a_window_of_which_groups_are_dropped_does_not_hold_the_run_back(start_run: Callable[..., RunProcess]) -> None:
    run = start_run(
        *("--rollouts.staleness", "windowed_fifo", "--rollouts.max_lag", "1", "--run.num_steps", "6"),
        *("--task.name", "tests.run.tasks:teaches_half_the_time", "--run.step_timeout_s", "120"),
    )
    assert run.wait() == 0, run.output()
    assert run.summary()["ledger"]["dropped"]["equal rewards"] > 5


@pytest.mark.exhaustive
def test_groups_that_grow_too_old_while_they_run_are_aborted(start_run: Callable[..., RunProcess]) -> None:
    """Far more groups are under way than one step takes, and nothing may lag: what still runs then is abandoned."""
    run = start_run(
        *("--rollouts.staleness", "tests.run.tasks:OnPolicyWithoutAdmission", "--rollouts.max_lag", "0"),
        *("--sampling.max_tokens", "400", "--servers.max_concurrent", "64", "--run.num_steps", "3"),
    )
    assert run.wait() == 0, run.output()
    dropped = [event["item"] for event in run.events("item_dropped") if event["reason"] == "stale"]
    finished = {event["item"] for event in run.events("group")}
    assert dropped
    assert not finished & {*dropped}
    assert "was dropped (stale): the first tokens of all its completions are older" in run.output()
    assert {age for row in run.rows() for age in row["completions_by_age"]} == {"0"}
    ledger = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    assert ledger["num_dropped"]["stale"] >= len(dropped)
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])


@pytest.mark.exhaustive
def test_a_run_over_repeated_prompts_accepts_drafts_from_its_own_history(start_run: Callable[..., RunProcess]) -> None:
    """Four prompts come back again and again; the server drafts from what the run has sent it."""
    run = start_run(
        *("--servers.drafts", "history", "--task.name", "tests.run.tasks:repeated_prompts"),
        *("--train.learning_rate", "1e-2", "--run.num_steps", "100000"),
    )
    run.wait_for_steps(8)
    counters: dict[str, float] = {}

    def has_accepted() -> bool:
        lines = httpx.get(f"{run.server_urls()[0]}/metrics").text.splitlines()
        values = (line.split() for line in lines if not line.startswith("#"))
        counters.update((name, float(value)) for name, value in values)
        return counters["inflight_accepted_tokens_total"] > 100

    run.wait_until(has_accepted)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert counters["inflight_verifications_total"] > 10
    assert any(row["accepted_per_verification"] for row in run.rows())
    assert run.summary()["accepted_per_verification"] > 0
    assert counters["inflight_accepted_tokens_total"] <= counters["inflight_drafted_tokens_total"]
    assert all(row["mismatch_k3"] < 1e-4 for row in run.rows()[:1])  # float32 on both sides, drafted or not
    ledger = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])
    assert run.summary()["failure"] is None


# Rewards of the run's own process are in all other tests, and its curricula in test_curriculum.py.
@pytest.mark.parametrize("reward_processes", first_of_each([1, 0], lambda _: "any"))
def test_the_level_of_a_curriculum_follows_the_rewards_across_a_restart(
    start_run: Callable[..., RunProcess], reward_processes: int
) -> None:
    words = ("--task.levels", "[{ bonus = 10.0 }, { bonus = 5.0 }]", "--task.reward_processes", str(reward_processes))
    run = start_run(*words, "--run.num_steps", "12")
    assert run.wait() == 0, run.output()
    (change,) = re.findall(r"level 2 of 2 from item (\d+) on: the mean reward of the last 16 groups is", run.output())
    assert [row["level"] for row in run.rows()] == sorted(row["level"] for row in run.rows())
    assert run.rows()[-1]["level"] == 1
    resumed = start_run(*words, "--run.num_steps", "14", "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["level"] for row in run.rows()[12:]] == [1, 1]
    rewards = {event["item"]: event["rewards"] for event in run.events("group")}
    assert all((min(it) >= 10.0) == (item < int(change)) for item, it in rewards.items())
    assert max(rewards) > int(change)
