"""Who owns a run directory, where a run begins in it, and what is in it after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.model.checkpoints import load_causal_lm
from inflight.run.config import load_config
from inflight.run.record.run_directory import RunDirectory, claim
from inflight.run.run import train
from tests.run.runs import CONFIG, RunProcess, ends_within
from tests.zygote import python

pytestmark = pytest.mark.timeout(300)


def own(path: Path, *, resume: bool = False, notes: list[str] | None = None) -> RunDirectory:
    return claim(path, "{}", resume=resume, note=(notes if notes is not None else []).append)


def checkpointed(path: Path, *versions: int) -> None:
    """Leave in a run directory what checkpoints of these versions are to it."""
    for version in versions:
        (path / "checkpoints" / f"version-{version:06d}").mkdir()
        (path / "checkpoints" / f"version-{version:06d}.json").write_text(json.dumps({"version": version}))
    (path / "checkpoints" / "latest.json").write_text(json.dumps({"version": versions[-1]}))


HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from inflight.run.record.run_directory import claim
owned = claim(Path(sys.argv[1]), "{}", resume=False, note=print)
child = subprocess.Popen(["sleep", "600"], pass_fds=(owned.lock,), start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Process ids of one that owns ``tmp_path / "run"``, and of its child, which outlives it."""
    (program := tmp_path / "holder.py").write_text(HOLDER)
    words = [python(), str(program), str(tmp_path / "run")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, child = map(int, process.stdout.readline().split())
    yield pid, child
    process.kill()
    process.wait()
    process.stdout.close()
    if not ends_within(child, 0.0):
        os.kill(child, signal.SIGKILL)


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    assert ends_within(process)


def test_a_second_run_in_a_directory_is_refused_and_told_whose_it_is(tmp_path: Path, owner: tuple[int, int]) -> None:
    process, _ = owner
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"belongs to a run that has not ended .process {process} on "):
            own(tmp_path / "run", resume=resume)
    os.kill(process, signal.SIGSTOP)  # asleep is not gone
    with pytest.raises(ConfigError, match="belongs to a run that has not ended"):
        own(tmp_path / "run", resume=True)


def test_what_a_killed_run_has_left_is_killed_before_the_next_one_begins(
    tmp_path: Path, owner: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.run.record.run_directory._ORPHANS_S", 0.5)
    process, child = owner
    end(process)
    notes: list[str] = []
    owned = own(tmp_path / "run", notes=notes)
    assert ends_within(child)
    assert f"killing processes of the previous run: {child}" in notes
    owned.release()


def test_an_owner_that_is_being_killed_is_waited_for(
    tmp_path: Path, owner: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the signal and the end of a process it still holds what it held."""
    monkeypatch.setattr("inflight.run.record.run_directory._ORPHANS_S", 0.5)
    process, child = owner
    dying = threading.Timer(1.0, os.kill, (process, signal.SIGKILL))
    dying.start()
    own(tmp_path / "run").release()
    dying.join()
    assert ends_within(child)


def test_one_that_waits_for_the_lock_is_not_taken_for_what_a_killed_run_has_left(
    tmp_path: Path, owner: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.run.record.run_directory._ORPHANS_S", 0.5)
    process, child = owner
    with (tmp_path / "run" / "lock").open() as lock:
        waiting = subprocess.Popen(["sleep", "600"], stdin=lock)
    try:
        end(process)
        own(tmp_path / "run").release()
        assert ends_within(child)
        assert waiting.poll() is None
    finally:
        waiting.kill()
        waiting.wait()


def test_a_directory_that_was_released_can_be_owned_again(tmp_path: Path) -> None:
    own(tmp_path / "run").release()
    own(tmp_path / "run").release()


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew_with_or_without_resume(tmp_path: Path) -> None:
    first = own(tmp_path / "run")
    first.release()
    for resume in (False, True):
        notes: list[str] = []
        owned = own(tmp_path / "run", resume=resume, notes=notes)
        owned.release()
        assert (owned.checkpoint, owned.state) == (None, None)
        assert owned.run_id != first.run_id  # servers that know the first one hold later versions
        assert "ended before its first checkpoint, so it starts over" in notes[0]


def test_a_run_with_a_checkpoint_is_resumed_only_by_word_and_keeps_its_name(tmp_path: Path) -> None:
    first = own(tmp_path / "run")
    first.release()
    checkpointed(tmp_path / "run", 3)
    with pytest.raises(ConfigError, match="already holds a run: continue it with --resume"):
        own(tmp_path / "run")
    owned = own(tmp_path / "run", resume=True)
    owned.release()
    assert owned.run_id == first.run_id
    assert owned.checkpoint == tmp_path / "run" / "checkpoints" / "version-000003"
    assert owned.state == {"version": 3}


def test_a_directory_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume: start a new run without --resume"):
        own(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_what_was_begun_and_not_finished_is_removed_and_nothing_else(tmp_path: Path) -> None:
    own(tmp_path / "run").release()
    checkpointed(tmp_path / "run", 3, 6)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / ".version-000009.new").mkdir()
    (checkpoints / "version-000009").mkdir()
    (checkpoints / "version-000009.json").write_text("{")
    (checkpoints / ".latest.json.4321.partial").write_text("{")
    own(tmp_path / "run", resume=True).release()
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest.json", *(f"version-00000{v}{end}" for v in (3, 6) for end in ("", ".json"))]


def test_a_broken_checkpoint_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    own(tmp_path / "run").release()
    checkpointed(tmp_path / "run", 3)
    (tmp_path / "run" / "checkpoints" / "version-000003.json").write_text("{")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"the checkpoint in .* cannot be read"):
            own(tmp_path / "run", resume=resume)


SETTINGS = {"run": {"seed": 0, "mode": "pipeline"}, "task": {"name": "a", "params": {}}, "sampling": {"group_size": 4}}


@pytest.mark.parametrize(("section", "key", "value"), [("task", "name", "b"), ("run", "seed", 1)])
def test_a_run_is_not_continued_with_another_task_or_seed(
    tmp_path: Path, section: str, key: str, value: object
) -> None:
    claim(tmp_path / "run", json.dumps(SETTINGS), resume=False, note=print).release()
    checkpointed(tmp_path / "run", 3)
    before = (tmp_path / "run" / "config.json").read_text()
    changed = {**SETTINGS, section: {**SETTINGS[section], key: value}}
    with pytest.raises(ConfigError, match=rf"cannot be continued .*: {section}\.{key} .* -> {value!r}"):
        claim(tmp_path / "run", json.dumps(changed), resume=True, note=print)
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_settings_that_have_changed_are_told_and_written_down_and_no_completion_of_other_prompts_is_continued(
    tmp_path: Path,
) -> None:
    claim(tmp_path / "run", json.dumps(SETTINGS), resume=False, note=print).release()
    checkpointed(tmp_path / "run", 3)
    state = tmp_path / "run" / "checkpoints" / "version-000003.json"
    state.write_text(json.dumps({"version": 3, "partials": {"7": [None]}}))
    for changed, partials in (
        ({**SETTINGS, "sampling": {"group_size": 8}, "run": {"seed": 0, "mode": "conventional"}}, {"7": [None]}),
        ({**SETTINGS, "task": {"name": "a", "params": {"hard": True}}}, {}),
    ):
        notes: list[str] = []
        owned = claim(tmp_path / "run", json.dumps(changed), resume=True, note=notes.append)
        owned.release()
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == changed
        assert owned.state == {"version": 3, "partials": partials}
        assert "settings that have changed since this run was started" in notes[0]
        assert ("sampling.group_size 4 -> 8" in notes[0]) == bool(partials)
        assert ("task.params {} -> {'hard': True}" in notes[0]) == (not partials)


@pytest.mark.parametrize("pointer", [None, "", '{"version": 6', '{"version": 7}'])
def test_nothing_is_deleted_and_nothing_begins_anew_where_the_pointer_is_missing_or_damaged(
    tmp_path: Path, pointer: str | None
) -> None:
    own(tmp_path / "run").release()
    checkpointed(tmp_path / "run", 3, 6)
    checkpoints = tmp_path / "run" / "checkpoints"
    latest = checkpoints / "latest.json"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    before = sorted(checkpoints.iterdir())
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"latest.json' is missing" if pointer is None else "cannot be read"):
            own(tmp_path / "run", resume=resume)
        assert sorted(checkpoints.iterdir()) == before


def test_a_later_checkpoint_that_is_complete_and_files_of_the_user_are_kept(tmp_path: Path) -> None:
    own(tmp_path / "run").release()
    checkpointed(tmp_path / "run", 6, 3)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "version-000006-copy").mkdir()
    (checkpoints / "notes.txt").touch()
    own(tmp_path / "run", resume=True).release()
    names = sorted(path.name for path in checkpoints.iterdir() if not path.name.startswith("unused-"))
    assert names == ["latest.json", "notes.txt", "version-000003", "version-000003.json", "version-000006-copy"]
    unused = sorted(path.name.split("-", 2)[2] for path in checkpoints.glob("unused-*"))
    assert unused == ["version-000006", "version-000006.json"]


# --------------------------------------------------------------------------------------------------- as a user sees it


def test_a_checkpoint_with_flipped_bytes_is_refused_and_the_intact_one_before_it_is_offered(
    start_run: Callable[..., RunProcess],
) -> None:
    words = ("--run.checkpoint_every_steps", "1")
    run = start_run("--run.num_steps", "2", *words)
    assert run.wait() == 0, run.output()
    checkpoints = run.directory / "checkpoints"
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        damaged = checkpoints / "version-000002" / file
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-64] + bytes(255 - byte for byte in whole[-64:]))
        again = start_run("--run.num_steps", "3", "--resume", *words)
        assert again.wait() == 1
        refusal = again.output().rpartition(f"{damaged.name} is damaged: bytes 0 to {len(whole) - 1} differ")
        assert refusal[1], again.output()
        assert 'The checkpoint of version 1 is intact: to continue from it, write {"version": 1}' in refusal[2]
        if file == "model.safetensors":
            with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
                load_causal_lm(checkpoints / "version-000002", attention="sdpa")
            damaged.write_bytes(whole)
    (checkpoints / "latest.json").write_text('{"version": 1}')
    last = start_run("--run.num_steps", "2", "--resume", *words)
    assert last.wait() == 0, last.output()


def test_a_run_that_is_killed_and_resumed_has_each_step_once(start_run: Callable[..., RunProcess]) -> None:
    words = ("--run.num_steps", "100000", "--run.checkpoint_every_steps", "4", "--run.trackers", "tensorboard")
    run = start_run(*words)
    run.wait_for_steps(7)
    run.kill()
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"version": 9, "rew')  # a kill in the middle of a line
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    checkpoint = json.loads((run.directory / "checkpoints" / "latest.json").read_text())["version"]
    resumed = start_run("--run.num_steps", str(checkpoint + 6), "--resume", "--run.trackers", "tensorboard")
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == list(range(1, checkpoint + 7))
    times = [row["time_s"] for row in resumed.rows()]
    assert times == sorted(times)
    assert resumed.events("train")
    assert (run.directory / "plots" / "timeline.png").exists()


@pytest.mark.exhaustive
def test_a_run_beside_a_live_one_is_refused_and_the_live_one_goes_on(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(4)
    for words in (("--resume",), ()):
        second = start_run(*words)
        assert second.wait(60) == 1
        assert f"belongs to a run that has not ended (process {run.processes()['controller']} on " in second.output()
        assert "Traceback" not in second.output()
    run.wait_for_steps(len(run.rows()) + 2)
    run.interrupt()
    assert run.wait() == 130, run.output()


@pytest.mark.exhaustive
def test_a_run_that_failed_before_its_first_checkpoint_is_started_by_the_same_command(
    start_run: Callable[..., RunProcess],
) -> None:
    failing = start_run("--task.params", "{ fail_from = 9 }", "--run.num_steps", "100000")
    assert failing.wait(90) == 1
    assert "--resume" in failing.output()  # and that works, too
    again = start_run("--run.num_steps", "2")
    assert again.wait() == 0, again.output()
    assert [row["version"] for row in again.rows()] == [1, 2]
    assert "ended before its first checkpoint, so it starts over" in again.output()


@pytest.mark.exhaustive
def test_a_run_whose_servers_outlive_it_a_little_is_resumed_after_they_have_ended(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--run.num_steps", "100000", "--servers.count", "2")
    run.wait_for_steps(4)
    asleep, other = run.servers()
    os.kill(asleep, signal.SIGSTOP)  # it cannot see that its run is gone
    run.kill()
    started = time.monotonic()
    resumed = start_run("--run.num_steps", "5", "--servers.count", "2", "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert time.monotonic() - started < 120
    assert "killing processes of the previous run" in resumed.output()
    assert ends_within(asleep, 0.1) and ends_within(other, 0.1)


def test_a_checkpoint_that_is_not_whole_is_named_before_anything_is_started(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run("--run.num_steps", "1")
    assert run.wait() == 0, run.output()
    weights = run.directory / "checkpoints" / "version-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    again = start_run("--run.num_steps", "2", "--resume")
    assert again.wait(60) == 1
    assert str(weights) in again.output()
    assert "starting servers" not in again.output().split("written to")[-1]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (("--run.metrics_port", "PORT"), "choose another run.metrics_port"),
        (("--servers.attach.join", "127.0.0.1:PORT"), "choose another address for servers.attach.join"),
        (
            (
                "--run.launcher",
                "outside",
                "--run.launcher_options",
                "{ port = PORT }",
                "--servers.attach.join",
                "127.0.0.1:0",
            ),
            "choose another port in run.launcher_options",
        ),
    ],
)
def test_a_port_that_is_taken_is_refused_before_anything_is_written(
    tmp_path: Path, model_dir: Path, settings: tuple[str, ...], remedy: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        config = load_config(file, [word.replace("PORT", port) for word in settings])
        with pytest.raises(ConfigError, match=rf"cannot listen on \S+:{port}: Address already in use; {remedy}"):
            train(config)
    assert not config.run.directory.exists()
