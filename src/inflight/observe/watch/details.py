"""The tokens of recorded rollouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.observe.trace.records import MANIFEST, RECORD, item_details, read_manifest, step_files


def rollout_details(directory: Path, version: int | None, item: int) -> list[dict[str, Any]] | None:
    """Return the recorded rollouts of an item on which ``version`` was trained, with every token.

    Returns None if the run keeps no record, or if the record lacks the item because it was not trained on.
    """
    record = directory / RECORD
    if version is None or not (record / MANIFEST).exists():
        return None
    try:
        if not step_files(record):
            return None
        found = item_details(record, version, item, _decoder(record))
    except ConfigError:
        return None  # a step that is not written yet, or that a resumed run repeated
    rollouts: list[dict[str, Any]] = found["rollouts"]
    return rollouts


def _decoder(record: Path) -> Callable[[Sequence[int]], str] | None:
    """Return the decode function of a record's model; None if the model's directory no longer exists."""
    start = read_manifest(record).start
    return None if start is None else _decoder_of(start.path)


@functools.lru_cache(maxsize=8)
def _decoder_of(model: str) -> Callable[[Sequence[int]], str] | None:
    from inflight.model.checkpoints import load_tokenizer

    try:
        tokenizer = load_tokenizer(Path(model))
    except ConfigError:
        return None
    if tokenizer is None:
        return None
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
