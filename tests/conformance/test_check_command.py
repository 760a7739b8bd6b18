"""The command ``inflight check``: what its arguments mean, and what it refuses before anything is run."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inflight.cli import main
from inflight.commands.check import add_arguments, target_of
from inflight.conformance.checks import LEVELS, Kind
from inflight.conformance.child import checks_of
from inflight.conformance.report.files import certificate_json
from inflight.conformance.targets import EndpointTarget, TransportTarget, WorkerTarget
from inflight.errors import ConfigError
from tests.conformance.certificates import FAILED, PASSED, certificate, verdict
from tests.servers import ServerProcess

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFLIGHT_TOKEN", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command indicates when it refuses these words, with status 1 and nothing on standard output."""
    assert main(["check", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inflight: ")
    return err


# ---------------------------------------------------------------------------------------------------------------
# Targets


def test_an_endpoint_is_a_url_a_factory_or_a_command(tmp_path: Path) -> None:
    assert target_of(parsed("endpoint", "http://127.0.0.1:8000/")) == EndpointTarget(url="http://127.0.0.1:8000")
    assert target_of(
        parsed("endpoint", "mine.engines:connect", "--option", "slots=4", "--tolerance", "1e-3", "--worker", "fsdp")
    ) == EndpointTarget(
        factory="mine.engines:connect", options={"slots": 4}, tolerance=1e-3, worker="inflight_fsdp:FSDP"
    )
    command = "serve {model} --port {port} --token-file {token_file}"
    target = target_of(parsed("endpoint", "--serve", command, "--model", str(tmp_path)))
    assert target == EndpointTarget(command=command, model=tmp_path)


def test_the_token_of_a_url_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(*words: str) -> str | None:
        target = target_of(parsed("endpoint", *words))
        assert isinstance(target, EndpointTarget)
        return target.token

    assert token("http://127.0.0.1:8000") is None
    monkeypatch.setenv("INFLIGHT_TOKEN", "from-environment")
    assert token("http://127.0.0.1:8000") == "from-environment"
    assert token("mine.engines:connect") is None
    (tmp_path / "token").write_text("from-file\n")
    assert token("http://127.0.0.1:8000", "--token-file", str(tmp_path / "token")) == "from-file"


def test_a_server_whose_token_is_missing_is_refused_before_the_first_check(
    shared_server: ServerProcess, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "endpoint", shared_server.url, "--model", str(model_dir), "--check", "E-11"]) == 1
    captured = capsys.readouterr()
    assert "is missing. Pass the server's token as token=, or to a command with --token-file or $" in captured.err
    assert captured.out == ""


def test_a_worker_is_a_factory_or_the_name_of_an_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of(parsed("worker", "mine:create", "--ranks", "2")) == WorkerTarget(
        factory="mine:create", num_ranks=2
    )
    assert target_of(parsed("worker", "fsdp")) == WorkerTarget(factory="inflight_fsdp:FSDP")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert target_of(parsed("worker", "fsdp")) == WorkerTarget(factory="inflight_fsdp:FSDP", num_ranks=4)
    with pytest.raises(ConfigError, match="--ranks 2, but torchrun started 4"):
        target_of(parsed("worker", "fsdp", "--ranks", "2"))
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        target_of(parsed("worker", "fsdp"))


def test_a_transport_is_a_known_name_or_a_factory() -> None:
    assert target_of(parsed("transport", "gloo")) == TransportTarget(factory="gloo")
    assert target_of(parsed("transport", "mine.wires:pair")) == TransportTarget(factory="mine.wires:pair")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["endpoint"], "specify which endpoint"),
        (["endpoint", "http://h:1", "--serve", "x {port}"], "exactly one of"),
        (["endpoint", "ftp://host"], "is not the URL"),
        (["endpoint", "http://host:notaport"], "is not the URL"),
        (["endpoint", "no-module"], "neither a URL nor module:function"),
        (["endpoint", "http://h:1", "--model", "absent-directory"], "--model 'absent-directory' is not a directory"),
        (["endpoint", "http://h:1", "--tolerance", "0"], "--tolerance must be"),
        (["endpoint", "http://h:1", "--tolerance", "nan"], "--tolerance must be"),
        (["endpoint", "http://h:1", "--option", "a=1"], "a URL accepts none"),
        (["endpoint", "http://h:1", "--token-file", "absent-file"], "token file 'absent-file' cannot be read"),
        (["endpoint", "m:f", "--token-file", "absent-file"], "--token-file is for a URL"),
        (
            ["endpoint", "m:f", "--worker", "unheard-of"],
            "worker 'unheard-of' is not installed; installed workers: .*fsdp",
        ),
        (["endpoint", "--serve", "server --port 8000"], "must contain {port}"),
        (["endpoint", "--serve", "server {port}", "--option", "a=1"], "write options of the server"),
        (["worker"], "specify which worker"),
        (["worker", "unheard-of"], "worker 'unheard-of' is not installed; installed workers: .*fsdp"),
        (["worker", "m:"], "'m:'"),
        (["worker", "m:f", "--ranks", "0"], "--ranks must be at least 1"),
        (["worker", "m:f", "--option", "no-value"], "'no-value' is not KEY=VALUE"),
        (["worker", "m:f", "--option", "=1"], "'=1' is not KEY=VALUE"),
        (["worker", "m:f", "--option", "model_path=models/x"], "the worker checks create their own models"),
        (["worker", "m:f", "--option", "a=1", "--option", "a=2"], "--option a is specified twice"),
        (["transport"], "specify which transport"),
        (["transport", "pigeon"], "unknown transport 'pigeon'; known: file, gloo, http, ipc, nccl, shm"),
        (["worker", "m:f", "--json", "absent-directory/c.json"], "its directory does not exist"),
        (["worker", "m:f", "--json", "c", "--html", "c"], "names the same file"),
        ([], "specify what to check"),
        (["--compare", "absent.json", "absent.json"], "certificate 'absent.json' cannot be read"),
        (["--compare", "a.json", "b.json", "worker", "m:f"], "--compare does not run checks"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert re.search(complaint, refused(capsys, *words))


@pytest.mark.parametrize("words", [["pigeon"], ["worker", "m:f", "--ranks", "two"], ["worker", "m:f", "--serve", "x"]])
def test_wrong_usage_is_for_the_parser(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", *words])
    assert caught.value.code == 2


# ---------------------------------------------------------------------------------------------------------------
# Options


@given(JSON)
def test_an_option_is_json_if_it_can_be(value: Any) -> None:
    assert target_of(parsed("worker", "m:f", f"--option=key={json.dumps(value)}")).options == {"key": value}


def strict_json(text: str) -> Any:
    """Return what a text is in JSON, which has neither NaN nor infinities."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("NaN")
def test_any_other_option_is_a_string_and_all_survive_the_way_to_the_child(text: str) -> None:
    target = target_of(parsed("worker", "m:f", f"--option=key={text}"))
    assert WorkerTarget.model_validate_json(target.model_dump_json()) == target
    try:
        assert target.options == {"key": strict_json(text)}
    except ValueError:
        assert target.options == {"key": text}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[NaN]", "[" * 100_000, "9" * 5_000])
def test_what_only_python_would_read_stays_a_string(text: str) -> None:
    assert target_of(parsed("worker", "m:f", f"--option=key={text}")).options == {"key": text}


# ---------------------------------------------------------------------------------------------------------------
# Comparing, and what is loaded


def test_comparing_ends_with_status_1_if_something_regressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(certificate_json(certificate(PASSED, verdict("E-02", PASSED.outcome))))
    bad.write_text(certificate_json(certificate(PASSED, FAILED)))
    assert main(["check", "--compare", str(good), str(bad)]) == 1
    assert "regressions (1)" in capsys.readouterr().out
    assert main(["check", "--compare", str(bad), str(good)]) == 0
    assert "fixed (1)" in capsys.readouterr().out


def test_certificates_and_reports_need_no_torch() -> None:
    code = """
import sys
import inflight.cli, inflight.conformance.compare, inflight.conformance.report.files, inflight.conformance.suite
import inflight.conformance.report.terminal
print([name for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["endpoint", "worker", "transport"])
def test_the_levels_of_each_kind_are_those_of_its_checks(kind: Kind) -> None:
    assert tuple(dict.fromkeys(check.level for check in checks_of(kind))) == LEVELS[kind]


@pytest.mark.parametrize("words", [["--level"], ["--level", "nope"], ["--level", "--list"]])
def test_a_level_that_is_missing_or_unknown_is_answered_with_those_that_exist(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "transport", "gloo", *words)
    assert said.startswith("inflight: no such level: nope" if "nope" in words else "inflight: --level needs a name")
    assert said.endswith("; the levels of transport checks are group, bytes, failures, abort\n")


def test_the_help_lists_the_levels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "transport", "--help"])
    assert "the levels are group, bytes, failures, abort" in " ".join(capsys.readouterr().out.split())
