"""Replacements for modules of TorchTitan's models, and a model as a function from rows to logprobs.

TorchTitan's attention implementations have no backward pass on a CPU, and its head returns logits. TorchTitan always
computes experts in bfloat16, and runs their router under an autocast that CPUs do not support.

Shape suffixes: N targets, R tokens of a row; those of TorchTitan's modules are B batch, L length, N heads, H head size,
D model, F feed-forward, E experts, K experts of a token, R routed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.module import Module

from inflight.model.attention import SegmentPlan, exclude_from_graphs, segment_attention
from inflight_fsdp.rows import HeadTargets, Row


class TitanPolicy(nn.Module):
    """A TorchTitan decoder as a function from packed tokens to logprobs."""

    def __init__(self, decoder: Decoder, tensor_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.decoder = decoder
        self._tensor_mesh = tensor_mesh

    def forward(self, row: Row, hidden_1RH: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logprobs [N] of the targets.

        Every pipeline stage but the first starts from the ``hidden_1RH`` of the previous stage, and every stage but the
        last returns its own hidden states instead of logprobs.
        """
        head = self.decoder.lm_head
        if head is not None:
            head.targets = row.targets
        if hidden_1RH is not None and self._tensor_mesh is not None:
            hidden_1RH = DTensor.from_local(hidden_1RH, self._tensor_mesh, [Replicate()], run_check=False)
        try:
            output: torch.Tensor = self.decoder(
                row.token_ids_R.unsqueeze(0) if hidden_1RH is None else hidden_1RH,
                positions=row.position_ids_R.unsqueeze(0),
                attention_masks=row.plan,
            )
        finally:
            if head is not None:
                head.targets = None
        return local_of(output)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a replicated tensor as a plain tensor; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LogprobHead(Linear):  # type: ignore[misc]
    """Computes the logprobs of the targets in chunks, in place of TorchTitan's head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """Makes TorchTitan build `LogprobHead`, the class in which this configuration is defined."""

    targets: HeadTargets | None = None

    def forward(self, hidden_1LD: torch.Tensor) -> torch.Tensor:
        """Return the logprobs [N] of the `targets`.

        If ranks share the head, each computes some of the logprobs with the whole weight, so gradients must be summed
        over these ranks.
        """
        targets = self.targets
        assert targets is not None
        if not isinstance(self.weight, DTensor):
            return targets.logprobs(hidden_1LD, self.weight, None)
        assert isinstance(hidden_1LD, DTensor)
        weight_VD = self.weight.full_tensor(grad_placements=[Partial()])
        hidden_1LD = hidden_1LD.to_local(grad_placements=[Partial()])
        return targets.shared_logprobs(hidden_1LD, weight_VD, self.weight.device_mesh.get_group())


class SegmentAttention(Module):  # type: ignore[misc]
    """Computes attention over packed segments, in place of TorchTitan's flex and varlen attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Adds the setting ``in_graphs``: whether torch's compiler may include the attention in its graphs."""

        in_graphs: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._attend = segment_attention if config.in_graphs else exclude_from_graphs(segment_attention)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: SegmentPlan,
        scale: float | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [1, L, N, H]. TorchTitan passes the segment plan as ``attention_masks``."""
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return self._attend(query, key, value, attention_masks, scale)


class Experts(GroupedExperts):  # type: ignore[misc]
    """Computes experts one after another in the dtype of their tokens, in place of TorchTitan's implementation."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        """Makes TorchTitan build `Experts`, the class in which this configuration is defined."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return [R, D]; the tokens must be sorted by expert.

        Experts without tokens also run, on an empty batch.
        """
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        tokens = torch.split(x_RD, num_tokens_per_expert_E.tolist())
        outputs = [
            F.linear(F.silu(F.linear(x, w1_FD)) * F.linear(x, w3_FD), w2_DF)
            for x, w1_FD, w2_DF, w3_FD in zip(tokens, *weights, strict=True)
        ]
        return torch.cat(outputs)


class Router(TokenChoiceTopKRouter):  # type: ignore[misc]
    """Selects the experts with the largest float32 softmax weights, in place of TorchTitan's router."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        """Makes TorchTitan build `Router`, the class in which this configuration is defined."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights and ids [B, L, K] of each token's experts, and the weights [B, L, E] of all experts."""
        assert expert_bias_E is None
        shares_BLE = F.softmax(self.gate(x_BLD), dim=-1, dtype=torch.float32)
        shares_BLK, experts_BLK = torch.topk(shares_BLE, k=self.top_k, dim=-1)
        if self.route_norm:
            shares_BLK = shares_BLK / shares_BLK.sum(dim=-1, keepdim=True)
        return shares_BLK, experts_BLK, shares_BLE
