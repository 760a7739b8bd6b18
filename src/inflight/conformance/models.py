"""Creates the kit's checkpoints: tiny random models whose distributions are far from uniform."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from inflight.engines.embedded.tiny import EOS, PAD, VOCAB_SIZE, byte_tokenizer
from inflight.engines.embedded.tiny_images import TinyImageShape, create_tiny_image_model, save_tiny_image_model


def make_seeing_model(path: Path, *, seed: int = 0) -> Path:
    """Write a random float32 checkpoint of a model that accepts images, and return ``path``.

    Its distributions are as far from uniform as those of `make_tiny_model`.
    """
    shape = TinyImageShape(hidden_size=64, num_heads=2, max_model_len=1024)
    model = create_tiny_image_model(shape, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
    save_tiny_image_model(model, path)
    return path


Family = Literal["qwen3", "llama", "qwen3_moe"]


def make_tiny_model(
    path: Path,
    *,
    family: Family = "qwen3",
    tied: bool = False,
    hidden_size: int = 32,
    num_layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
    max_model_len: int = 2048,
    seed: int = 0,
    tokenizer: bool = True,
) -> Path:
    """Write a random float32 checkpoint, and a tokenizer whose ids are bytes, to ``path``; return ``path``.

    Its logits span several units, so that a wrong weight, position or temperature is noticeable.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    config_class: Any = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}[family]
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest size for which every engine has a kernel
        max_position_embeddings=max_model_len,
        tie_word_embeddings=tied,
        attention_dropout=0.5,  # meant for pretraining: neither workers nor endpoints may apply it
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **(experts if family == "qwen3_moe" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8.0 if "layers" in name else 20.0)
    # Many checkpoints have such defaults. Nothing may apply them to a request that does not ask for them.
    model.generation_config.update(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.8, repetition_penalty=1.2, max_new_tokens=20
    )
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path


def lower_logits(weights: dict[str, torch.Tensor], depth: float) -> None:
    """Change the weights of an untied model so that all logits are far below 0, by about ``depth``.

    Channel 0 of the residual stream then has the same value for every token, and outweighs all other channels in the
    final norm.
    """
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.cat([torch.zeros_like(tensor[:1]), tensor[1:]])
    embedding, norm = weights["model.embed_tokens.weight"].clone(), weights["model.norm.weight"].clone()
    head = 4.0 * weights["lm_head.weight"]
    embedding[:, 0], norm[0], head[:, 0] = 20.0, 1.0, -depth / head.shape[1] ** 0.5
    weights |= {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}


def make_model_of_text(path: Path, text: str, pairs: Sequence[str]) -> Path:
    """Write a checkpoint whose model samples the bytes of ``text``, followed by ``pairs``, over and over again; return
    ``path``.

    In all other respects, the checkpoint is like that of `make_tiny_model`. Each pair consists of two ASCII letters and
    is one token. There may be at most 64 tokens, bytes included, and all of them must be different.
    """
    from tokenizers import Tokenizer

    make_tiny_model(path, vocab_size=VOCAB_SIZE + len(pairs), hidden_size=64)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {pair: VOCAB_SIZE + i for i, pair in enumerate(pairs)}
    # A special token that the vocabulary does not contain would receive another id.
    content["model"]["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    content["model"]["merges"] = [list(pair) for pair in pairs]
    Tokenizer.from_str(json.dumps(content)).save(str(file))
    ids, file = [*text.encode(), *range(VOCAB_SIZE, VOCAB_SIZE + len(pairs))], path / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # only the last token decides what follows
    embedding, head = weights["model.embed_tokens.weight"].zero_(), weights["lm_head.weight"].zero_()
    weights["model.norm.weight"].fill_(1.0)
    embedding[:, len(ids) - 1] = 1.0  # after any other token, the text begins
    for i, (token, following) in enumerate(zip(ids, [*ids[1:], ids[0]], strict=True)):
        embedding[token].zero_()[i] = 1.0
        head[following, i] = 20.0
    save_file(weights, file, metadata={"format": "pt"})
    return path
