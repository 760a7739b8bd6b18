"""Files that no command can use: each ends in one line that names the file or the key, and never in a traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from inflight.cli import TRACEBACK_VARIABLE, main
from tests.zygote import python

MINIMAL = '[run]\ndirectory = "runs/x"\n[model]\npath = "models/x"\n[task]\nname = "spell_backward"\n'
CONFIGURATIONS = {
    "binary": bytes(range(256)),
    "UTF-16": MINIMAL.encode("utf-16"),
    "deep": b"a = " + b"[" * 5000,
    "deep tables": b"a = " + b"{ a = " * 5000,
    "number of many digits": b"a = " + b"9" * 5000,
    "NUL in the path of the model": MINIMAL.replace("models/x", "models/\\u0000x").encode(),
    "NUL in the directory": MINIMAL.replace("runs/x", "runs/\\u0000x").encode(),
    "line in the directory": MINIMAL.replace("runs/x", "runs/x\\ntouch /tmp/owned").encode(),
    "date": b"a = 9999-99-99",
    "long": b"#" * (17 << 20),
}
LINES = {
    "no JSON": b"{\n",
    "binary": b"\xff\xfe\x00\n",
    "deep": b"[" * 100_000 + b"\n",
    "number": b"1\n",
    "no kind": b"{}\n",
    "no fields": b'{"kind": "run_started"}\n',
    "wrong fields": b'{"kind": "run_started", "schema_version": "x", "began_at": null}\n',
    "request without fields": b'{"kind": "request", "start_s": 0, "end_s": 1}\n',
    "wrong types": b'{"kind": "group", "item": [], "start_s": "a", "end_s": {}}\n',
}


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a command which failed has printed."""
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("inflight: "), said
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize(
    "words", [["train"], ["train", "--dry-run"], ["launch", "--emit", "sbatch"], ["plan"]], ids=lambda it: " ".join(it)
)
def test_a_configuration_that_cannot_be_read_is_named(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_bytes(CONFIGURATIONS[name])
    said = run([*words, str(config)], capsys)
    assert str(config) in said
    assert "unexpected" not in said


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000, "a\x00b"], ids=["deep", "digits", "NUL"])
def test_an_override_that_cannot_be_read_is_named(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(MINIMAL)
    said = run(["train", str(config), "--run.metrics_port", value], capsys)
    assert "run.metrics_port" in said
    assert "unexpected" not in said


@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl", "events.1.jsonl", "events.1.jsonl.zst"])
@pytest.mark.parametrize("name", LINES)
def test_damaged_events_are_reported_in_one_line(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_bytes(LINES[name])
    (tmp_path / "events.x.jsonl").touch()
    said = run(["report", str(tmp_path), "--output", str(tmp_path / "report.html")], capsys)
    if name in ("no JSON", "binary", "deep", "number"):
        assert "unexpected" not in said


def test_an_error_that_no_code_expects_says_where_it_was_raised_and_how_to_see_more(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(LINES["wrong types"])
    command = [python(), "-m", "inflight", "report", str(tmp_path)]
    short = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert short.stderr.startswith("inflight: unexpected TypeError: ")
    assert ".py, line " in short.stderr
    env = {TRACEBACK_VARIABLE: "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    whole = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert "Traceback" in whole.stderr
