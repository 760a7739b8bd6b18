"""The tensors that an engine has loaded, by their checkpoint names, for updates that bring only a part of them.

What no update has brought is read from the checkpoint that the engine started from; of the rest, what an update asked
to keep is here, and no more. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from inflight.engines.checkpoint_specs import tensor_specs_of
from inflight.errors import ConfigError, UpdateRefusedError


class BaseWeights:
    """The weights of one engine over its life. ``directory`` is the checkpoint; ``dtype`` that of the model."""

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        self._directory = Path(directory)
        self._dtype = dtype
        self._files: dict[str, Path] | None = None
        self._brought: dict[str, torch.Tensor | None] = {}

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of every tensor of the checkpoint. Raises `UpdateRefusedError` if it cannot be read."""
        try:
            return {spec.name: spec.shape for spec in tensor_specs_of(self._directory, "float32")}
        except ConfigError as error:
            raise UpdateRefusedError(f"an update in part needs the engine's checkpoint: {error}") from error

    def require(self, names: Iterable[str]) -> None:
        """Raise `UpdateRefusedError` unless `tensor` knows all of these."""
        known = self._stored_in()
        if lost := [name for name in names if self._brought.get(name, known.get(name)) is None]:
            raise UpdateRefusedError(
                f"send all weights first, with keep_base=True: {len(lost)} tensors that it does not bring are needed "
                f"to load it, and earlier updates have replaced them without that: {lost[:3]}"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it was loaded last, in the model's dtype, on the CPU or where it was kept."""
        if name in self._brought:
            kept = self._brought[name]
            assert kept is not None  # `require` was asked before
            return kept
        with safe_open(self._stored_in()[name], framework="pt") as file:
            stored: torch.Tensor = file.get_tensor(name)
        return stored.to(self._dtype)

    def loaded(self, tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> None:
        """Note what an update has brought; its memory stays in use if it is to be kept."""
        self._brought |= {name: tensor if keep else None for name, tensor in tensors}

    def _stored_in(self) -> Mapping[str, Path]:
        if self._files is None:
            self._files = {}
            for path in sorted(self._directory.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
        return self._files
