"""From a model directory to a running embedded endpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from inflight.checkpoints import load_causal_lm, load_tokenizer, max_model_len_of
from inflight.errors import ConfigError
from inflight.local.chat import ChatFormat
from inflight.local.endpoint import LocalEndpoint
from inflight.local.engine import Engine
from inflight.local.slots import ATTENTION_NAME, register_slot_attention


def load_endpoint(
    path: Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    max_model_len: int | None = None,
    max_concurrent: int = 64,
) -> LocalEndpoint:
    """Return an endpoint that serves the model in ``path``, its engine running.

    ``dtype`` None keeps the stored one, ``device`` None takes a GPU if there is one, ``max_model_len`` None takes what
    the model allows. Raises `ConfigError` if the directory cannot be served.
    """
    register_slot_attention()
    chosen = _usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_causal_lm(path, attention=ATTENTION_NAME, dtype=dtype, device=chosen)
    tokenizer = load_tokenizer(path)
    allowed = max_model_len_of(model.config)
    if max_model_len is not None and not 2 <= max_model_len <= allowed:
        raise ConfigError(f"max_model_len {max_model_len} is outside of 2..{allowed}, which the model allows")
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
    engine = Engine(
        model,
        max_model_len=max_model_len or allowed,
        max_concurrent=max_concurrent,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        decode=None if tokenizer is None else lambda ids: str(tokenizer.decode(ids)),
    )
    chat = ChatFormat(tokenizer) if tokenizer is not None and tokenizer.chat_template else None
    return LocalEndpoint(engine, model, name=name or path.resolve().name, chat=chat)


def _usable_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def _eos_token_ids(model: torch.nn.Module, tokenizer: object) -> list[int]:
    """The ids that end a completion: those of the generation config, else the config's, else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    return []
