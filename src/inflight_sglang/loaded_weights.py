"""The weights that one SGLang server has loaded, as far as this process knows.

These are the checkpoint's weights and this process's updates, into which LoRAs are merged. If the server has loaded
weights from another process, they are unknown here, and LoRAs are refused until all weights are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from inflight.errors import UpdateRefusedError
from inflight.weights.encode.lora_tensors import changed_names
from inflight.weights.receive.base_weights import AdaptedLoad, AdaptedWeights, BaseWeights, Named
from inflight.wire import UpdateRef, WeightUpdate


class LoadedWeights:
    """The weights of one server, in ``dtype``.

    ``served`` returns the update that the server serves (None for the checkpoint), and whether the weights are torn.
    """

    def __init__(self, directory: Path, dtype: str, served: Callable[[], tuple[UpdateRef | None, bool]]) -> None:
        self._directory = directory
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._served = served
        self._known: UpdateRef | None = None
        self._base: BaseWeights | None = None
        self._adapted = AdaptedWeights()
        self._update: WeightUpdate | None = None
        self._load: AdaptedLoad | None = None

    def begin(self, update: WeightUpdate) -> None:
        """Record the update that is about to arrive. Raises `UpdateRefusedError` for a LoRA whose base is unknown."""
        served, is_torn = self._served()
        attempted = self._update.ref if self._update is not None and is_torn else None
        if served is None:
            self._base, self._adapted = BaseWeights(str(self._directory), self._dtype), AdaptedWeights()
        elif served not in (self._known, attempted):
            self._base, self._adapted = None, AdaptedWeights()
        self._update, self._load = update, None
        if update.manifest.lora is None:
            return
        if self._base is None:
            assert served is not None  # the checkpoint is known
            raise UpdateRefusedError(
                f"LoRA of version {update.version} refused: another process had version {served.version} loaded, so "
                "this process does not know its base; send all weights first, with keep_base=True"
            )
        adapted = self._adapted.names
        self._base.require(name for name in changed_names(update.manifest) if name not in adapted)

    def prepare(self, update: WeightUpdate, arrived: Named) -> Named:
        """Return the tensors to load in addition to the received tensors, or, for a LoRA, instead of them. Blocks."""
        if self._base is None:
            return []
        load = self._adapted.prepare(update.manifest, arrived, self._base.tensor)
        if update is self._update:
            self._load = load
        return load.tensors if update.manifest.lora is not None else load.tensors[len(arrived) :]

    def note_committed(self, arrived: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record that the most recently begun update has been loaded."""
        update, load = self._update, self._load
        assert update is not None  # `begin` came first
        if self._base is None and not update.manifest.frozen:
            self._base = BaseWeights(str(self._directory), self._dtype)
        if self._base is not None:
            self._known = update.ref
            if update.manifest.lora is None:
                self._base.note_loaded(arrived, keep=update.keep)
            if load is not None:
                self._adapted.note_loaded(load)
