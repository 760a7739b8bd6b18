"""Model directories: loading a causal language model and its tokenizer from local files, with errors that say why not.

Nothing is downloaded and nothing is unpickled: weights are read from safetensors only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from inflight.attention import check_model_is_supported
from inflight.errors import ConfigError, UnsupportedError


def load_config(path: Path) -> Any:
    """Return the transformers config of a model directory. Raises `ConfigError` if it holds no supported causal LM."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        raise ConfigError(
            f"model directory {str(path)!r} does not exist; give a directory with config.json and safetensors"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {str(path)!r} has no config.json; is it a Hugging Face checkpoint?")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises what it likes
        raise ConfigError(f"{path / 'config.json'} cannot be read: {_one_line(error)}") from error
    architectures = config.architectures or []
    if type(config) not in AutoModelForCausalLM._model_mapping or not any("CausalLM" in a for a in architectures):
        raise ConfigError(
            f"{str(path)!r} is no causal language model: architectures {architectures}, type {config.model_type!r}"
        )
    check_model_is_supported(config)
    return config


def load_causal_lm(
    path: Path, *, attention: str, dtype: str | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Return the model of a directory. ``attention`` is a registered attention function; ``dtype`` None: as stored."""
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model directory {str(path)!r} has no *.safetensors; other weight formats are not read")
    wanted = "auto" if dtype is None else getattr(torch, dtype)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=wanted,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise what they like
        raise ConfigError(f"the weights in {str(path)!r} cannot be loaded: {_one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading.get(kind, ()))):
            raise ConfigError(f"the checkpoint {str(path)!r} does not fit its config: {kind} {names[:5]}")
    return model.to(device)  # type: ignore[no-any-return]


def empty_causal_lm(path: Path, *, attention: str, dtype: str) -> Any:
    """Return the model of a directory with parameters on the meta device and true buffers on the CPU; nothing is read.

    Raises `ConfigError` if the directory holds no supported causal LM, `UnsupportedError` if the model has a buffer
    that its class does not fill by itself.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    with torch.device("meta"):
        # Grouped matrix products of experts are not made for float64.
        others = {"experts_implementation": "eager"} if dtype == "float64" else {}
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention, **others
        )
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            nothing = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, nothing, device="cpu")
        if own:
            model._init_weights(module)  # with which transformers itself fills buffers after loading on meta
    if unknown := [name for name, buffer in model.named_buffers() if bool(buffer.isnan().any())]:
        raise UnsupportedError(f"{type(model).__name__} has buffers that cannot be made from its config: {unknown[:5]}")
    return model


def load_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a model directory, None if there is none. Raises `ConfigError` if it is broken."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises plain exceptions
        raise ConfigError(f"the tokenizer in {str(path)!r} cannot be loaded: {_one_line(error)}") from error


def max_model_len_of(config: Any) -> int:
    """Return the longest sequence that the model's positions allow."""
    return int(config.get_text_config().max_position_embeddings)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:250]
