"""The command ``inflight check fleet``, put to real servers: the library's own, and faulty ones."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from inflight.cli import main
from tests.conformance.broken import require_no_crash
from tests.zygote import python

OWN = "-m inflight serve {model} --port {port} --token-file {token_file} --threads 1"
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(300)


def check_fleet(server: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what the command said, put to servers that are forked as it is."""
    command = [python(), "-m", "inflight", "check", "fleet", "--serve", f"{python()} {server}", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its servers
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_schedules_of_faults_hold_over_servers_of_the_embedded_engine(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    answer = check_fleet(OWN, "--schedules", "3", "--seed", "1", "--json", str(file))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    figures = json.loads(file.read_text())
    assert figures["failed"] == []
    assert set(figures["schedules"]) == {"shm", "file", "http"}
    assert figures["num_faults"] >= 3
    assert figures["num_tokens"] > 100
    assert any("kill" in site or "restart" in site for site in figures["injected"])
    assert figures["engine"] == "embedded"
    assert "3 schedules" in answer.stdout
    assert "inflight: 3 of 3, seed 3 over http" in answer.stderr


@pytest.mark.exhaustive
def test_servers_that_name_the_version_before_are_found_and_how_to_see_it_again_is_said() -> None:
    faulty = "-m tests.conformance.mutants.server 'one behind' {model} {port} {token_file}"
    answer = check_fleet(faulty, "--schedules", "1", "--servers", "1", "--transport", "shm", "--seed", "9")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    require_no_crash(answer.stdout + answer.stderr)
    assert re.search(r"token 0 is labelled version \d+, but has the logprob ", answer.stdout)
    assert "FAILED seed 9 over shm" in answer.stdout
    assert re.search(r"again: inflight check fleet --serve .* --servers 1 .*--schedules 1 --seed 9", answer.stdout)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "specify the command that starts a server"),
        (["--serve", "server {port}"], "must contain {model} and {port}"),
        (["--serve", "server {model} {port}", "--servers", "0"], "--servers must be at least 1, not 0"),
        (["--serve", "server {model} {port}", "--schedules", "0"], "--schedules must be at least 1, not 0"),
        (["--serve", "server {model} {port}", "--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--serve", "server {model} {port}", "--deadline-scale", "nan"], "--deadline-scale must be a number above 0"),
        (["--serve", "server {model} {port}", "--json", "absent/f.json"], "its directory does not exist"),
        (["--serve", "absent-program {model} {port}"], "'absent-program' cannot be started"),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    assert main(["check", "fleet", *words]) == 1
    assert complaint in capsys.readouterr().err
