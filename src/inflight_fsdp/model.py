"""A causal language model from transformers as a function from packed tokens to logprobs, sharded by ``fully_shard``.

The head computes only the rows that predict a target.

Shape suffixes: R tokens, N targets.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from inflight.base.shortened import shortened
from inflight.errors import ConfigError, UnsupportedError
from inflight.model.attention import heads_of, register_segment_attention
from inflight.model.checkpoints import EXPERT_PARTS, empty_causal_lm, fitting_tensors, stored_shapes, stored_tensors
from inflight.model.checksums import check_checkpoint
from inflight.model.compiler import check_compiler
from inflight.model.images import takes_images
from inflight.model.routing import REPLAYED, Routers, decoder_layers, replay_routing, routers_of
from inflight.model.vision import blank_image, embedded, image_features
from inflight_fsdp.compiled import compile_layers
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.float8 import multiply_in_float8
from inflight_fsdp.layout import Layout, ShardedTensor, Sharding, layout_by_expert
from inflight_fsdp.lora import add_lora, initialise, is_lora, lora_layout
from inflight_fsdp.rows import Row
from inflight_fsdp.sharded import sum_gradients_over_ranks
from inflight_fsdp.sharding import read_shards


class PolicyModel(nn.Module):
    """The root of the sharded modules.

    Within its forward pass the head's weight is gathered, whether or not it is tied to the embedding.
    """

    def __init__(self, causal_lm: Any, routers: Routers | None = None) -> None:
        """``routers`` can replay a choice of experts; None if the model has no such routers."""
        super().__init__()
        self.causal_lm = causal_lm
        self.routing_shape = None if routers is None else (*routers.shape, routers.num_experts)
        """The numbers of layers, of experts per token, and of experts per layer; None if routing cannot be replayed."""

    def forward(self, row: Row) -> torch.Tensor:
        """Return the logprobs [N] of the targets.

        A model that accepts images always runs its vision tower, on a blank image if necessary, because every rank must
        take part in summing the tower's gradients.
        """
        output = self.causal_lm.base_model(
            **self._inputs(row),
            position_ids=row.position_ids_R.unsqueeze(0),
            use_cache=False,
            segment_plan=row.plan,
            **({} if row.routed_experts_RLK is None else {REPLAYED: row.routed_experts_RLK}),
        )
        head = self.causal_lm.get_output_embeddings()
        return row.targets.logprobs(output.last_hidden_state, head.weight, head.bias)

    @property
    def takes_images(self) -> bool:
        return takes_images(self.causal_lm.config)

    def _inputs(self, row: Row) -> dict[str, torch.Tensor]:
        if not self.takes_images:
            return {"input_ids": row.token_ids_R.unsqueeze(0)}
        if row.images is not None:
            embeddings_RH = embedded(self.causal_lm, row.token_ids_R, row.images.rows_M, row.images.tensors)
        else:
            embeddings_RH = self.causal_lm.get_input_embeddings()(row.token_ids_R)
            blank_MH = image_features(self.causal_lm, blank_image(self.causal_lm.config), embeddings_RH)
            embeddings_RH = embeddings_RH + 0.0 * blank_MH.sum()
        return {"inputs_embeds": embeddings_RH.unsqueeze(0)}


def empty_policy(config: WorkerConfig, device: torch.device) -> PolicyModel:
    """Return the configured model, with its parameters unsharded on the meta device, and without dropout.

    Raises `ConfigError` if there is no model, if its weights do not fit or are damaged, or if it cannot be frozen or
    compiled as configured, and `UnsupportedError` if this worker cannot train this kind of model. If there are no
    checksums, only the headers of the weight files are read.
    """
    if config.compile:
        check_compiler(device, "compile = true")
    attention = register_segment_attention(in_graphs=not config.compile)
    causal_lm: Any = empty_causal_lm(config.model_path, attention=attention, dtype=config.stored_dtype)
    kind = type(causal_lm).__name__
    if not causal_lm._supports_attention_backend or causal_lm._is_stateful:
        raise UnsupportedError(f"{kind} does not use transformers' attention interface, so it cannot be packed")
    if (num_heads := heads_of(causal_lm.config)[0]) % config.context_parallel:
        raise ConfigError(f"context_parallel {config.context_parallel} does not divide the {num_heads} attention heads")
    if not isinstance(causal_lm.get_output_embeddings(), nn.Linear):
        raise UnsupportedError(f"the head of {kind} is not a linear layer")
    known = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}  # a tied head under its own name
    if buffers := sorted(set(causal_lm.state_dict()) - known):
        raise UnsupportedError(
            f"{kind} has persistent buffers, which this worker neither trains nor stores: {shortened(buffers)}"
        )
    layouts = layouts_of(causal_lm, stored_tensors(config.model_path))
    wanted = {name: shape for layout in layouts.values() for name, shape in layout.shapes.items()}
    ignored = tuple(causal_lm._keys_to_ignore_on_load_unexpected or ())
    fitting_tensors(config.model_path, wanted, known=known, ignored=ignored)
    check_checkpoint(config.model_path, only_weights=True)
    # Compiled parts of layers would be compiled again for each choice of experts.
    routers = None if config.compile else routers_of(causal_lm)
    policy = PolicyModel(causal_lm.eval(), routers)
    if routers is not None:
        replay_routing(causal_lm, routers)
    if config.float8:
        for layer in _layers(policy):
            multiply_in_float8(layer, device)
    if config.compile:
        compile_layers(_layers(policy))
    if config.lora is not None:
        add_lora(causal_lm, _layers(policy), config.lora, getattr(torch, config.stored_dtype))
    else:
        _freeze(causal_lm, config.frozen)
    if config.activation_checkpointing:
        _recompute_layers(policy)
    return policy


def layouts_of(causal_lm: Any, held: Collection[str] = ()) -> dict[str, Layout]:
    """Return how each parameter is stored in a checkpoint that holds tensors with these names.

    Raises `UnsupportedError` if the model stores a parameter in a way that this worker does not know.
    """
    return {
        name: lora_layout(name, parameter) if is_lora(name) else _layout(name, parameter, causal_lm, held)
        for name, parameter in causal_lm.named_parameters()
    }


def _layout(name: str, parameter: torch.Tensor, causal_lm: Any, held: Collection[str]) -> Layout:
    stored = stored_shapes(causal_lm, name, parameter, held)
    is_renamed = takes_images(causal_lm.config) and list(stored.values()) == [tuple(parameter.shape)]
    if is_renamed or stored == {name: tuple(parameter.shape)}:
        return Layout(stored)
    if parts := EXPERT_PARTS.get(".".join(name.split(".")[-2:])):
        layout = layout_by_expert(name, parameter, parts)
        if layout.shapes == stored:
            return layout
    raise UnsupportedError(
        f"{type(causal_lm).__name__} stores {name} as {shortened(sorted(stored))}, a conversion that this worker does "
        "not know, so servers would not recognize the published name"
    )


def load_weights(
    policy: PolicyModel,
    layouts: Mapping[str, Layout],
    shardings: Mapping[str, Sharding],
    config: WorkerConfig,
    device: torch.device,
) -> None:
    """Fill this rank's shards of a policy from its checkpoint, and the shards of a LoRA with their initial values.

    Buffers are not sharded; they are placed on ``device``, the device that computes.
    """
    buffers = dict(policy.named_buffers())
    policy.to_empty(device="cpu" if config.cpu_offload else device)
    place_buffers(policy, buffers, device)
    policy.causal_lm.tie_weights()
    parameters: dict[str, DTensor] = dict(policy.causal_lm.named_parameters())
    local = {name: parameters[name].to_local() for name in layouts}
    stored = [name for name in layouts if not is_lora(name)]
    laid_out = [ShardedTensor(local[name], shardings[name], layouts[name]) for name in stored]
    read_shards(stored_tensors(config.model_path), laid_out)
    if config.lora is not None:
        initialise({name: local[name] for name in layouts if is_lora(name)}, shardings, config.lora)


def place_buffers(policy: PolicyModel, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Move the named buffers to the device that computes."""
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(policy.get_submodule(owner), attribute, buffer.to(device))


def _freeze(causal_lm: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters that match a pattern from training.

    Raises `ConfigError` if a pattern matches no parameter, or if the patterns match every parameter.
    """
    names = {name for name, _ in causal_lm.named_parameters()}
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"frozen: {pattern!r} matches no parameter; the parameters are {shortened(sorted(names))}"
            )
    frozen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if frozen == names:
        raise ConfigError(f"frozen: {list(patterns)} matches every parameter, so nothing would be trained")
    for name in frozen:
        causal_lm.get_parameter(name).requires_grad_(False)


def _recompute_layers(policy: PolicyModel) -> None:
    """Make each decoder layer keep only its input, and recompute itself in the backward pass."""
    model = policy.causal_lm
    # transformers 5.23 renames this method and deprecates the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in _layers(policy):
        layer.training = True  # transformers checks this; the layer's own modules stay in eval, without dropout


def shard_policy(policy: PolicyModel, mesh: DeviceMesh, config: WorkerConfig) -> None:
    """Shard each decoder layer, and the rest as one more unit, over the last dimension of the mesh.

    Gradients are summed over all ranks of the mesh. Gathered parameters are cast to the configured dtype, and gradients
    to the dtype in which they are summed. Shards in host memory are pinned if the mesh consists of GPUs.
    """
    summed_dtype = config.reduce_dtype or config.stored_dtype
    precision = MixedPrecisionPolicy()
    if {config.dtype, summed_dtype} != {config.stored_dtype}:
        computed, summed = getattr(torch, config.dtype), getattr(torch, summed_dtype)
        precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=summed, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    for layer in _layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if mesh.size() > 1:
        sum_gradients_over_ranks(policy)


def _layers(policy: PolicyModel) -> list[nn.Module]:
    """Return the decoder layers, which do not include those of a vision tower."""
    return decoder_layers(policy.causal_lm)
