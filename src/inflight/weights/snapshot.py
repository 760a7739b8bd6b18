"""What every endpoint kept of the last publish, as the publisher's base of the next delta. Knows no transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.weights.delta import element_runs, encode_delta, find_changes
from inflight.wire import TensorSpec, UpdateRef, WeightUpdate


class Snapshot:
    """The bytes of every bucket of one update, on the host: one copy of the weights.

    It moves on to the next update bucket by bucket while that is encoded, so that it is of no use if the update fails.
    """

    def __init__(self) -> None:
        self._ref: UpdateRef | None = None
        self._update: WeightUpdate | None = None
        self._flats: dict[int, torch.Tensor] = {}

    @property
    def ref(self) -> UpdateRef | None:
        """The update that it holds whole and that every endpoint applied; None while there is none."""
        return self._ref

    def is_cut_as(self, update: WeightUpdate) -> bool:
        """Return whether an update has the same tensors in the same buckets."""
        mine = self._update
        return mine is not None and (mine.buckets, mine.manifest) == (update.buckets, update.manifest)

    def begin(self, update: WeightUpdate) -> None:
        """From now on buckets are those of ``update``; what is held is its base if that says so."""
        if update.base is None:
            self._flats = {}
        self._ref, self._update = None, update

    def encode(self, index: int, flat: torch.Tensor, specs: Sequence[TensorSpec]) -> torch.Tensor | None:
        """Return what changed in one bucket, None if all of it has to be sent; the snapshot holds the new bytes then.

        ``flat`` is uint8 [N] on the CPU.
        """
        held = self._flats.get(index)
        if held is None or held.numel() != flat.numel():
            self._flats[index] = flat.clone()
            return None
        patch = find_changes(flat, held, element_runs(specs))
        if patch is None:
            held.copy_(flat)
            return None
        patch.write(held)
        return encode_delta(patch)

    def applied(self, ref: UpdateRef) -> None:
        """Note that every endpoint applied the update that was begun, and kept it."""
        self._ref = ref
