"""Presets: recipes from papers and frameworks by name, read from presets.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inflight.base.unknown_names import unknown_name
from inflight.errors import ConfigError
from inflight.losses.pieces import Piece
from inflight.losses.policy import PolicyLoss

if TYPE_CHECKING:
    from inflight.rollouts.advantages import AdvantageEstimator


@dataclass(frozen=True, slots=True)
class Preset:
    """One recipe: a loss, and the advantages that it expects."""

    name: str
    loss: PolicyLoss
    advantages: AdvantageEstimator
    """The estimator for `inflight.rollouts.batch_advantages`; the loss itself accepts any advantages."""
    formula: str
    """The formula of a token's loss, in the symbols of presets.toml."""
    gradient: str
    source: str
    note: str = ""

    @property
    def needs(self) -> str:
        """A description of what the loss needs beyond trainer and behaviour logprobs."""
        needs: list[str] = sorted(self.loss.needs)
        if self.loss.between == "trainer/proximal" or any(
            "proximal" in getattr(correction, "between", "") for correction in self.loss.corrections
        ):
            needs.insert(0, "proximal_logprobs")
        return ", ".join(needs) or "nothing more"

    def describe(self) -> str:
        """Return a description of the preset in at most ten lines."""
        corrections = ", ".join(map(_describe_piece, self.loss.corrections)) or "none"
        penalties = ", ".join(map(_describe_piece, self.loss.penalties)) or "none"
        lines = [
            f"{self.name}: {self.source}",
            f"  loss         {self.formula}",
            f"  gradient     {self.gradient}",
            f"  gate         {_describe_piece(self.loss.gate)} of {self.loss.between} at level {self.loss.level}",
            f"  corrections  {corrections}",
            f"  penalties    {penalties}",
            f"  denominator  {_describe_piece(self.loss.aggregation)}",
            f"  advantages   {self.advantages}",
            f"  needs        {self.needs}",
        ]
        return "\n".join(lines + ([f"  note         {self.note}"] if self.note else []))


def preset(name: str) -> Preset:
    """Return the preset called ``name``. Raises a `ConfigError` that lists the known names."""
    if name not in PRESETS:
        raise ConfigError(unknown_name("loss preset", name, sorted(PRESETS)))
    return PRESETS[name]


def _describe_piece(piece: Piece) -> str:
    """Return a piece's kind and settings as text."""
    fields = type(piece).model_fields
    inside = ", ".join(
        f"{key}={'unbounded' if value is None else value}"
        for key, value in piece
        if key != "kind" and (value is not None or fields[key].default is not None)
    )
    return f"{piece.kind}({inside})"  # type: ignore[attr-defined]


def _read() -> dict[str, Preset]:
    tables: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("presets.toml").read_text("utf-8"))
    return {
        name: Preset(name=name, loss=PolicyLoss.model_validate(table.pop("policy")), **table)
        for name, table in tables.items()
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(_read())
"""The presets by the names that configurations use."""
