"""The special tokens of a checkpoint's tokenizer, from its files. Imports neither torch nor a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def special_token_ids(directory: Path) -> frozenset[int]:
    """Return the ids that are omitted when special tokens are skipped in decoding.

    Empty if the tokenizer's files cannot be read. Special tokens that appear only in a file of another format, such as
    ``tokenizer.model``, are not included.
    """
    added = _read(directory / "tokenizer.json").get("added_tokens")
    decoder = _read(directory / "tokenizer_config.json").get("added_tokens_decoder")
    tokens = [*(added if isinstance(added, list) else ())]
    tokens += [{"id": key, **it} for key, it in decoder.items()] if isinstance(decoder, dict) else []
    return frozenset(int(token["id"]) for token in tokens if token.get("special"))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
