"""The weights that partial updates need in addition to the ones that they send.

`BaseWeights` provides the tensors that an update omits, and `AdaptedWeights` holds the base of a LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from inflight.base.shortened import shortened
from inflight.errors import ConfigError, UpdateRefusedError
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.weights.encode.lora_tensors import changed_names, lora_names
from inflight.wire import LoraSpec, Manifest

Named = list[tuple[str, torch.Tensor]]


class BaseWeights:
    """The tensors that one engine has loaded since it started, by their checkpoint names.

    Tensors that no update has sent are read from the engine's checkpoint in ``directory``. Of the other tensors, only
    those that an update asked to keep are held here. ``dtype`` is the dtype of the model.
    """

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        self._directory = Path(directory)
        self._dtype = dtype
        self._files: dict[str, Path] | None = None
        self._loaded: dict[str, torch.Tensor | None] = {}

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of every tensor in the checkpoint.

        Raises `UpdateRefusedError` if the checkpoint cannot be read.
        """
        try:
            return {spec.name: spec.shape for spec in tensor_specs_of(self._directory, "float32")}
        except ConfigError as error:
            raise UpdateRefusedError(f"a partial update needs the engine's checkpoint: {error}") from error

    def require(self, names: Iterable[str]) -> None:
        """Raise `UpdateRefusedError` unless `tensor` can return every named tensor."""
        known = self._stored_in()
        if lost := [name for name in names if self._loaded.get(name, known.get(name)) is None]:
            raise UpdateRefusedError(
                f"send all weights first, with keep_base=True: loading this update needs {len(lost)} tensors that it "
                f"leaves out, and earlier updates replaced them without keeping a base: {shortened(lost, 3)}"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Return the most recently loaded value of a tensor, in the model's dtype.

        It is on the CPU, or on the device on which it arrived if its update asked to keep it.
        """
        if name in self._loaded:
            kept = self._loaded[name]
            assert kept is not None  # the caller has called `require`
            return kept
        with safe_open(self._stored_in()[name], framework="pt") as file:
            stored: torch.Tensor = file.get_tensor(name)
        return stored.to(self._dtype)

    def note_loaded(self, tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> None:
        """Record the tensors that an update sent. With ``keep``, they stay in memory."""
        self._loaded |= {name: tensor if keep else None for name, tensor in tensors}

    def _stored_in(self) -> Mapping[str, Path]:
        if self._files is None:
            self._files = {}
            for path in sorted(self._directory.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
        return self._files


def merge_lora(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lora: LoraSpec) -> torch.Tensor:
    """Return W0 + s B A in the dtype and on the device of W0, computed in float32 (float64 for a base in float64).

    W0 is [out, in], A [r, in], B [out, r]; Hu et al. 2021 (arXiv 2106.09685), equation 3.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    a, b = a.to(base.device, dtype), b.to(base.device, dtype)
    return (base.to(dtype) + lora.scale * (b @ a)).to(base.dtype)


@dataclass(frozen=True, slots=True)
class AdaptedLoad:
    """The effect of an update on the model: the tensors to load, and the base of those that a LoRA then adapts."""

    tensors: Named
    base: dict[str, torch.Tensor] = field(default_factory=dict)


class AdaptedWeights:
    """The base of the tensors that the current LoRA has changed. A LoRA is always merged into weights without a LoRA.

    The base is the weights of the last update that was not a LoRA, or of the checkpoint. A LoRA replaces the previous
    LoRA; any other update removes it. Only `note_loaded` changes the base.
    """

    def __init__(self) -> None:
        self._base: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        """The model's tensors that the current LoRA has changed."""
        return self._base.keys()

    def prepare(self, manifest: Manifest, arrived: Named, present: Callable[[str], torch.Tensor]) -> AdaptedLoad:
        """Return what to load for an update that has arrived. Changes nothing.

        ``present`` returns a tensor of the model that no LoRA has changed, in memory that loading does not write to. If
        the current LoRA has changed a tensor and this update does not, the tensor's base is loaded.
        """
        base: dict[str, torch.Tensor] = {}
        loads = arrived
        if manifest.lora is not None:
            sent: Mapping[str, torch.Tensor] = dict(arrived)
            loads = []
            for name in changed_names(manifest):
                base[name] = self._base[name] if name in self._base else present(name)
                a, b = (sent[part] for part in lora_names(name.removesuffix(".weight")))
                loads.append((name, merge_lora(base[name], a, b, manifest.lora)))
        changed = {name for name, _ in loads}
        return AdaptedLoad([*loads, *((n, t) for n, t in self._base.items() if n not in changed)], base)

    def move(self, device: torch.device) -> None:
        """Move the base to a device. If this raises, nothing has changed."""
        self._base = {name: tensor.to(device) for name, tensor in self._base.items()}

    def note_loaded(self, load: AdaptedLoad) -> None:
        """Record that the model has loaded what `prepare` returned."""
        self._base = load.base
