"""Reads verl's rollouts: the files in ``trainer.rollout_data_dir``, one ``STEP.jsonl`` for each step.

A line contains the texts ``input`` and ``output``, the ``score`` and the ``step``, but no tokens, logprobs or versions.
The texts are tokenized again, which may not reproduce the sampled tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.model.checkpoints import load_tokenizer
from inflight.replay.importing import Found, field_of, grouped, is_name, is_number
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan


def read_verl(files: Sequence[Path], *, tokenizer: Path, temperature: float) -> Found:
    """Return the groups of each file, in the order of their steps. Raises `ConfigError` for an unusable file."""
    loaded = load_tokenizer(tokenizer)
    if loaded is None:
        raise ConfigError(f"{str(tokenizer)!r} has no tokenizer: pass the model directory of the run with --tokenizer")
    found = Found(lacks={"behaviour_logprobs", "token_ids"})
    found.steps = _steps(sorted(files, key=_step_of), found, loaded, temperature)
    return found


def _steps(files: Sequence[Path], found: Found, tokenizer: Any, temperature: float) -> Iterator[list[Group]]:
    num_items = 0
    for version, path in enumerate(files):
        rollouts: list[tuple[Any, Rollout]] = []
        num_rows = 0
        for where, row in _rows(path):
            num_rows += 1
            text = field_of(row, "input", lambda it: isinstance(it, str) and it != "", "a text", where)
            output = field_of(row, "output", lambda it: isinstance(it, str), "a text", where)
            prompt, completion = (_tokens(tokenizer, it, where) for it in (text, output))
            if not completion:
                found.assumed["the output is empty, so the sample is omitted"] += 1
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
            uid = field_of(row, "uid", is_name, "a name", where) if "uid" in row else text
            rollouts.append((uid, rollout))
        groups = grouped(rollouts, num_items)
        num_items += len(groups)
        found.assumed["no weight version and no finish reason are stored: assumed on-policy and stop"] += num_rows
        yield groups


def _tokens(tokenizer: Any, text: str, where: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise ConfigError(f"{where}: {text[error.start]!r} is not a character that can be tokenized") from error
    return [int(it) for it in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _step_of(path: Path) -> int:
    """Return the number of the step in a file's first row."""
    for where, row in _rows(path):
        return int(field_of(row, "step", lambda it: type(it) is int, "the number of a step", where))
    raise ConfigError(f"{str(path)!r} is empty")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of each row of a file, and the row. Raises `ConfigError` for an unusable file."""
    number = 0
    try:
        with path.open(
            encoding="utf-8"
        ) as lines:  # not splitlines, because texts may contain line ends other than "\n"
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("it is not an object")
                    yield f"{path}, line {number}", row
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not a rollout dump of verl: line {number}: {error}") from error
