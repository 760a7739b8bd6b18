"""What every endpoint kept of the last publish, as the publisher's base of the next delta. Knows no transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.weights.delta import element_runs, encode_delta, find_tensor_changes
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

    def encode(self, index: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> torch.Tensor | None:
        """Return what changed in one bucket, None if all of it has to be sent; the snapshot holds the new bytes then.

        The tensors may be the trainer's own: they are only read.
        """
        held = self._flats.get(index)
        if held is None or held.numel() != sum(tensor.nbytes for tensor in tensors):
            self._flats[index] = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
            self._copy(index, tensors, specs)
            return None
        patch = find_tensor_changes(tensors, held, element_runs(specs))
        if patch is None:
            self._copy(index, tensors, specs)
            return None
        patch.write(held)
        return encode_delta(patch)

    def flat(self, index: int) -> torch.Tensor:
        """Return the bytes of a bucket that was encoded, uint8 on the CPU; valid until the next update."""
        return self._flats[index]

    def _copy(self, index: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        offset = 0
        for tensor, spec in zip(tensors, specs, strict=True):
            part = self._flats[index][offset : offset + spec.size_bytes]
            part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            offset += spec.size_bytes

    def applied(self, ref: UpdateRef) -> None:
        """Note that every endpoint applied the update that was begun, and kept it."""
        self._ref = ref
