"""The command line: what it loads, what every command has, and how words that it does not know are refused."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys

import pytest

from inflight.cli import COMMANDS, command_parser, main
from inflight.commands.shared import print_line, print_progress
from inflight.run.record.console import Progress


def test_a_command_is_imported_only_when_it_is_used() -> None:
    code = """
import contextlib, io, sys
from inflight.cli import main
def loaded():
    return sorted(name for name in sys.modules if name.startswith("inflight.commands."))
with contextlib.redirect_stdout(io.StringIO()):
    try:
        main(["--help"])
    except SystemExit:
        print(loaded(), file=sys.stderr)
    main(["policies"])
print(loaded(), "torch" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr == "[]\n"
    assert answer.stdout == "['inflight.commands.policies'] False\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_describes_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"inflight.commands.{COMMANDS[name].module}")
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: inflight {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_that_it_accepts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, command, *words = shlex.split(COMMANDS[name].example.partition(" > ")[0])
    assert (program, command) == ("inflight", name)
    assert command_parser(name).parse_args(words)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert COMMANDS[name].example in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--", "losses"], "the command comes first"),
        (["unknown"], "invalid choice: 'unknown'"),
        ([], "the following arguments are required: COMMAND"),
        (["losses", "grpo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_unknown_words_are_refused_with_the_status_of_wrong_usage(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [(["check", "worker", "a:b"], "rich", "conformance"), (["tinker", "model"], "google.protobuf", "tinker")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(words: list[str], package: str, extra: str) -> None:
    code = "import sys; sys.modules[sys.argv[1]] = None; from inflight.cli import main; sys.exit(main(sys.argv[2:]))"
    answer = subprocess.run([sys.executable, "-c", code, package, *words], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert f"{package} is not installed; pip install 'inflight[{extra}]'" in answer.stderr


def test_what_a_server_says_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "gone\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\ud800\r"
    for say in (print_line, print_progress, Progress(1).note, lambda text: say_error(text)):
        say(hostile)
    said = "".join(capsys.readouterr())
    assert said.count("gone") == 4
    assert not set(hostile) & set(said) - set("gone]0;wd[2J1m")


def say_error(text: str) -> None:
    """Let the command line print an error with this text."""
    assert main(["losses", text]) == 1
