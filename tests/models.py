"""Tiny random checkpoints for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "qwen2", "qwen3")
TRAINED_FAMILIES = (*FAMILIES, "gemma", "qwen3_moe")


def make_model(
    path: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 258,
    max_model_len: int = 1024,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: bool = True,
) -> Path:
    """Write a random model (and the byte tokenizer) to ``path`` and return it."""
    from transformers import (
        AutoModelForCausalLM,
        GemmaConfig,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    from inflight.engines.embedded.tiny import byte_tokenizer

    config_class: Any = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "gemma": GemmaConfig,
        "qwen3_moe": Qwen3MoeConfig,
    }[family]
    extra = {} if family == "qwen2" else {"head_dim": hidden_size // num_heads}
    if family == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=256,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # Larger weights than the default: distributions far from uniform, so that a wrong token shows.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path
