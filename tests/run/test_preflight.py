"""What is checked before a process starts: ``train`` and its dry run refuse configurations with the same message."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.errors import ConfigError
from inflight.run.config import RunConfig, load_config
from inflight.run.machines.devices import described_devices
from inflight.run.preflight import Hosts, Machine, preflight
from inflight.run.record.run_directory import claim
from tests.run.runs import CONFIG

HERE = Hosts("127.0.0.1", 0, None, can_outlive=True)
LORA = ("--train.lora.rank", "4", "--train.lora.alpha", "8")


@pytest.fixture
def file(tmp_path: Path, model_dir: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    return path


def refused_alike(file: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which both commands refuse a configuration; neither changes the run's directory."""
    before = sorted((file.parent / "run").rglob("*"))
    said = []
    for more in ([], ["--dry-run"]):
        assert main(["train", str(file), *words, *more]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        said.append(err)
    assert said[0] == said[1]
    assert sorted((file.parent / "run").rglob("*")) == before
    return said[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task.name", "nonsense"], "nonsense"),
        (["--task.extra_episodes", "1"], "task.extra_episodes is for environments"),
        (["--loss.preset", "nonsense"], "nonsense"),
        (["--rollouts.scheduler", "nonsense"], "unknown scheduler 'nonsense'"),
        (["--rollouts.staleness_params", "{ colour = 1 }"], "colour"),
        (["--rollouts.composer", "nonsense"], "unknown batch composer 'nonsense'"),
        (["--run.trackers", "wanbd"], "wanbd"),
        (["--run.tracker_options", "{ wandb = {} }"], "run.tracker_options has 'wandb'"),
        (["--run.trackers", "builtins:dict"], "is a dict, not a Tracker"),
        (["--run.launcher", "nonsense"], "unknown launcher 'nonsense'"),
        (["--model.path", "absent"], "model directory 'absent' does not exist"),
        (["--train.devices", "[7]", "--train.device", "cpu"], "train.devices names GPUs"),
        ([*LORA, "--train.lora.targets", '["w_q"]'], "is named 'w_q'"),
        (["--servers.python", "absent", "--servers.engine", "vllm"], "'absent' is not an interpreter"),
        (["--resume"], "holds no run to resume"),
        (["--run.directory", "/dev/null/run"], "cannot be used: Not a directory"),
    ],
    ids=lambda it: it if isinstance(it, str) else None,
)
def test_train_and_its_dry_run_refuse_a_configuration_with_the_same_message(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert expected in refused_alike(file, words, capsys)


@pytest.mark.parametrize("key", ["run.metrics_port", "servers.attach.join"])
def test_both_refuse_a_port_that_is_taken(file: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        at = str(port) if key == "run.metrics_port" else f"127.0.0.1:{port}"
        assert f"cannot listen on 127.0.0.1:{port}" in refused_alike(file, [f"--{key}", at], capsys)


def test_both_refuse_a_model_without_a_tokenizer_or_with_weights_that_are_cut_off(
    file: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    assert str(weights) in refused_alike(file, ["--model.path", str(model)], capsys)
    shutil.copy(model_dir / "model.safetensors", weights)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in refused_alike(file, ["--model.path", str(model)], capsys)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the tokenizer has no chat template"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "omits system messages"),
        ("{{ raise_exception('no system role') }}", "no system role"),
    ],
)
def test_both_refuse_a_system_prompt_that_the_chat_template_does_not_render(
    file: Path,
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    problem: str,
) -> None:
    model = shutil.copytree(model_dir, tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    for path in model.glob("*.jinja"):
        if template is None:
            path.unlink()
    message = refused_alike(file, ["--model.path", str(model), "--task.system_prompt", "Be brief."], capsys)
    assert problem in message
    assert "task.system_prompt" in message


@pytest.fixture
def occupied(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run that has a checkpoint and is owned by this process."""
    directory = claim(tmp_path / "run", "{}", resume=False, note=print)
    (directory.path / "checkpoints" / "version-000001.json").write_text(json.dumps({"version": 1}))
    (directory.path / "checkpoints" / "latest.json").write_text(json.dumps({"version": 1}))
    yield directory.path
    directory.release()


def test_both_refuse_a_directory_that_another_process_owns(
    file: Path, occupied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"belongs to a run that has not ended (process {os.getpid()} on" in refused_alike(file, [], capsys)


def test_both_refuse_to_overwrite_a_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(tmp_path / "run", "{}", resume=False, note=print)
    (directory.path / "checkpoints" / "version-000001.json").write_text(json.dumps({"version": 1}))
    (directory.path / "checkpoints" / "latest.json").write_text(json.dumps({"version": 1}))
    directory.release()
    assert "already holds a run: continue it with --resume" in refused_alike(file, [], capsys)


def test_preflight_starts_no_process_writes_nothing_and_leaves_no_port_bound(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machine = Machine(HERE, devices=lambda: ())
    preflight(load_config(file, ["--run.metrics_port", str(port)]), machine)
    assert list(tmp_path.iterdir()) == [file]
    socket.create_server(("127.0.0.1", port)).close()


def of(file: Path, *words: str) -> RunConfig:
    return load_config(file, words)


@pytest.mark.parametrize(
    ("hosts", "words", "expected"),
    [
        (Hosts("10.0.0.1", 0, 2, can_outlive=False), ("--servers.colocated", "true"), "servers.colocated shares"),
        (Hosts("10.0.0.1", 0, 2, can_outlive=False), ("--servers.lease_s", "10"), "servers.lease_s lets servers"),
        (Hosts("10.0.0.1", 9000, 0, can_outlive=False), (), "starts no servers"),
        (Hosts("10.0.0.1", 0, 1, can_outlive=False), (), "the run needs 2 GPUs, but the hosts"),
    ],
)
def test_what_the_hosts_of_a_launcher_cannot_do_is_refused(
    file: Path, hosts: Hosts, words: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        preflight(of(file, *words), Machine(hosts))


def test_memory_is_checked_on_every_gpu_whether_or_not_it_is_shared(file: Path) -> None:
    small = described_devices("2x1GiB")
    with pytest.raises(ConfigError, match="GPU 0 is estimated to need"):
        preflight(of(file), Machine(HERE, devices=lambda: small))
    prepared = preflight(of(file), Machine(HERE, devices=lambda: described_devices("2x80GiB")))
    assert [use.processes for use in prepared.uses] == [("trainer-0",), ("server-0",)]


def test_a_server_on_another_machine_that_weights_cannot_reach_is_refused(file: Path) -> None:
    words = ("--servers.attach.urls", '["http://203.0.113.2:8000"]')
    elsewhere = Machine(HERE, devices=lambda: (), is_this_machine=lambda host: False)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.2:8000 is on another machine.*set updates\.address"):
        preflight(of(file, *words), elsewhere)
    here = Machine(HERE, devices=lambda: (), is_this_machine=lambda host: host == "203.0.113.2")
    assert preflight(of(file, *words), here).attached == ("http://203.0.113.2:8000",)
