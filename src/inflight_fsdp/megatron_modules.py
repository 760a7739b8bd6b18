"""The attention of a Megatron model over packed segments, and the model as a function from rows to logprobs.

Megatron-Core's own attention does not support packed segments without transformer_engine, and its head returns logits.

Shape suffixes: R tokens of a row, N targets, A heads, D head size, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import nn

from inflight.model.attention import SegmentPlan, segment_attention
from inflight_fsdp.rows import Row, sum_over_group


class SegmentAttention(nn.Module):
    """Computes attention over packed segments, in place of Megatron-Core's ``DotProductAttention``."""

    def __init__(self, *, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self, q_R1AD: torch.Tensor, k_R1AD: torch.Tensor, v_R1AD: torch.Tensor, plan: SegmentPlan, **_: object
    ) -> torch.Tensor:
        """Return [R, 1, A D]. Megatron-Core passes the segment plan in the place of the mask."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (q_R1AD, k_R1AD, v_R1AD))
        return segment_attention(query, key, value, plan, self._scale).flatten(2).transpose(0, 1)


class MegatronPolicy(nn.Module):
    """A stage of a GPTModel as a function from packed tokens to logprobs, or to the stage's hidden states."""

    def __init__(
        self, gpt: GPTModel, tensor_group: dist.ProcessGroup, frequencies: torch.Tensor, hf_config: Any
    ) -> None:
        """``frequencies`` [D / 2] are the angles by which a head's dimensions rotate from one position to the next."""
        super().__init__()
        self.gpt = gpt
        self._group = tensor_group
        self._frequencies = frequencies
        self._vocab_size: int = hf_config.vocab_size
        self._padding_id: int | None = hf_config.pad_token_id

    def forward(self, row: Row, hidden_1RH: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logprobs [N] of the targets.

        Every pipeline stage but the first starts from the ``hidden_1RH`` of the previous stage, and every stage but the
        last returns its own hidden states instead of logprobs.
        """
        gpt = self.gpt
        # The row contains the tokens of a shared prefix once, so segment lengths do not determine the positions.
        angles_RD = torch.outer(row.position_ids_R.float(), self._frequencies).repeat(1, 2)
        hidden_R1H = self._embedded(row.token_ids_R) if hidden_1RH is None else None
        if hidden_1RH is not None:
            gpt.set_input_tensor(hidden_1RH.transpose(0, 1))
        output_R1H = gpt.decoder(hidden_R1H, row.plan, rotary_pos_emb=angles_RD[:, None, None])
        gpt.set_input_tensor(None)
        output_1RH: torch.Tensor = output_R1H.transpose(0, 1)
        return self._logprobs(row, output_1RH) if gpt.post_process else output_1RH

    def _embedded(self, token_ids_R: torch.Tensor) -> torch.Tensor:
        hidden_R1H: torch.Tensor = self.gpt.embedding(token_ids_R.unsqueeze(0), None)
        if self._padding_id is None:
            return hidden_R1H
        # The padding token's embedding has no gradient, as in transformers.
        return torch.where((token_ids_R == self._padding_id)[:, None, None], hidden_R1H.detach(), hidden_R1H)

    def _logprobs(self, row: Row, hidden_1RH: torch.Tensor) -> torch.Tensor:
        weight_VH: torch.Tensor = self.gpt.output_layer.weight
        if self._group.size() == 1:
            return row.targets.logprobs(hidden_1RH, weight_VH, None)
        # The sum of the padded weights has the rows of all ranks. The gradients of both copies are summed over ranks.
        rank, num_rows = self._group.rank(), len(weight_VH)
        placed_VH = F.pad(weight_VH, (0, 0, rank * num_rows, (self._group.size() - 1 - rank) * num_rows))
        whole_VH, hidden_1RH = (
            copy_to_tensor_model_parallel_region(x, self._group)
            for x in (sum_over_group(placed_VH, self._group), hidden_1RH)
        )
        # Rows beyond the vocabulary only give all ranks parts of equal size.
        return row.targets.shared_logprobs(hidden_1RH, whole_VH[: self._vocab_size], self._group)
