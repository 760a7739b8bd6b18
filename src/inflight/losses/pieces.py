"""The base class of the pieces of a loss: frozen, comparable, hashable and serializable to JSON.

It does not use torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from inflight.base.toml import Section


class Piece(Section):
    """Settings of one piece of a loss; ``kind`` identifies the piece. ``"unbounded"`` stands for None, which TOML
    cannot represent.
    """

    @model_validator(mode="before")
    @classmethod
    def _unbounded_is_none(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: None if value == "unbounded" else value for key, value in values.items()}
        return values
