"""Loading a causal language model and its tokenizer from a local directory, with specific error messages.

Nothing is downloaded and nothing is unpickled: weights are read from safetensors only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.base.shortened import shortened
from inflight.errors import ConfigError, UnsupportedError
from inflight.model.attention import check_model_is_supported
from inflight.model.checksums import check_checkpoint
from inflight.model.images import check_family, takes_images
from inflight.model.untrusted import TRUST_VARIABLE, name_of_file_beside, trusts_remote_code

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"


def load_config(path: Path) -> Any:
    """Return the transformers config of a model directory.

    Raises `ConfigError` if the directory does not contain a causal language model, and `UnsupportedError` if inflight
    can neither train nor serve the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        raise ConfigError(
            f"model directory {str(path)!r} does not exist; pass a directory with config.json and safetensors files"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model directory {str(path)!r} has no config.json; pass the directory of a Hugging Face checkpoint"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_remote_code())
    except Exception as error:  # transformers may raise anything
        raise ConfigError(f"{path / 'config.json'} cannot be read: {_one_line(error)}") from error
    architectures = config.architectures or []
    models = AutoModelForCausalLM._model_mapping
    if takes_images(config) and _has_class_of(config, architectures):
        check_family(config)
        check_model_is_supported(config)
        return config
    if type(config) not in models or not any("CausalLM" in a for a in architectures):
        if type(config) in models and (name := models[type(config)].__name__) in architectures:
            takes_more = name.endswith("ForConditionalGeneration")
            why = "it accepts inputs other than text" if takes_more else "its attention ignores where sequences end"
            raise UnsupportedError(
                f"{str(path)!r} contains a {name}, which inflight can neither train nor serve: {why}. Supported "
                "models are the ...ForCausalLM decoders of transformers with full attention through its attention "
                "interface, such as LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM and "
                "GemmaForCausalLM"
            )
        raise ConfigError(
            f"{str(path)!r} is not a causal language model: architectures {architectures}, type {config.model_type!r}"
        )
    check_model_is_supported(config)
    return config


def _has_class_of(config: Any, architectures: Sequence[str]) -> bool:
    """Return whether the architectures include the class that transformers uses for a configuration with images."""
    models = _model_class(config)._model_mapping
    return type(config) in models and models[type(config)].__name__ in architectures


def _model_class(config: Any) -> Any:
    """Return the transformers class of the model that a configuration describes."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def _attention_of(config: Any, attention: str) -> str | dict[str, str]:
    """Return the value of ``attn_implementation``; a vision tower keeps transformers' own attention."""
    return {"text_config": attention, "vision_config": "sdpa"} if takes_images(config) else attention


def check_weights(path: Path) -> None:
    """Check, using only the files' headers, that the weights in a model directory are complete and fit its config.

    Raises a `ConfigError` that names the wrong file or tensor. Also raises the errors of `load_config`.
    """
    config = load_config(path)
    with torch.device("meta"):
        model = _model_class(config).from_config(config)
    held = stored_tensors(path).keys()
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        wanted |= stored_shapes(model, name, parameter, held)
    ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
    fitting_tensors(path, wanted, known=model.state_dict().keys(), ignored=ignored)


def load_causal_lm(
    path: Path, *, attention: str, dtype: str | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Return the model of a directory. If ``dtype`` is None, the stored dtype is kept.

    ``attention`` is the name of a registered attention function. Raises `ConfigError` if the weights are damaged, do
    not fit the config or cannot be loaded, and the errors of `load_config`.
    """
    config = load_config(path)
    _weight_files(path)
    check_checkpoint(path, only_weights=True)
    wanted = "auto" if dtype is None else getattr(torch, dtype)
    try:
        model, loading = _model_class(config).from_pretrained(
            path,
            config=config,
            dtype=wanted,
            attn_implementation=_attention_of(config, attention),
            local_files_only=True,
            trust_remote_code=trusts_remote_code(),
            use_safetensors=True,
            output_loading_info=True,
            **_experts_of(dtype),
        )
    except Exception as error:  # transformers and safetensors may raise anything
        raise ConfigError(f"the weights in {str(path)!r} cannot be loaded: {_one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading.get(kind, ()))):
            raise ConfigError(f"the checkpoint {str(path)!r} does not fit its config: {kind} {shortened(names)}")
    loaded: torch.nn.Module = model.to(device)
    return loaded


def published_name(name: str) -> str:
    """Return the name that a tensor of a vision tower has in published checkpoints and in engines.

    transformers 5 drops a part of the name when it loads a checkpoint, and does not restore that part for a model that
    it did not load.
    """
    return re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name)


EXPERT_PARTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""Parameters that hold all experts of a layer, and the names of the matrices that checkpoints store for each expert."""


def stored_shapes(model: Any, name: str, parameter: torch.Tensor, held: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in which transformers stores a parameter.

    ``held`` are the names in the model's checkpoint.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stored = revert_weight_conversion(model, {name: torch.empty(parameter.shape, device="meta")})
    return {
        published if (published := published_name(key)) in held else key: tuple(tensor.shape)
        for key, tensor in stored.items()
    }


def stored_names(model: Any) -> dict[str, str]:
    """Return the name under which each parameter of a loaded model is stored, by the parameter's own name.

    For a model that does not accept images, this is the parameter's own name.
    """
    if not takes_images(model.config):
        return {name: name for name, _ in model.named_parameters()}
    return {name: next(iter(stored_shapes(model, name, it, ()))) for name, it in model.named_parameters()}


def empty_causal_lm(path: Path, *, attention: str, dtype: str) -> Any:
    """Return the model of a directory, with its parameters on the meta device and filled buffers on the CPU.

    No weights are read. Raises the errors of `load_config`, and `UnsupportedError` if the model has a buffer that its
    class does not fill.
    """
    config = load_config(path)
    with torch.device("meta"):
        model = _model_class(config).from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=_attention_of(config, attention),
            **_experts_of(dtype),
        )
    for part_name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            module._buffers[name] = torch.full_like(buffer, _nothing(buffer.dtype), device="cpu")
        if own:
            _model_of(model, part_name)._init_weights(module)  # as transformers does after loading on meta
    if unknown := [name for name, it in model.named_buffers() if bool(_is_nothing(it).any())]:
        raise UnsupportedError(
            f"{type(model).__name__} has buffers that cannot be computed from its config: {shortened(unknown)}"
        )
    return model


def _experts_of(dtype: str | None) -> dict[str, str]:
    """Return options that avoid grouped matrix products of experts in float64, which torch does not support."""
    return {"experts_implementation": "eager"} if dtype == "float64" else {}


def _model_of(model: Any, name: str) -> Any:
    """Return the innermost model that contains the named part and can initialize its buffers.

    For a part of a vision tower, this is the tower.
    """
    while name:
        name = name.rpartition(".")[0]
        if hasattr(part := model.get_submodule(name), "_init_weights"):
            return part
    return model


def _nothing(dtype: torch.dtype) -> float | int:
    """Return a value that no real buffer of this dtype contains."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_nothing(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.dtype == torch.bool:
        return torch.zeros_like(buffer)
    return buffer.isnan() if buffer.is_floating_point() else buffer == _nothing(buffer.dtype)


def load_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a model directory, or None if there is none. Raises `ConfigError` if it is broken."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_remote_code())
    except Exception as error:  # tokenizers raises plain exceptions
        raise ConfigError(f"the tokenizer in {str(path)!r} cannot be loaded: {_one_line(error)}") from error


def max_model_len_of(config: Any) -> int:
    """Return the length of the longest sequence that the model's positions allow."""
    return int(config.get_text_config().max_position_embeddings)


def _one_line(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return f"it contains its own Python code, which is not run unless {TRUST_VARIABLE}=1 is set"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:250]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file of a tensor, and its shape and dtype from the header. ``dtype`` is None if it is not trainable."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a model directory, from the headers alone.

    The files are those that the index lists, or all safetensors files if there is no index. Raises `ConfigError` if
    there are none, or if a file is missing, cannot be read or is cut off. The error names the file, and the tensor at
    which it is cut off.
    """
    found: dict[str, StoredTensor] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="numpy") as tensors:  # torch's maps files for writing
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    part = tensors.get_slice(name)
                    found[name] = StoredTensor(file, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            why = _cut_off(file) or _one_line(error)
            raise ConfigError(f"the weights in {str(file)!r} cannot be read: {why}") from error
    return found


def fitting_tensors(
    path: Path, wanted: Mapping[str, Sequence[int]], *, known: Collection[str] = (), ignored: Sequence[str] = ()
) -> dict[str, StoredTensor]:
    """Return the tensors of a directory. Raises `ConfigError` unless it has all ``wanted`` tensors, with these shapes.

    Other tensors are refused unless their name is ``known`` or matches an ``ignored`` pattern.
    """
    stored = stored_tensors(path)
    problems = []
    if missing := sorted(set(wanted) - set(stored)):
        problems.append(f"missing tensors: {shortened(missing)}")
    untrainable = []
    for name in sorted(set(wanted) & set(stored)):
        file = stored[name].file.name
        if stored[name].shape != tuple(wanted[name]):
            problems.append(f"{name} in {file} has shape {stored[name].shape}, expected {tuple(wanted[name])}")
        elif stored[name].dtype is None:
            untrainable.append(f"{name} in {file}")
    if untrainable:
        problems.append(f"tensors with a dtype that cannot be trained: {shortened(untrainable)}")
    others = set(stored) - set(wanted) - set(known)
    if unknown := sorted(name for name in others if not any(re.search(pattern, name) for pattern in ignored)):
        problems.append(f"unknown tensors: {shortened(unknown)}")
    if problems:
        raise ConfigError(f"the checkpoint {str(path)!r} does not fit its config: {'; '.join(problems[:10])}")
    return stored


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory. Raises `ConfigError` if there are none or one is missing."""
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model directory {str(path)!r} has no *.safetensors files; other weight formats are not supported"
        )
    if not (path / _INDEX).is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        named: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        files = sorted({path / name_of_file_beside(file) for file in named.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{str(path / _INDEX)!r} cannot be read: {_one_line(error)}") from error
    for file in files:
        if not file.is_file():
            lost = sorted(name for name, other in named.items() if path / other == file)
            raise ConfigError(f"{str(file)!r} is missing; {_INDEX} lists {len(lost)} tensors in it: {shortened(lost)}")
    return files


def _cut_off(file: Path) -> str | None:
    """Return where a safetensors file is cut off; None if it is not, or if that cannot be determined."""
    try:
        with file.open("rb") as content:
            header_bytes = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(min(header_bytes, 1 << 27)))
        size_bytes = file.stat().st_size - 8 - header_bytes
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        end, name = min((end, name) for name, end in ends.items() if end > size_bytes)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return f"it ends within {name}, {end - size_bytes} bytes before that tensor's end"
