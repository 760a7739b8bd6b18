"""Weights with a known effect: each version has its own distribution, independent of earlier tokens.

Each such set of weights is called a shade, and the shades of one model form a palette.

All rows of the embedding are equal and the layers add almost nothing, so the final norm receives the same vector at
every position. The norm keeps only the first element of that vector, so the logits are exactly the first column of the
head. Every tensor differs between any two shades, so a mix of two shades matches neither. All values are exact in
bfloat16, and in float8 with a power of two as scale, so no encoding or dtype changes them.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from inflight.conformance.models import make_tiny_model

_TINY = 2.0**-66
_SMALL = ("o_proj.weight", "down_proj.weight", "model.norm.weight")
_LOGPROB_TOLERANCE = 2e-4  # float32, one log-softmax over 258 logits of a few units
_NUM_MARKS = 64
"""Number of different marks, the values that distinguish shades. A schedule has fewer shades, so no mark is shared."""


class Shade(NamedTuple):
    """Identifies a set of weights: version ``version`` of the trainer incarnation ``incarnation``. (0, 0) is the
    checkpoint."""

    version: int
    incarnation: int


CHECKPOINT = Shade(0, 0)
FROZEN = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
"""Tensors that some schedules omit. No logprob depends on them."""


def make_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Write the model's checkpoint, which is shade (0, 0) of every palette, to ``path``; return its tensors."""
    make_tiny_model(path, family="llama", num_layers=1, max_model_len=512)
    file = path / "model.safetensors"
    palette = Palette(load_file(file), seed=0)
    tensors = palette.tensors(CHECKPOINT)
    save_file(tensors, file, {"format": "pt"})
    return tensors


class Palette:
    """The shades of one model, drawn from ``seed``; the checkpoint is the same for all seeds.

    ``like`` specifies the names, shapes and dtypes of the tensors. ``frozen`` tensors are the same in all shades.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], seed: int, frozen: tuple[str, ...] = ()) -> None:
        self._like = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()}
        self._seed = seed
        self.frozen = frozen
        self._marks: dict[Shade, float] = {}
        self._logprobs_V: dict[Shade, torch.Tensor] = {}
        self.add(CHECKPOINT)

    @property
    def shades(self) -> Sequence[Shade]:
        """Every known shade, in the order in which `add` received them."""
        return list(self._marks)

    def add(self, shade: Shade) -> None:
        """Add a shade to the known ones. Tokens that match no known shade must come from torn weights."""
        if shade not in self._marks:
            number = len(self._marks) % _NUM_MARKS
            self._marks[shade] = (8 + number % 8) / 8 * 2.0 ** (number // 8 - 3)
            self._logprobs_V[shade] = torch.log_softmax(self._drawn("lm_head.weight", shade)[:, 0].float(), dim=0)

    def tensors(self, shade: Shade) -> dict[str, torch.Tensor]:
        """Return all tensors of a shade, in the model's order."""
        return {name: self._drawn(name, shade) for name in self._like}

    def is_sampled_from(self, version: int | None, token: int, logprob: float) -> bool:
        """Return whether a token's logprob matches a shade of ``version``, or any shade if ``version`` is None."""
        known = [shade for shade in self.shades if version is None or shade.version == version]
        return any(self._agrees(shade, token, logprob) for shade in known)

    def shade_of(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Shade | None:
        """Return the newest shade that all of these tokens match, or None if there is none."""
        for shade in reversed(self.shades):
            if all(self._agrees(shade, *pair) for pair in zip(token_ids, logprobs, strict=True)):
                return shade
        return None

    def _agrees(self, shade: Shade, token: int, logprob: float) -> bool:
        return abs(float(self._logprobs_V[shade][token]) - logprob) < _LOGPROB_TOLERANCE

    def _drawn(self, name: str, shade: Shade) -> torch.Tensor:
        shape, dtype = self._like[name]
        drawn = _grid(shape, f"checkpoint {name}")
        if shade != CHECKPOINT and name not in self.frozen:
            text = f"{self._seed} {name} {tuple(shade)}"
            generator = torch.Generator().manual_seed(_hash_of(f"{text} where"))
            changed = torch.rand(shape, generator=generator) < 0.03  # few, so that deltas are small
            if name == "lm_head.weight":
                changed[:, 0] = True
            drawn = torch.where(changed, _grid(shape, text), drawn)
        mark = self._marks[CHECKPOINT if name in self.frozen else shade]
        if name == "model.embed_tokens.weight":
            return torch.full(shape, 8 * mark, dtype=dtype)
        drawn.view(-1)[-1] = mark  # no two shades agree in this element
        drawn *= _TINY if name.endswith(_SMALL) else 1.0
        if name == "model.norm.weight":
            drawn[0] = 1.0
        return drawn.to(dtype)


def _hash_of(text: str) -> int:
    """Return a number that depends only on the text and is the same in every process."""
    return random.Random(text).getrandbits(62)


def _grid(shape: tuple[int, ...], text: str) -> torch.Tensor:
    """Return random values with three-bit mantissas and magnitudes from 1/8 to 2."""
    generator = torch.Generator().manual_seed(_hash_of(text))
    mantissas = torch.randint(8, 16, shape, generator=generator) / 8
    exponents = torch.randint(-3, 1, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * mantissas * 2.0**exponents).float()
