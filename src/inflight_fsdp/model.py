"""A causal language model of transformers as a function from packed tokens to logprobs, sharded by ``fully_shard``.

Only the rows that predict a target go through the head. The module knows nothing of losses, optimizers or files other
than the checkpoint that it loads.

Shape suffixes: T packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from inflight.attention import SegmentPlan, register_segment_attention
from inflight.checkpoints import empty_causal_lm, fitting_tensors, stored_tensors
from inflight.errors import ConfigError, UnsupportedError
from inflight.losses.head import chunked_logprobs
from inflight_fsdp.compiled import compile_layers
from inflight_fsdp.layout import Layout, ShardedTensor, as_it_is, experts_apart
from inflight_fsdp.sharded import sum_gradients_over_ranks
from inflight_fsdp.sharding import read_shards

_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""Parameters of all experts of a layer, and what their matrices are stored as, one expert at a time."""


class PolicyModel(nn.Module):
    """The root that is sharded: the head's weight is whole inside of its forward, tied to the embedding or not."""

    def __init__(self, causal_lm: Any, logprob_chunk_size: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.logprob_chunk_size = logprob_chunk_size

    def forward(
        self,
        token_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        plan: SegmentPlan,
        temperature_T: torch.Tensor,
        target_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """Return [T]: logprobs of the tokens at ``target_rows_N``, 0.0 elsewhere.

        T is at least 1 and N may be 0: the result then depends on every parameter all the same, so that every rank
        takes part in the same collectives.
        """
        output = self.causal_lm.base_model(
            input_ids=token_ids_T.unsqueeze(0),
            position_ids=position_ids_T.unsqueeze(0),
            use_cache=False,
            segment_plan=plan,
        )
        head = self.causal_lm.get_output_embeddings()
        logprobs_N: torch.Tensor = chunked_logprobs(
            output.last_hidden_state[0].index_select(0, target_rows_N - 1),
            head.weight,
            token_ids_T.index_select(0, target_rows_N),
            temperature_T.index_select(0, target_rows_N),
            bias_V=head.bias,
            chunk_size=self.logprob_chunk_size,
        )
        return logprobs_N.new_zeros(token_ids_T.shape[0]).index_copy(0, target_rows_N, logprobs_N)


def empty_policy(path: Path, dtype: str, logprob_chunk_size: int, *, compiled: bool = False) -> PolicyModel:
    """Return the model of a directory with its parameters on the meta device, unsharded, dropout off.

    The parts of its layers are ``compiled``, if so asked, when they are first called.

    Raises `ConfigError` if there is none or its weights do not fit it, `UnsupportedError` if it is of a kind that this
    worker cannot train. Of the weights only the files' headers are read.
    """
    attention = register_segment_attention(in_graphs=not compiled)
    causal_lm: Any = empty_causal_lm(path, attention=attention, dtype=dtype)
    kind = type(causal_lm).__name__
    if not causal_lm._supports_attention_backend or causal_lm._is_stateful:
        raise UnsupportedError(f"{kind} does not take its attention from transformers' interface and cannot be packed")
    if not isinstance(causal_lm.get_output_embeddings(), nn.Linear):
        raise UnsupportedError(f"the head of {kind} is not a linear layer")
    known = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}  # a tied head under its own name
    if buffers := sorted(set(causal_lm.state_dict()) - known):
        raise UnsupportedError(f"{kind} keeps state that is not trained: {buffers[:5]}")
    wanted = {name: shape for layout in layouts_of(causal_lm).values() for name, shape in layout.shapes.items()}
    fitting_tensors(path, wanted, known=known, ignored=tuple(causal_lm._keys_to_ignore_on_load_unexpected or ()))
    policy = PolicyModel(causal_lm.eval(), logprob_chunk_size)
    if compiled:
        compile_layers(_layers(policy))
    return policy


def layouts_of(causal_lm: Any) -> dict[str, Layout]:
    """Return how transformers stores each parameter. Raises `UnsupportedError` for a way that is not known here."""
    return {name: _layout(name, parameter, causal_lm) for name, parameter in causal_lm.named_parameters()}


def _layout(name: str, parameter: torch.Tensor, causal_lm: Any) -> Layout:
    empty = torch.empty(parameter.shape, device="meta")
    stored = {key: tuple(t.shape) for key, t in revert_weight_conversion(causal_lm, {name: empty}).items()}
    if stored == {name: tuple(parameter.shape)}:
        return as_it_is(name, parameter)
    if parts := _EXPERTS.get(".".join(name.split(".")[-2:])):
        layout = experts_apart(name, parameter, parts)
        if layout.shapes == stored:
            return layout
    raise UnsupportedError(
        f"{type(causal_lm).__name__} stores {name} as {sorted(stored)[:5]} in a way that this worker does not know; "
        "servers would not know the name that it computes with"
    )


def load_weights(policy: PolicyModel, path: Path, device: torch.device, storage_device: torch.device) -> None:
    """Fill this rank's shards of a sharded policy, on the ``storage_device``; no rank holds a whole tensor.

    Buffers, which nobody shards, are on the ``device`` that computes.
    """
    buffers = dict(policy.named_buffers())
    policy.to_empty(device=storage_device)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(policy.get_submodule(owner), attribute, buffer.to(device))
    policy.causal_lm.tie_weights()
    parameters: dict[str, DTensor] = dict(policy.causal_lm.named_parameters())
    laid_out = [ShardedTensor(parameters[name], layout) for name, layout in layouts_of(policy.causal_lm).items()]
    read_shards(stored_tensors(path), laid_out)


def freeze(causal_lm: nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters that a pattern matches take no gradients.

    Raises `ConfigError` for a pattern that matches none, or if they match all.
    """
    names = {name for name, _ in causal_lm.named_parameters()}
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"frozen: {pattern!r} matches no parameter; there are {sorted(names)[:5]} ...")
    frozen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if frozen == names:
        raise ConfigError(f"frozen: {list(patterns)} matches every parameter, and nothing is left to train")
    for name in frozen:
        causal_lm.get_parameter(name).requires_grad_(False)


def recompute_layers(policy: PolicyModel) -> None:
    """Have each decoder layer keep its input only and compute itself again in the backward."""
    model = policy.causal_lm
    # The older name is deprecated since transformers 5.23, which has the newer one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in _layers(policy):
        layer.training = True  # what transformers looks at; the layer's own modules stay in eval, without dropout


def shard_policy(
    policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None, *, cpu_offload: bool = False
) -> None:
    """Shard each decoder layer and the rest over the mesh's last dimension, gradients summed over all of its ranks.

    With a ``compute_dtype`` parameters are cast to it where they are whole; gradients are summed in their own dtype.
    With ``cpu_offload`` shards and their gradients are in host memory, pinned if the mesh is of GPUs.
    """
    precision = MixedPrecisionPolicy()
    if compute_dtype is not None:
        own = next(policy.parameters()).dtype
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=own, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for layer in _layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if mesh.size() > 1:
        sum_gradients_over_ranks(policy)


def _layers(policy: PolicyModel) -> list[nn.Module]:
    names = policy.causal_lm._no_split_modules or ()
    return [module for module in policy.causal_lm.modules() if type(module).__name__ in names]
