"""Loads a model directory into a running embedded endpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from inflight.contracts import DEFAULT_MAX_CONCURRENT, DraftProvider
from inflight.engines.embedded.chat import ChatFormat
from inflight.engines.embedded.decoding import compiler_for
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, describe_decode_kernel, register_slot_attention
from inflight.engines.embedded.slots import token_bytes_of
from inflight.errors import ConfigError
from inflight.model.checkpoints import load_causal_lm, load_tokenizer, max_model_len_of
from inflight.model.compiler import check_compiler
from inflight.model.images import load_image_processor
from inflight.rollouts.drafts import DraftSource

_LOG = logging.getLogger(__name__)


def load_endpoint(
    path: Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    max_model_len: int | None = None,
    max_concurrent: int = DEFAULT_MAX_CONCURRENT,
    kv_cache_bytes: int | None = None,
    compile: bool = False,
    drafts: DraftSource | DraftProvider | None = None,
) -> EmbeddedEndpoint:
    """Return an endpoint with a running engine that serves the model in ``path``.

    If ``dtype`` is None, the stored dtype is kept; if ``device`` is None, a GPU is used if there is one; if
    ``max_model_len`` is None, it is the model's maximum. The KV cache uses at most ``kv_cache_bytes``; None allows
    ``max_concurrent`` sequences of ``max_model_len``, or half of all memory if that is less. If the cache holds fewer
    tokens than the model allows, the context is shortened. ``compile`` compiles the decode step before this returns,
    and captures CUDA graphs on a GPU. Drafts come from ``drafts``, if given. Logs which attention kernel is used for
    decoding. Raises `ConfigError` if the directory cannot be served, or if both ``drafts`` and ``compile`` are given.
    """
    register_slot_attention()
    chosen = _usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if compile and drafts is not None:
        raise ConfigError("drafts and a compiled decode step cannot be combined: omit one of them")
    if compile:
        check_compiler(chosen, "compile")
    model: Any = load_causal_lm(path, attention=ATTENTION_NAME, dtype=dtype, device=chosen)
    tokenizer = load_tokenizer(path)
    images = load_image_processor(path)
    if compile and images is not None:
        raise ConfigError("a compiled decode step is not supported for models with images: omit compile")
    allowed = max_model_len_of(model.config)
    if max_model_len is not None and not 2 <= max_model_len <= allowed:
        raise ConfigError(f"max_model_len {max_model_len} is outside the range 2 to {allowed} that the model allows")
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
    longest = max_model_len or allowed
    config, own_dtype = model.config.get_text_config(), next(model.parameters()).dtype
    sequence_bytes = longest * token_bytes_of(config, own_dtype)
    if kv_cache_bytes is None:
        kv_cache_bytes = min(max_concurrent * sequence_bytes, max(sequence_bytes, _memory_bytes(chosen) // 2))
    elif kv_cache_bytes < (sequence_bytes if max_model_len else 2 * sequence_bytes // longest):
        raise ConfigError(
            f"kv_cache_bytes {kv_cache_bytes} is too small for one sequence of max_model_len {longest}, which needs "
            f"{sequence_bytes} bytes of KV cache; allow more, or set a smaller max_model_len"
        )
    kernel = describe_decode_kernel(config, own_dtype, chosen)
    _LOG.info("attention while decoding in %s on %s: %s", str(own_dtype).removeprefix("torch."), chosen, kernel)
    engine = Engine(
        model,
        max_model_len=longest,
        max_concurrent=max_concurrent,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        decode=None if tokenizer is None else lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        kv_cache_bytes=kv_cache_bytes,
        compiler=compiler_for(chosen) if compile else None,
        drafts=DraftSource(drafts) if isinstance(drafts, str) else drafts,
    )
    chat = ChatFormat(tokenizer, longest, images) if tokenizer is not None and tokenizer.chat_template else None
    return EmbeddedEndpoint(engine, model, name=name or path.resolve().name, chat=chat, images=images)


def _memory_bytes(device: torch.device) -> int:
    """Return the total memory of the host, or the free memory of a GPU, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _usable_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def _eos_token_ids(model: torch.nn.Module, tokenizer: object) -> list[int]:
    """Return the token ids that end a completion.

    They come from the generation config, else from the config, else from the tokenizer.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    return []
