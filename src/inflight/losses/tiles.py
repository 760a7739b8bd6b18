"""The logits of the log-probability head, tile by tile. A tile covers some targets and a part of the vocabulary.

Shape suffixes: N targets, C targets of one tile, K scored tokens of each target, H hidden, V vocabulary, W the tile's
part of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inflight.losses.head_arguments import KeptTokens, dtype_of, keep_mask
from inflight.losses.products import product


class Tiles:
    """Computes the logits of some targets, tile by tile, in one buffer that every tile overwrites."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        temperature_N: torch.Tensor,
        kept: KeptTokens | None,
        chunk_size: int,
        vocab_chunk_size: int,
        narrow: bool,
    ) -> None:
        self.hidden_NH = hidden_NH
        self._weight_VH = weight_VH
        self._bias_V = bias_V
        self._kept = kept
        # Read once, not for each tile, because it synchronizes with a GPU.
        self._kept_offsets = [] if kept is None else kept.offsets.tolist()
        self._dtype = dtype_of(hidden_NH)
        self._inverse_N = 1 / temperature_N.to(self._dtype)
        self._narrow = narrow
        # On a GPU, multiplying costs less than the test.
        self._is_scaled = hidden_NH.device.type != "cpu" or bool((self._inverse_N != 1).any())
        self._chunk_size, self._vocab_chunk_size = chunk_size, vocab_chunk_size
        size = min(chunk_size, len(hidden_NH)) * min(vocab_chunk_size, len(weight_VH))
        self._buffer = torch.empty(size, dtype=self._dtype, device=hidden_NH.device)

    def columns(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield parts of the vocabulary with their weights in the dtype of the products."""
        for start in range(0, len(self._weight_VH), self._vocab_chunk_size):
            columns = slice(start, min(start + self._vocab_chunk_size, len(self._weight_VH)))
            weight_WH = self._weight_VH[columns]
            yield columns, weight_WH if self._narrow else weight_WH.to(self._dtype)

    def logits(self, columns: slice, weight_WH: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the logits of parts of the targets over a part of the vocabulary; the caller may overwrite them."""
        for start in range(0, len(self.hidden_NH), self._chunk_size):
            rows = slice(start, min(start + self._chunk_size, len(self.hidden_NH)))
            shape = (rows.stop - rows.start, len(weight_WH))
            logits_CW = self._buffer[: shape[0] * shape[1]].view(shape)
            self._multiply(rows, weight_WH, logits_CW)
            if self._bias_V is not None:
                logits_CW.addr_(self._inverse_N[rows], self._bias_V[columns].to(self._dtype))
            if self._kept is not None:
                logits_CW.masked_fill_(~keep_mask(self._kept, rows, columns, self._kept_offsets), -torch.inf)
            yield rows, logits_CW

    def _multiply(self, rows: slice, weight_WH: torch.Tensor, logits_CW: torch.Tensor) -> None:
        """Write the logits without bias, divided by the temperature."""
        hidden_CH, inverse_C1 = self.hidden_NH[rows], self._inverse_N[rows].unsqueeze(1)
        if self._narrow:
            product(hidden_CH, weight_WH.t(), logits_CW)
            if self._is_scaled:  # the hidden states would be rounded again
                logits_CW.mul_(inverse_C1)
            return
        hidden_CH = hidden_CH.to(self._dtype)
        # Dividing the logits instead would be more work.
        torch.mm(hidden_CH * inverse_C1 if self._is_scaled else hidden_CH, weight_WH.t(), out=logits_CW)


def columns_of(targets_CK: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are in a part of the vocabulary, and a column for each, valid only for those targets.

    No index list is built, because reading its length would synchronize with the GPU.
    """
    is_here_CK = (targets_CK >= columns.start) & (targets_CK < columns.stop)
    return is_here_CK, (targets_CK - columns.start).clamp(0, columns.stop - columns.start - 1)
