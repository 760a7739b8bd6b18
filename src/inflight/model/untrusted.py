"""Restrictions on untrusted model directories: they may neither run their own code nor refer to files elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

TRUST_VARIABLE = "INFLIGHT_TRUST_REMOTE_CODE"
"""If this environment variable is 1, transformers runs the Python files in a model directory for its config, tokenizer
and processor. Otherwise such a directory is refused, without a prompt."""


def trusts_remote_code() -> bool:
    """Return whether the user has set `TRUST_VARIABLE`, which allows model directories to run their own code."""
    return os.environ.get(TRUST_VARIABLE) == "1"


def name_of_file_beside(name: str) -> str:
    """Return a file name from an index. Raises ``ValueError`` unless it names a safetensors file next to the index."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"it lists {name!r}, which is not the name of a file next to it")
    return name
