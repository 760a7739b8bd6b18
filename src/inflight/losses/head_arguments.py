"""Checks of the log-probability head's arguments.

Shape suffixes: N targets, C targets of one tile, H hidden, V vocabulary, W the tile's part of it, K tokens kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that top-p and top-k kept when each target was sampled; behaviour logprobs are normalized over these
    tokens.
    """

    token_ids_K: torch.Tensor
    """int64, the tokens of the first target, then those of the second, and so on."""
    offsets: torch.Tensor
    """int64 [N + 1], the index at which the tokens of each target begin; the last is K."""


def dtype_of(hidden_NH: torch.Tensor) -> torch.dtype:
    """Return the dtype of the computation."""
    return torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32


def check_arguments(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    bias_V: torch.Tensor | None,
    *chunk_sizes: int,
    several: bool = False,
) -> None:
    """Raise `InvalidRequestError` unless shapes, dtypes, devices, targets, temperatures and chunk sizes are valid.

    ``several`` allows targets [N, K].
    """
    named = {"hidden": hidden_NH, "weight": weight_VH, "targets": targets_N, "temperature": temperature_N}
    shapes = [list(tensor.shape) for tensor in named.values()]
    rows = shapes[0][:1]
    fits_N = shapes[2][:1] == rows and 1 <= len(shapes[2]) <= 1 + several and shapes[3] == rows
    if len(shapes[0]) != 2 or shapes[1][1:] != shapes[0][1:] or not fits_N:
        raise InvalidRequestError(
            f"hidden {shapes[0]}, weight {shapes[1]}, targets {shapes[2]} and temperature {shapes[3]} do not fit: "
            f"they must be [N, H], [V, H], [N]{' or [N, K]' if several else ''} and [N]"
        )
    if bias_V is not None:
        named["bias"] = bias_V
        if list(bias_V.shape) != shapes[1][:1]:
            raise InvalidRequestError(f"bias {list(bias_V.shape)} does not fit weight {shapes[1]}: it must be [V]")
    for name, tensor in named.items():
        dtype = tensor.dtype
        fits = dtype == torch.int64 if name == "targets" else dtype.is_floating_point
        if not fits and (name != "temperature" or dtype.is_complex):
            wanted = "int64" if name == "targets" else "floating-point"
            raise InvalidRequestError(f"{name} must be {wanted}, not {dtype}")
        if tensor.device != hidden_NH.device:
            raise InvalidRequestError(f"{name} is on {tensor.device}, hidden on {hidden_NH.device}: move one of them")
    for size in chunk_sizes:
        if not isinstance(size, int) or size < 1:
            raise InvalidRequestError(f"a chunk must hold at least 1 target and 1 token of the vocabulary, not {size}")
    # Logits are multiplied by the inverse, which must neither overflow nor vanish.
    inverse_N = 1 / temperature_N.to(dtype_of(hidden_NH))
    is_outside_N = (targets_N < 0) | (targets_N >= len(weight_VH))
    is_unusable_N = ~((inverse_N > 0) & inverse_N.isfinite())
    if not (is_outside_N.any() | is_unusable_N.any()):  # one test, because it synchronizes with a GPU
        return
    if is_outside_N.any():
        first = int(is_outside_N.nonzero()[0, 0])
        raise InvalidRequestError(
            f"target {first} is token {int(targets_N[is_outside_N][0])}, but the vocabulary has {len(weight_VH)}: "
            "select hidden states, targets and temperatures at the same positions"
        )
    first = int(is_unusable_N.nonzero()[0])
    raise InvalidRequestError(
        f"the temperature of target {first} is {temperature_N[first].item()}: it must be above 0 and finite; "
        "use 1 for greedy tokens"
    )


def check_kept(kept: KeptTokens | None, targets_N: torch.Tensor, vocab_size: int) -> None:
    """Raise `InvalidRequestError` unless the kept tokens match the targets and include them."""
    if kept is None:
        return
    token_ids_K, offsets = kept.token_ids_K, kept.offsets
    for name, tensor in (("token_ids_K", token_ids_K), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device != targets_N.device:
            raise InvalidRequestError(
                f"{name} of the kept tokens is {list(tensor.shape)} of {tensor.dtype} on {tensor.device}: it must "
                f"have one dimension and be int64, on {targets_N.device}"
            )
    sizes_N = offsets.diff()
    if len(offsets) != len(targets_N) + 1 or offsets[0] != 0 or offsets[-1] != len(token_ids_K) or (sizes_N < 0).any():
        raise InvalidRequestError(
            f"the offsets of the kept tokens do not divide {len(token_ids_K)} tokens among {len(targets_N)} targets: "
            f"there must be {len(targets_N) + 1}, from 0 to {len(token_ids_K)}, in ascending order"
        )
    wrong_K = (token_ids_K < 0) | (token_ids_K >= vocab_size)
    if wrong_K.any():
        first = int(wrong_K.nonzero()[0])
        raise InvalidRequestError(
            f"kept token {first} is token {int(token_ids_K[first])}, but the vocabulary has {vocab_size}"
        )
    row_K = torch.repeat_interleave(torch.arange(len(sizes_N), device=offsets.device), sizes_N)
    found_N = torch.zeros_like(targets_N, dtype=torch.bool)
    found_N[row_K[token_ids_K == targets_N[row_K]]] = True
    if not found_N.all():
        lost = int((~found_N).nonzero()[0])
        raise InvalidRequestError(f"target {lost} (token {int(targets_N[lost])}) is not among its kept tokens")


def keep_mask(kept: KeptTokens, rows: slice, columns: slice, host_offsets: Sequence[int]) -> torch.Tensor:
    """Return which tokens of a tile were kept, bool [C, W]; ``host_offsets`` are the offsets as Python numbers."""
    num_rows, width = rows.stop - rows.start, columns.stop - columns.start
    offsets = kept.offsets[rows.start : rows.stop + 1]
    first, last = host_offsets[rows.start], host_offsets[rows.stop]
    column_K = kept.token_ids_K[first:last] - columns.start
    row_K = torch.repeat_interleave(
        torch.arange(num_rows, device=offsets.device), offsets.diff(), output_size=last - first
    )
    # Tokens outside the tile go to an extra column.
    column_K = torch.where((column_K >= 0) & (column_K < width), column_K, width)
    mask_CW = torch.zeros(num_rows, width + 1, dtype=torch.bool, device=offsets.device)
    mask_CW[row_K, column_K] = True
    return mask_CW[:, :width]


def kept_of(kept: KeptTokens, rows_N: torch.Tensor) -> KeptTokens:
    """Return the kept tokens of some targets."""
    sizes_N = kept.offsets.diff()[rows_N]
    offsets = torch.cat([sizes_N.new_zeros(1), sizes_N.cumsum(0)])
    shift_K = torch.repeat_interleave(kept.offsets[:-1][rows_N] - offsets[:-1], sizes_N)
    return KeptTokens(kept.token_ids_K[torch.arange(len(shift_K), device=shift_K.device) + shift_K], offsets)
