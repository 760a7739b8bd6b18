"""How much memory the processes of a run need, by arithmetic from ``config.json``, tensor shapes and settings.

A trainer rank of FSDP2 (`inflight_fsdp`), in bytes. Its parameters are those of the checkpoint, row by row over R ranks
that share one copy: P = sum of ceil(rows / R) * elements of a row. m is the size of ``train.master_dtype``, c of
``model.dtype``, T the tokens of a micro-batch.

- parameters: m P, once more for a reference model
- gradients: m P, of what is trained
- optimizer states: 2 m P, or with ``adamw8bit`` 2 (1 + 4 / 256) P
- gathered layers: 2 c L + (c + m) L + (2 c + m) E. L: elements of the largest layer, which is gathered while the next
  one already is, with its gradient before and after it is summed over the ranks. E: what is outside of the layers
  (embedding, head), gathered from the forward to the end of the backward.
- activations: T times what autograd keeps of one token, for each layer, or with activation checkpointing c H for each
  layer and the rest for one. Of a layer, with A heads and K key-value heads of D elements, hidden size H and
  intermediate size I:  2 (4 + 2 c) H  for the norms, which compute in float32,  c (5 / 4) (2 A + 2 K) D + 4 A  for
  attention with segments padded by a quarter,  c A D  for its projection,  4 c I  for the MLP, and
  (4 + c) (A + K) D  for norms of queries and keys. With experts, 4 c I + c H  for each that a token goes to.
- head: 2 tiles of C x 4,096 logits and 2 of 4,096 x H weights, in float32, and 4 H + c H for each token.

A server:

- weights: c times all elements, over the GPUs that share a copy
- KV cache: of the embedded engine, its limit: ``max_concurrent`` sequences of the whole context at 2 c K D bytes per
  token and layer, at most half of the memory that the weights leave
- engine: of another engine, its share of each GPU, which holds weights, KV cache and activations
- staged update: c times all elements, where an update waits in GPU memory for its commit

With ``servers.release_memory`` trainers and servers take turns. While they sample, trainers hold parameters and
optimizer states, and rank 0 publishes: three buckets of 64 MiB, or of the largest tensor, at c bytes per element, and
that tensor once more at m. While they train, servers hold nothing.

Each process also has `CONTEXT_BYTES`, all the time. Nothing here was compared with a GPU. Knows nothing of processes
and placement.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, get_args

from inflight.contracts import GpuUse
from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import config_number, config_of, tensor_specs_of
from inflight.run.config import RunConfig
from inflight.run.fleet_config import FleetMember
from inflight.run.machines.lora_shapes import lora_shapes
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.wire import DTYPE_SIZES

CONTEXT_BYTES = 1 << 30
"""Assumed for each process on a GPU: CUDA's context, workspaces of its libraries, buffers of NCCL."""
_TILE_TOKENS, _TILE_VOCAB = 1024, 4096
_PADDING = 1.25
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
ON_THE_GPU = ("nccl", "ipc")
"""Transports whose buckets arrive in GPU memory."""
Phase = Literal["training", "sampling"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic needs to know of a model."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shape of each parameter by its name; the matrices of all experts are one, with an expert in each row."""
    hidden_size: int
    intermediate_size: int
    """Of one expert, if there are experts."""
    num_experts_per_token: int
    """0: an MLP without experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    @property
    def num_elements(self) -> int:
        return sum(map(prod, self.tensors.values()))

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_SIZES[dtype]


@dataclass(frozen=True, slots=True)
class Term:
    """Some memory of one process on each of its GPUs."""

    name: str
    size_bytes: int
    remedy: str = ""
    """What makes it smaller."""
    phase: Phase | None = None
    """When the process needs it; None: all the time."""


def model_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a directory, from config.json and the files' headers.

    Raises `ConfigError` if they cannot be read, or leave a size open.
    """
    config = config_of(path)

    def number(*keys: str) -> int:
        for key in keys:
            if (value := config_number(config, key)) is not None:
                return value
        raise ConfigError(f"{str(path / 'config.json')!r} cannot be read or has no {keys[0]}")

    heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    stored = {spec.name: tuple(spec.shape) for spec in tensor_specs_of(path, "float32")}
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    experts = config_number(config, "num_experts_per_tok") if any(map(_EXPERT.search, stored)) else 0
    return ModelShape(
        tensors=_with_experts_joined(stored),
        hidden_size=number("hidden_size"),
        intermediate_size=number("moe_intermediate_size", "intermediate_size")
        if experts
        else number("intermediate_size"),
        num_experts_per_token=experts or 0,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config_number(config, "num_key_value_heads") or heads,
        head_dim=config_number(config, "head_dim") or hidden_size // heads,
        context=number("max_position_embeddings"),
    )


def _with_experts_joined(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    joined: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        if _EXPERT.search(name) is None:
            joined[name] = shape
        else:
            together = _EXPERT.sub(".experts.", name)
            joined[together] = (joined.get(together, (0,))[0] + 1, *shape)
    return joined


# ---------------------------------------------------------------------------------------------------------------
# Trainers


def trainer_terms(config: RunConfig, model: ModelShape) -> tuple[Term, ...]:
    """Return what the largest rank needs on its GPU, at the end of its first step. Raises `ConfigError`."""
    options = config.train.trainer_options
    compute, master = DTYPE_SIZES[config.model.dtype], DTYPE_SIZES[config.train.master_dtype]
    size = config.train.num_ranks
    if shard_size := options.get("shard_size"):
        size = shard_size * options.get("tensor_parallel", 1) * options.get("pipeline_parallel", 1)
    frozen = [name for name in model.tensors if any(fnmatch.fnmatch(name, it) for it in options.get("frozen", ()))]
    elements = shard_elements(model.tensors, size)
    trained = elements - shard_elements({name: model.tensors[name] for name in frozen}, size)
    if (lora := config.train.lora) is not None:
        trained = shard_elements(lora_shapes(lora, config.model.path), size)
        elements += trained
    num_copies = 1 + ("reference_logprobs" in config.loss.policy_loss().needs)
    moments = optimizer_bytes(trained, master, is_8bit=options.get("optimizer") == "adamw8bit")
    more_ranks = "raise train.num_ranks"
    training: Phase | None = "training" if config.servers.release_memory else None
    sharded = (
        Term("parameters", num_copies * master * elements, f"{more_ranks}, or trainer_options.cpu_offload = true"),
        Term("gradients", master * trained, more_ranks, training),
        Term("optimizer states", moments, f"{more_ranks}, or trainer_options.optimizer = 'adamw8bit'"),
    )
    layers, outside = _layer_elements(model.tensors)
    gathered = (3 * compute + master) * max(layers, default=0) + (2 * compute + master) * outside
    tokens = config.train.max_tokens_per_micro_batch
    checkpointing = bool(options.get("activation_checkpointing"))
    kept = activation_bytes(model, config.model.dtype, tokens, checkpointing=checkpointing)
    fewer = "lower train.max_tokens_per_micro_batch"
    return (
        *(() if options.get("cpu_offload") else sharded),
        Term("gathered layers", gathered, "set model.dtype to 'bfloat16'", training),
        Term("activations", kept, fewer if checkpointing else f"{fewer}, or activation_checkpointing = true", training),
        Term("head", head_bytes(model, config.model.dtype, tokens), fewer, training),
        *([] if training is None else [Term("publish", publish_bytes(model, compute, master), phase="sampling")]),
        Term("context", CONTEXT_BYTES),
    )


def publish_bytes(model: ModelShape, compute_size: int, master_size: int) -> int:
    """Return the bytes of what rank 0 gathers and has not sent yet."""
    largest = max(map(prod, model.tensors.values()))
    return 3 * max(DEFAULT_BUCKET_BYTES, compute_size * largest) + master_size * largest


def shard_elements(tensors: Mapping[str, Sequence[int]], num_ranks: int) -> int:
    """Return P: the elements that rank 0 holds, which has no fewer than any other."""
    return sum(-(-shape[0] // num_ranks) * prod(shape[1:]) for shape in tensors.values() if shape)


def optimizer_bytes(elements: int, master_size: int, *, is_8bit: bool) -> int:
    """Return the bytes of both moments of so many elements."""
    return 2 * (elements + 4 * elements // 256) if is_8bit else 2 * master_size * elements


def _layer_elements(tensors: Mapping[str, Sequence[int]]) -> tuple[list[int], int]:
    """Return the elements of each layer, and those outside of all layers."""
    layers: dict[str, int] = {}
    outside = 0
    for name, shape in tensors.items():
        if found := _LAYER.search(name):
            layers[found[1]] = layers.get(found[1], 0) + prod(shape)
        else:
            outside += prod(shape)
    return list(layers.values()), outside


def activation_bytes(model: ModelShape, dtype: str, num_tokens: int, *, checkpointing: bool) -> int:
    """Return what autograd keeps of ``num_tokens`` packed tokens in all layers."""
    c, hidden, wide = DTYPE_SIZES[dtype], model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = 2 * (4 + 2 * c) * hidden
    layer += int(c * _PADDING * 2 * (queries + keys)) + 4 * model.num_heads + c * queries
    layer += model.num_experts_per_token * (4 * c * wide + c * hidden) or 4 * c * wide
    if any("q_norm" in name for name in model.tensors):
        layer += (4 + c) * (queries + keys)
    last_norm = (4 + 2 * c) * hidden
    kept = c * hidden * model.num_layers + layer if checkpointing else layer * model.num_layers
    return num_tokens * (kept + last_norm)


def head_bytes(model: ModelShape, dtype: str, num_tokens: int) -> int:
    """Return the most that the head holds beside its weight, if every token is a target."""
    tiles = 2 * 4 * min(_TILE_TOKENS, num_tokens) * _TILE_VOCAB + 2 * 4 * _TILE_VOCAB * model.hidden_size
    return tiles + num_tokens * (4 + DTYPE_SIZES[dtype]) * model.hidden_size


# ---------------------------------------------------------------------------------------------------------------
# Servers


def server_terms(
    config: RunConfig, member: FleetMember, use: GpuUse, model: ModelShape, memory_bytes: int
) -> tuple[Term, ...]:
    """Return what one server needs on each of its GPUs, which have ``memory_bytes`` (0: unknown).

    Raises `ConfigError` if the engine's own share of that does not hold the model and one sequence.
    """
    dtype = config.model.dtype
    size_bytes = DTYPE_SIZES[dtype] * model.num_elements
    weights = -(-size_bytes * use.num_copies // use.num_gpus)
    context = use.context or model.context
    sequence = context * model.kv_bytes_per_token(dtype)
    others = []
    sampling: Phase | None = "sampling" if config.servers.release_memory else None
    if use.stages_on_gpu and config.updates.transport in ON_THE_GPU:
        remedy = "choose a transport through host memory, such as 'shm'"
        others.append(Term("staged update", size_bytes, remedy, sampling))
    if use.memory_share is None:
        half = max(sequence, (memory_bytes - weights) // 2)  # trainers load their model later
        cache = min(member.max_concurrent * sequence, half)
        return (
            Term(
                "weights", weights, "set model.dtype to 'bfloat16', or use an engine with tensor parallelism", sampling
            ),
            Term("KV cache", cache, "lower servers.max_concurrent", sampling),
            *others,
            Term("context", CONTEXT_BYTES),
        )
    share = int(use.memory_share * memory_bytes)
    needed = weights + -(-sequence * use.num_copies // use.num_gpus)
    if memory_bytes and needed > share:
        raise ConfigError(
            f"the {member.engine} servers fill {use.memory_share:g} of each GPU, {gib(share)}, but weights "
            f"({gib(weights)}) and one sequence of {context} tokens need {gib(needed)}, {gib(needed - share)} "
            "more: raise the engine's tensor-parallel size or its share of the memory"
        )
    return (
        Term(
            f"engine ({use.memory_share:g} of the GPU)",
            share or needed,
            "lower the engine's share of the memory",
            sampling,
        ),
        *others,
        Term("context", CONTEXT_BYTES),
    )


def gib(size_bytes: int) -> str:
    """Return a size as people read it, such as ``12.3 GiB``."""
    return f"{size_bytes / (1 << 30):.1f} GiB"
