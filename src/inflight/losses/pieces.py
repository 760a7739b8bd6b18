"""What every piece of a loss is: frozen, comparable, hashable, and written to JSON as it was given. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Piece(BaseModel):
    """Settings of one piece of a loss; its ``kind`` says which."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
