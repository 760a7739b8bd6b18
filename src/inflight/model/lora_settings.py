"""The settings of a LoRA: its rank, its scale and the layers that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from inflight.base.toml import Section
from inflight.errors import ConfigError
from inflight.wire import LoraSpec


class LoraSettings(Section):
    """The LoRA that a worker trains. PEFT names: ``r``, ``lora_alpha``, ``target_modules``, ``lora_dropout``."""

    rank: int = Field(ge=1, le=65536)
    """The inner dimension of the two factors, A and B."""
    alpha: float = Field(gt=0, le=1_000_000)
    """Each changed weight is its base plus ``alpha / rank`` times B A."""
    targets: tuple[str, ...] | Literal["all-linear"]
    """The linear layers that the LoRA changes, given by their names or the ends of their names, such as ``q_proj``;
    ``all-linear`` means all linear layers in the decoder layers."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the LoRA's inputs. Each forward pass with gradients draws a new mask. The trainer's logprobs then
    differ from those of the servers, which do not use dropout."""
    seed: int = Field(default=0, ge=0)
    """Seed for the random initial values of A, as in PEFT, and for the dropout. B starts as zeros."""

    @model_validator(mode="after")
    def _names_targets_once(self) -> LoraSettings:
        if self.targets == "all-linear":
            return self
        if not self.targets:
            raise ValueError("targets is empty, so nothing would be trained: name layers, such as 'q_proj'")
        if twice := sorted({target for target in self.targets if self.targets.count(target) > 1}):
            raise ValueError(f"targets names {', '.join(twice)} twice")
        return self

    @property
    def spec(self) -> LoraSpec:
        """How endpoints merge the LoRA."""
        return LoraSpec(rank=self.rank, alpha=self.alpha)

    def chosen(self, layers: Sequence[str]) -> list[str]:
        """Return which of these linear layers are targets, in order.

        Raises `ConfigError` for a target that matches no layer.
        """
        if self.targets == "all-linear":
            return list(layers)
        if unknown := [t for t in self.targets if not any(_is_meant(layer, t) for layer in layers)]:
            ends = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"lora.targets: no linear layer of a decoder layer is named {', '.join(map(repr, unknown))}; "
                f"their names end with {', '.join(ends) or 'nothing: the model has none'}"
            )
        return [layer for layer in layers if any(_is_meant(layer, target) for target in self.targets)]


def _is_meant(layer: str, target: str) -> bool:
    """Return whether PEFT would match the layer by this entry of ``target_modules``."""
    return layer == target or layer.endswith(f".{target}")
