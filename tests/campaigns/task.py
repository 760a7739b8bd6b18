"""The campaign's task: learnable in a few steps, and struck from outside by files in a control directory.

It keeps a record of its own of what was made and scored, which the judge compares with what the run says of itself.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from inflight.types import TaskItem

_LONG = 4000
"""Characters of a prompt that no server takes."""
_WAIT_S = 40.0


class RewardError(Exception):
    """What a struck reward function raises."""


class Letters:
    """Rewards letters among the characters of a completion. Every ``long_every``-th prompt is overlong.

    Struck by files in ``control``: ``raise`` and ``hang`` are consumed by the next score, ``slow`` holds while it is
    there, and so does ``wait`` the first score of an item, for longer but only until it is removed.
    """

    name = "letters"

    def __init__(self, control: Path, long_every: int) -> None:
        self._control = control
        self._long_every = long_every
        self._waited = set[int]()
        self._record = os.open(control / "record.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def item(self, index: int) -> TaskItem:
        self._write("item", index)
        is_long = self._long_every > 0 and index % self._long_every == self._long_every - 1
        return TaskItem(index, f"{index:06d}" + "?" * (_LONG if is_long else 0))

    def score(self, item: TaskItem, completion: str) -> float:
        if (self._control / "slow").exists():
            time.sleep(0.15)
        deadline = time.monotonic() + (0.0 if item.index in self._waited else _WAIT_S)
        self._waited.add(item.index)
        while (self._control / "wait").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._consume("raise"):
            raise RewardError("the campaign strikes")
        if self._consume("hang"):
            time.sleep(3600)
        self._write("score", item.index)
        return sum(character.isascii() and character.isalpha() for character in completion) / max(1, len(completion))

    def _consume(self, name: str) -> bool:
        try:
            (self._control / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _write(self, kind: str, index: int) -> None:
        # One write with O_APPEND: whole lines, from whichever thread, that outlive the process.
        os.write(self._record, json.dumps({"kind": kind, "item": index, "pid": os.getpid()}).encode() + b"\n")


def letters(seed: int, control: str, long_every: int = 0) -> Letters:
    return Letters(Path(control), long_every)
