"""Loading a causal language model and its tokenizer from a local directory, with errors that say what is wrong.

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

from inflight.attention import check_model_is_supported
from inflight.errors import ConfigError, UnsupportedError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"


def load_config(path: Path) -> Any:
    """Return the transformers config of a model directory.

    Raises `ConfigError` if the directory does not hold a causal language model, `UnsupportedError` if the model can be
    neither trained nor served here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        raise ConfigError(
            f"model directory {str(path)!r} does not exist; give a directory with config.json and safetensors"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {str(path)!r} has no config.json; is it a Hugging Face checkpoint?")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers may raise anything
        raise ConfigError(f"{path / 'config.json'} cannot be read: {_one_line(error)}") from error
    architectures = config.architectures or []
    models = AutoModelForCausalLM._model_mapping
    if type(config) not in models or not any("CausalLM" in a for a in architectures):
        if type(config) in models and (name := models[type(config)].__name__) in architectures:
            takes_more = name.endswith("ForConditionalGeneration")
            why = "it takes inputs other than text" if takes_more else "its attention is not told where sequences end"
            raise UnsupportedError(
                f"{str(path)!r} holds a {name}, which cannot be trained or served here: {why}. Supported models "
                "are the ...ForCausalLM decoders of transformers with full attention through its attention interface, "
                "such as LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM and GemmaForCausalLM"
            )
        raise ConfigError(
            f"{str(path)!r} is not a causal language model: architectures {architectures}, type {config.model_type!r}"
        )
    check_model_is_supported(config)
    return config


def check_weights(path: Path) -> None:
    """Check, by the headers of the files alone, that the weights in a model directory are whole and fit its config.

    Raises `ConfigError` that names the file or the tensor that is wrong, and what `load_config` raises.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = load_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        empty = {name: torch.empty(parameter.shape) for name, parameter in model.named_parameters()}
    wanted = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, empty).items()}
    ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
    fitting_tensors(path, wanted, known=model.state_dict().keys(), ignored=ignored)


def load_causal_lm(
    path: Path, *, attention: str, dtype: str | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Return the model of a directory. ``attention`` is a registered attention function; ``dtype`` None: as stored."""
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    _weight_files(path)
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
            **_experts_of(dtype),
        )
    except Exception as error:  # transformers and safetensors may raise anything
        raise ConfigError(f"the weights in {str(path)!r} cannot be loaded: {_one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading.get(kind, ()))):
            raise ConfigError(f"the checkpoint {str(path)!r} does not fit its config: {kind} {names[:5]}")
    return model.to(device)  # type: ignore[no-any-return]


def empty_causal_lm(path: Path, *, attention: str, dtype: str) -> Any:
    """Return the model of a directory with parameters on the meta device and filled buffers on the CPU.

    No weights are read. Raises what `load_config` raises, and `UnsupportedError` if the model has a buffer that its
    class does not fill by itself.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention, **_experts_of(dtype)
        )
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            nothing = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, nothing, device="cpu")
        if own:
            model._init_weights(module)  # as transformers does after loading on meta
    if unknown := [name for name, buffer in model.named_buffers() if bool(buffer.isnan().any())]:
        raise UnsupportedError(f"{type(model).__name__} has buffers that cannot be made from its config: {unknown[:5]}")
    return model


def _experts_of(dtype: str | None) -> dict[str, str]:
    """Return how transformers computes experts: torch has no grouped matrix products in float64."""
    return {"experts_implementation": "eager"} if dtype == "float64" else {}


def load_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a model directory, or None if there is none. Raises `ConfigError` if it is broken."""
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file of a tensor, and what its header says. ``dtype`` is None if it is not one that can be trained."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a model directory, from the headers alone.

    The files are those of its index, or all of them without an index. Raises `ConfigError` if there are none, or that
    names a file that is missing or cannot be read, and the tensor at which a file is cut off.
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
    """Return the tensors of a directory, which must be those ``wanted``, with these shapes. Raises `ConfigError`.

    Further tensors are refused unless their name is ``known`` or matches an ``ignored`` pattern.
    """
    stored = stored_tensors(path)
    problems = []
    if missing := sorted(set(wanted) - set(stored)):
        problems.append(f"{len(missing)} tensors are missing: {missing[:5]}")
    for name in sorted(set(wanted) & set(stored)):
        file = stored[name].file.name
        if stored[name].shape != tuple(wanted[name]):
            problems.append(f"{name} in {file} has shape {stored[name].shape}, not {tuple(wanted[name])}")
        elif stored[name].dtype is None:
            problems.append(f"{name} in {file} has a dtype that cannot be trained")
    others = set(stored) - set(wanted) - set(known)
    if unknown := sorted(name for name in others if not any(re.search(pattern, name) for pattern in ignored)):
        problems.append(f"{len(unknown)} tensors are unknown: {unknown[:5]}")
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
        files = sorted({path / file for file in named.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{str(path / _INDEX)!r} cannot be read: {_one_line(error)}") from error
    for file in files:
        if not file.is_file():
            lost = sorted(name for name, other in named.items() if path / other == file)
            raise ConfigError(f"{str(file)!r} is missing; {_INDEX} lists {len(lost)} tensors in it: {lost[:5]}")
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
