"""The sizes of a model on disk that are needed to compute its memory use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import config_number, config_of, tensor_specs_of
from inflight.wire import DTYPE_SIZES

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shape of each parameter by its name; the matrices of all experts are stacked along a new first dimension."""
    hidden_size: int
    intermediate_size: int
    """Intermediate size of one expert, if there are experts."""
    num_experts_per_token: int
    """Number of experts per token; 0 for an MLP without experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    @property
    def num_elements(self) -> int:
        return sum(map(prod, self.tensors.values()))

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_SIZES[dtype]


def model_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a directory, from ``config.json`` and the files' headers.

    Raises `ConfigError` if they cannot be read, or do not determine a size.
    """
    config = config_of(path)

    def number(*keys: str) -> int:
        for key in keys:
            if (value := config_number(config, key)) is not None:
                return value
        problem = f"has no {keys[0]}" if config else "cannot be read"
        raise ConfigError(f"{str(path / 'config.json')!r} {problem}: pass the directory of a Hugging Face checkpoint")

    heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    stored = {spec.name: tuple(spec.shape) for spec in tensor_specs_of(path, "float32")}
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    experts = config_number(config, "num_experts_per_tok") if any(map(_EXPERT.search, stored)) else 0
    return ModelShape(
        tensors=_with_experts_joined(stored),
        hidden_size=number("hidden_size"),
        intermediate_size=number("moe_intermediate_size", "intermediate_size")
        if experts
        else number("intermediate_size"),
        num_experts_per_token=experts or 0,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config_number(config, "num_key_value_heads") or heads,
        head_dim=config_number(config, "head_dim") or hidden_size // heads,
        context=number("max_position_embeddings"),
    )


def _with_experts_joined(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    joined: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        if _EXPERT.search(name) is None:
            joined[name] = shape
        else:
            together = _EXPERT.sub(".experts.", name)
            joined[together] = (joined.get(together, (0,))[0] + 1, *shape)
    return joined
