"""The commands of the README, line by line and in order, print what it shows."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
OUTPUT = README[README.index("python examples/hello.py") :].split("```\n")[2]


def test_its_program_is_the_example() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert (ROOT / "examples" / "hello.py").read_text().endswith(program)


def test_its_commands_print_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, words in (("python", ""), ("inflight", "-m inflight ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {python()} {words}"$@"\n')
        (programs / name).chmod(0o755)
    require_output(COMMANDS[1:], tmp_path, programs)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_its_commands_work_in_a_fresh_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    require_output(
        [block.replace("python3 ", f"{sys.base_prefix}/bin/python3 ") for block in COMMANDS],
        tmp_path / "clone",
        Path(sys.executable).parent,
    )


def require_output(blocks: list[str], directory: Path, programs: Path) -> None:
    """Run commands in a directory, with ``python`` and ``inflight`` of another one and on a free port, and compare the
    end of what they print with the README.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (directory / "examples").mkdir(exist_ok=True)
    program = (ROOT / "examples" / "hello.py").read_text().replace("8000", port)
    program = program.replace("max_tokens=200", "max_tokens=100")  # the updates reach the first dozens
    (directory / "examples" / "hello.py").write_text(program)
    script = "".join(blocks).replace("models/smollm2 &", f"models/smollm2 --port {port} &").replace("8000", port)
    ran = subprocess.run(
        ["bash", "-e", "-m", "-c", script + "wait\n"],
        cwd=directory,
        env={
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(Path.home()),
            "OMP_WAIT_POLICY": "PASSIVE",
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    lines, shown = (
        [line for line in text.splitlines() if re.match("published|tokens", line)] for text in (ran.stdout, OUTPUT)
    )
    assert [shape_of(line) for line in lines[:3]] == [shape_of(line) for line in shown[:3]], ran.stderr
    # How many versions sample the completion depends on the machine, from the first to one of the last.
    assert len(lines) >= 5, ran.stdout
    assert {shape_of(line) for line in lines[3:]} <= {shape_of(line) for line in shown[3:]}


def shape_of(line: str) -> str:
    """A line without what differs from run to run: times, positions and texts."""
    return re.sub(r"tokens \d+ to \d+", "tokens", re.sub(r"\d+ ms|(?<=: ).*", "...", line))
