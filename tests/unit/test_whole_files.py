"""A reader of a file that is being written sees the file before or after, and never a part of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.base.json_files import write_json
from inflight.base.whole_files import write_whole
from inflight.errors import ConfigError

WRITERS: dict[str, Callable[[Path], Any]] = {
    "write_whole": lambda file: write_whole(file, '{"state": "new"}'),
    "write_json": lambda file: write_json(file, {"state": "new"}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_file_appears_under_its_name_only_when_it_is_complete(
    write: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen, replace = tmp_path / "ready.json", [], Path.replace

    def look(partial: Path, target: Path) -> Path:
        seen.append(file.exists())
        return replace(partial, target)

    monkeypatch.setattr(Path, "replace", look)
    write(file)
    assert (seen, json.loads(file.read_text())) == ([False], {"state": "new"})
    assert list(tmp_path.iterdir()) == [file]


FULL = """
import resource, sys
from pathlib import Path
from inflight.base.json_files import write_json
from inflight.errors import ConfigError

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_json(Path(sys.argv[1]), "x" * 100_000)
except ConfigError as error:
    sys.exit(str(error))
"""
"""A process that may write a thousand bytes into a file."""


def test_a_file_that_cannot_be_written_to_its_end_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_json(file, {"state": "old"})
    done = subprocess.run([sys.executable, "-c", FULL, file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (1, f"{str(file)!r} cannot be written: File too large")
    assert json.loads(file.read_text()) == {"state": "old"}
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"state\.json' cannot be written: No space left on device"):
        write_json(tmp_path / "state.json", {"state": "new"})


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_json(tmp_path / "link.json", {"state": "new"})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"state": "new"}


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        write_json(tmp_path / "pipe", [1])
        assert json.loads(os.read(descriptor, 100)) == [1]
    finally:
        os.close(descriptor)
