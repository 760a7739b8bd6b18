"""Weights whose effect is known: every version has a distribution of its own, whatever was sampled before.

The final norm is so small that nothing of the layers reaches the logits: they are the head's bias, exactly. Between any
two shades every tensor differs, so that a mix of them is neither, and few elements do, so that deltas are small. All
values are exact in bfloat16 and in float8 with a power of two as scale: no encoding changes them.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from inflight.wire import TensorSpec

VOCAB_SIZE = 64
_HIDDEN = 32
_TINY = 2.0**-66
_SMALL = ("final_layernorm.weight", "final_layernorm.bias")
_HEAD_BIAS = "lm_head.bias"
_LOGPROB_TOLERANCE = 1e-4  # float32, one log-softmax over 64 logits of a few units


class Shade(NamedTuple):
    """Names weights: version ``version`` of the trainer ``epoch``; (0, 0) is the checkpoint."""

    version: int
    epoch: int


CHECKPOINT = Shade(0, 0)


def make_checkpoint(path: Path) -> Path:
    """Write the model's checkpoint, shade (0, 0) of every palette, to ``path``; return ``path``."""
    from transformers import AutoModelForCausalLM, PhiConfig

    config: Any = PhiConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    palette = Palette({name: parameter.detach() for name, parameter in model.named_parameters()}, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(palette.tensors(CHECKPOINT)[name])
    model.save_pretrained(path)
    return path


class Palette:
    """Shades of one model, drawn from ``seed``; the checkpoint is the same for all. ``frozen`` tensors never differ."""

    def __init__(self, like: Mapping[str, torch.Tensor], seed: int, frozen: tuple[str, ...] = ()) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}
        self._seed = seed
        self.frozen = frozen
        self._order: list[Shade] = []
        self._tensors: dict[Shade, dict[str, torch.Tensor]] = {}
        self._digests: dict[str, Shade] = {}
        self._logprobs_V: dict[Shade, torch.Tensor] = {}
        self.add(CHECKPOINT)

    def add(self, shade: Shade) -> None:
        """Make a shade known. What is sampled from others is torn."""
        if shade in self._tensors:
            return
        self._order.append(shade)
        self._tensors[shade] = {name: self._drawn(name, shade) for name in self._shapes}
        self._logprobs_V[shade] = torch.log_softmax(self._tensors[shade][_HEAD_BIAS], dim=0)
        self._digests[digest(self._tensors[shade])] = shade

    def tensors(self, shade: Shade) -> dict[str, torch.Tensor]:
        """Return all tensors of a shade, in the model's order."""
        return self._tensors[shade]

    def shade_of(self, found: str) -> Shade | None:
        """Return which shade a `digest` is of; None if of none that is known."""
        return self._digests.get(found)

    def is_sampled_from(self, version: int, token: int, logprob: float) -> bool:
        """Return whether a token's logprob is that of a shade of ``version``."""
        return any(
            abs(float(logprobs_V[token]) - logprob) < _LOGPROB_TOLERANCE
            for shade, logprobs_V in list(self._logprobs_V.items())
            if shade.version == version
        )

    def _drawn(self, name: str, shade: Shade) -> torch.Tensor:
        shape = self._shapes[name]
        base = _grid(shape, f"checkpoint {name}")
        if shade != CHECKPOINT and name not in self.frozen:
            other = _grid(shape, f"{self._seed} {name} {tuple(shade)}")
            generator = torch.Generator().manual_seed(hash_of(f"{self._seed} {name} {tuple(shade)} where"))
            changed = torch.rand(shape, generator=generator) < (1.0 if name == _HEAD_BIAS else 0.03)
            base = torch.where(changed, other, base)
        number = 0 if name in self.frozen else len(self._order) - 1
        base.view(-1)[0] = (8 + number % 8) / 8 * 2.0 ** (number // 8 - 3)  # no two shades agree in this element
        return base * (_TINY if name.endswith(_SMALL) else 1.0)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return XXH3-128 over the bytes of the tensors, in order: it is taken before every token step."""
    found = xxhash.xxh3_128()
    for tensor in tensors.values():
        found.update(tensor.detach().numpy().data)
    return found.hexdigest()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return how a tensor travels as it is."""
    return TensorSpec.model_validate(
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
    )


def hash_of(text: str) -> int:
    """Return a number that is the same for the same text in every process."""
    return random.Random(text).getrandbits(62)


def _grid(shape: tuple[int, ...], text: str) -> torch.Tensor:
    """Return random values with three bits of mantissa, between 1/8 and 2 in size."""
    generator = torch.Generator().manual_seed(hash_of(text))
    mantissas = torch.randint(8, 16, shape, generator=generator) / 8
    exponents = torch.randint(-3, 1, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * mantissas * 2.0**exponents).float()
