"""A reader of a file that is being written sees the file before or after, and never a part of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.base.json_files import write_json
from inflight.base.whole_files import write_whole

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
