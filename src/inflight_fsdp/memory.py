"""How much memory a rank of FSDP2 or TorchTitan needs, computed from ``config.json``, tensor shapes and settings.

The rows of the checkpoint's parameters are divided among the R ranks that share one copy, so a rank holds
P = sum of ceil(rows / R) * (elements of a row). m is the size in bytes of an element in the stored dtype, c is that in
``dtype``, and T is the number of tokens of a micro-batch.

- parameters: m P, plus m P of each reference model and teacher
- gradients: m P, for trained parameters only
- optimizer states: 2 m P, or 2 (1 + 4 / 256) P with ``adamw8bit``
- gathered layers: 2 c L + (c + m) L + (2 c + m) E. L is the number of elements of the largest layer, which is still
  gathered while the next one is being gathered, with its gradient before and after the sum over ranks. E is the number
  of elements outside the layers (embedding, head), which are gathered from the forward pass to the end of the backward
  pass.
- activations: T times the bytes per token that autograd keeps for all layers; with activation checkpointing, c H for
  each layer, and the rest for one layer only. A layer with A heads and K key-value heads of D elements, hidden size H
  and intermediate size I needs 2 (4 + 2 c) H for the norms, which compute in float32, c (5 / 4) (2 A + 2 K) D + 4 A for
  attention with segments padded by a quarter, c A D for its projection, 4 c I for the MLP, and (4 + c) (A + K) D for
  norms of queries and keys. With experts, the MLP needs 4 c I + c H for each expert of a token.
- head: two tiles of C x 4,096 logits and two of 4,096 x H weights in float32, with C at most 1,024 targets, and
  4 H + c H for each token.
- publish: if trainers and servers alternate, the memory of rank 0 while servers sample: three buckets of 64 MiB, or of
  the size of the largest tensor at c bytes per element if that is larger, and that tensor once more at m bytes.

None of these estimates has been compared with measurements on a GPU.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from math import prod

from inflight.contracts import MemoryTerm, TrainingLoad
from inflight.model.shapes import ModelShape, model_shape
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.encode.lora_tensors import lora_shapes
from inflight.wire import DTYPE_SIZES
from inflight_fsdp.config import WorkerConfig

_TILE_TOKENS, _TILE_VOCAB = 1024, 4096
_PADDING = 1.25
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def memory_terms(config: WorkerConfig, load: TrainingLoad) -> tuple[MemoryTerm, ...]:
    """Return the GPU memory that the rank with the largest share needs by the end of its first step.

    Raises `ConfigError` if the settings or the model cannot be used.
    """
    model = model_shape(config.model_path)
    compute, stored = DTYPE_SIZES[config.dtype], DTYPE_SIZES[config.stored_dtype]
    layout = config.rank_layout(load.num_ranks)
    size = load.num_ranks if config.shard_size is None else config.shard_size * layout.tensor * layout.stages
    frozen = [name for name in model.tensors if any(fnmatch.fnmatch(name, it) for it in config.frozen)]
    elements = shard_elements(model.tensors, size)
    trained = elements - shard_elements({name: model.tensors[name] for name in frozen}, size)
    if config.lora is not None:
        trained = shard_elements(lora_shapes(config.lora, config.model_path), size)
        elements += trained
    others = sum(shard_elements(model_shape(path).tensors, size) for path in load.untrained_models)
    parameters = stored * (elements + others)
    moments = optimizer_bytes(trained, stored, is_8bit=config.optimizer == "adamw8bit")
    more_ranks = "raise train.num_ranks"
    sharded = (
        MemoryTerm("parameters", parameters, f"{more_ranks}, or trainer_options.cpu_offload = true"),
        MemoryTerm("gradients", stored * trained, more_ranks, "training"),
        MemoryTerm("optimizer states", moments, f"{more_ranks}, or trainer_options.optimizer = 'adamw8bit'"),
    )
    layers, outside = _layer_elements(model.tensors)
    gathered = (3 * compute + stored) * max(layers, default=0) + (2 * compute + stored) * outside
    tokens, checkpointing = load.tokens_per_micro_batch, config.activation_checkpointing
    kept = activation_bytes(model, config.dtype, tokens, checkpointing=checkpointing)
    fewer = "lower train.max_tokens_per_micro_batch"
    fewer_kept = fewer if checkpointing else f"{fewer}, or activation_checkpointing = true"
    return (
        *(() if config.cpu_offload else sharded),
        MemoryTerm("gathered layers", gathered, "set model.dtype to 'bfloat16'", "training"),
        MemoryTerm("activations", kept, fewer_kept, "training"),
        MemoryTerm("head", head_bytes(model, config.dtype, tokens), fewer, "training"),
        MemoryTerm("publish", publish_bytes(model, compute, stored), phase="sampling"),
    )


def publish_bytes(model: ModelShape, compute_size: int, master_size: int) -> int:
    """Return the largest number of bytes that rank 0 has gathered but not yet sent."""
    largest = max(map(prod, model.tensors.values()))
    return 3 * max(DEFAULT_BUCKET_BYTES, compute_size * largest) + master_size * largest


def shard_elements(tensors: Mapping[str, Sequence[int]], num_ranks: int) -> int:
    """Return P, the number of elements on rank 0, which holds at least as many as any other rank."""
    return sum(-(-shape[0] // num_ranks) * prod(shape[1:]) for shape in tensors.values() if shape)


def optimizer_bytes(elements: int, master_size: int, *, is_8bit: bool) -> int:
    """Return the size in bytes of both moments for this many elements."""
    return 2 * (elements + 4 * elements // 256) if is_8bit else 2 * master_size * elements


def _layer_elements(tensors: Mapping[str, Sequence[int]]) -> tuple[list[int], int]:
    """Return the number of elements in each layer, and the number outside all layers."""
    layers: dict[str, int] = {}
    outside = 0
    for name, shape in tensors.items():
        if found := _LAYER.search(name):
            layers[found[1]] = layers.get(found[1], 0) + prod(shape)
        else:
            outside += prod(shape)
    return list(layers.values()), outside


def activation_bytes(model: ModelShape, dtype: str, num_tokens: int, *, checkpointing: bool) -> int:
    """Return the bytes that autograd keeps for ``num_tokens`` packed tokens in all layers."""
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
    """Return the peak memory in bytes that the head needs in addition to its weight if every token is a target."""
    tiles = 2 * 4 * min(_TILE_TOKENS, num_tokens) * _TILE_VOCAB + 2 * 4 * _TILE_VOCAB * model.hidden_size
    return tiles + num_tokens * (4 + DTYPE_SIZES[dtype]) * model.hidden_size
