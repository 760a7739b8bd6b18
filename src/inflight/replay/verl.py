"""Reads verl's rollouts: the files of ``trainer.rollout_data_dir``, one ``STEP.jsonl`` for each step.

A line has the texts ``input`` and ``output``, the ``score`` and the ``step``. There are no tokens, logprobs or
versions: texts are tokenised again, which need not give the tokens that were sampled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.checkpoints import load_tokenizer
from inflight.errors import ConfigError
from inflight.replay.importing import Found, field_of, grouped, is_number
from inflight.types import Rollout
from inflight.wire import VersionSpan


def read_verl(files: Sequence[Path], *, tokenizer: Path, temperature: float) -> Found:
    """Return the groups of each file, in the order of their steps. Raises `ConfigError`."""
    loaded = load_tokenizer(tokenizer)
    if loaded is None:
        raise ConfigError(f"{str(tokenizer)!r} has no tokenizer: give the model directory of the run with --tokenizer")
    found = Found(lacks={"behaviour_logprobs", "token_ids"})
    num_items = 0
    for version, (_, rows) in enumerate(sorted((_read(path) for path in files), key=lambda read: read[0])):
        rollouts: list[tuple[Any, Rollout]] = []
        for where, row in rows:
            text = field_of(row, "input", lambda it: isinstance(it, str) and it != "", "a text", where)
            output = field_of(row, "output", lambda it: isinstance(it, str), "a text", where)
            prompt, completion = (_tokens(loaded, it) for it in (text, output))
            if not completion:
                found.assumed["the output is empty: left out"] += 1
                continue
            rollout = Rollout(
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                behaviour_logprobs=[math.nan] * len(completion),
                version_spans=(VersionSpan(version=version, start=0, end=len(completion)),),
                finish_reason="stop",
                reward=float(field_of(row, "score", is_number, "a number", where)),
                temperature=temperature,
            )
            rollouts.append((row.get("uid", text), rollout))
        groups = grouped(rollouts, num_items)
        num_items += len(groups)
        found.steps.append(groups)
        found.assumed["no weight version and no finish reason are stored: taken for on-policy and stop"] += len(rows)
    return found


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return [int(it) for it in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _read(path: Path) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Return the step of a file, and where each of its rows stands."""
    rows: list[tuple[str, dict[str, Any]]] = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not an object")
                rows.append((f"{path}, line {number}", row))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not a rollout dump of verl: {error}") from error
    if not rows:
        raise ConfigError(f"{str(path)!r} is empty")
    where, first = rows[0]
    return int(field_of(first, "step", lambda it: type(it) is int, "a step's number", where)), rows
