"""Models with random weights, made on the device that uses them, without a hub and without files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.settings import Settings
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.engines.embedded.slots import token_bytes_of
from inflight.engines.embedded.tiny import EOS, PAD, VOCAB_SIZE, save_tiny_model

MAX_MODEL_LEN = 4096
NUM_SERVED = 8
"""Sequences that a server of these models decodes at a time."""


def half_billion(settings: Settings) -> Any:
    """Return the configuration of Qwen2.5-0.5B, or a tiny one of the same kind."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    if settings.quick:
        sizes = {
            "vocab_size": 512,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    return Qwen2Config(
        **sizes,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def config_of_size(size_bytes: int) -> Any:
    """Return the configuration of a Llama of about ``size_bytes`` in bfloat16: the widest with twelve layers or more.

    Of few bytes, the narrowest.
    """
    num_elements = size_bytes // 2
    for hidden_size in (4096, 2048, 1024, 512, 256, 128, 64):
        intermediate_size = hidden_size * 11 // 4
        num_heads = max(1, hidden_size // 64)
        num_kv_heads = max(1, num_heads // 8)
        attention = 2 * hidden_size**2 + 2 * hidden_size * num_kv_heads * 64
        layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
        if num_elements >= 12 * layer:
            break
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=max(1, round(num_elements / layer)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def random_model(config: Any, device: str, *, attention: str = "sdpa") -> Any:
    """Return a model with random bfloat16 weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.eval()


def save_random_model(config: Any, settings: Settings) -> Path:
    """Write a model with random weights and the byte tokenizer as a checkpoint; return its directory."""
    path = settings.place / "model"
    save_tiny_model(random_model(config, settings.device), path)
    return path


def serve_random(model: Path, *, device: str, dtype: str, threads: int) -> EmbeddedEndpoint:
    """Return an endpoint of the embedded engine with random weights: ``inflight serve --engine`` calls it.

    ``model`` holds a configuration and no weights, since writing and reading sixteen gigabytes takes longer than
    everything that is measured.
    """
    torch.set_num_threads(threads)
    register_slot_attention()
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    served = random_model(config, device, attention=ATTENTION_NAME).to(getattr(torch, dtype))
    engine = Engine(
        served,
        max_model_len=MAX_MODEL_LEN,
        max_concurrent=NUM_SERVED,
        kv_cache_bytes=NUM_SERVED * MAX_MODEL_LEN * token_bytes_of(config, served.dtype),
    )
    return EmbeddedEndpoint(engine, served, name=model.name)
