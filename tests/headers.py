"""Model directories without values: config.json, an index, a tokenizer, and safetensors files with holes."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from inflight.engines.embedded.tiny import byte_tokenizer

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, a Qwen2 (with biases of queries, keys and values), or a Qwen3 (with their norms)."""
    hidden, wide, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{name}.weight"] = (head_dim,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    return shapes


def write_headers(path: Path, config: dict[str, Any], num_files: int = 2) -> Path:
    """Write a directory that says everything about a model but its values, and return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    shapes = sorted(shapes_of(config).items())
    index = {}
    for number in range(num_files):
        file = path / f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        entries, offset = {}, 0
        for name, shape in shapes[number::num_files]:
            end = offset + 2 * prod(shape)
            entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
            offset, index[name] = end, file.name
        header = json.dumps(entries).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, 8 + len(header) + offset)
    byte_tokenizer().save_pretrained(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path
