"""LoRAs on the wire: the names of their tensors, and the model's weights that they change.

The names are those that PEFT uses in files: ``base_model.model.<module>.lora_A.weight`` [r, in] and
``...lora_B.weight`` [out, r] change ``<module>.weight`` [out, in]. `inflight.weights.receive.base_weights` merges the
tensors themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.base.shortened import shortened
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.model.lora_settings import LoraSettings
from inflight.wire import Manifest, TensorSpec

PREFIX = "base_model.model."
PARTS = _A, _B = ".lora_A.weight", ".lora_B.weight"
"""The suffixes of the names of the LoRA matrices A and B."""
_MATRIX = re.compile(r"(?:^|\.)layers\.\d+\.(?!.*\.experts\.).*\.weight$")


def lora_names(module: str) -> tuple[str, str]:
    """Return the names of the LoRA matrices A and B of one module."""
    return f"{PREFIX}{module}{_A}", f"{PREFIX}{module}{_B}"


def lora_shapes(settings: LoraSettings, model: Path) -> Mapping[str, tuple[int, int]]:
    """Return the shapes of A and B of every target. Raises `ConfigError` for targets that the model does not have."""
    specs = {spec.name.removesuffix(".weight"): spec.shape for spec in tensor_specs_of(model, "float32")
             if len(spec.shape) == 2 and _MATRIX.search(spec.name)}  # fmt: skip
    shapes: dict[str, tuple[int, int]] = {}
    for layer in settings.chosen(list(specs)):
        (num_out, num_in), (a, b) = specs[layer], lora_names(layer)
        shapes |= {a: (settings.rank, num_in), b: (num_out, settings.rank)}
    return shapes


def changed_names(manifest: Manifest) -> list[str]:
    """Return the model's tensors that an update changes: the ones that it sends, or the ones that its LoRA adapts."""
    if manifest.lora is None:
        return [tensor.name for tensor in manifest.tensors]
    return [f"{module}.weight" for module in _modules(manifest)]


def lora_difference(shapes: Mapping[str, Sequence[int]] | None, manifest: Manifest) -> str | None:
    """Return why a LoRA cannot be merged into a model with these tensors, or None if it can.

    ``shapes`` is None if the model's tensors are not known. The text names up to five tensors for each kind of problem.
    """
    lora = manifest.lora
    assert lora is not None
    sent = {tensor.name: tensor for tensor in manifest.tensors}
    modules = _modules(manifest)
    problems = []
    pairs = {name for module in modules for name in lora_names(module)}
    if alone := sorted(pairs.symmetric_difference(sent)):
        problems.append(f"tensors that do not form pairs of {PREFIX}<module>{_A} and {_B}: {shortened(alone)}")
    whole = {m: (sent[a], sent[b]) for m in modules for a, b in [lora_names(m)] if a in sent and b in sent}
    ranks = [
        f"{module} has A of shape {a.shape} and B of shape {b.shape}"
        for module, (a, b) in whole.items()
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == lora.rank
    ]
    if ranks:
        problems.append(f"{len(ranks)} pairs do not have rank {lora.rank}: {'; '.join(ranks[:5])}")
    if shapes is not None:
        if unknown := [m for m in modules if f"{m}.weight" not in shapes]:
            problems.append(f"{len(unknown)} modules are unknown to this endpoint: {shortened(unknown)}")
        fitting = {m: pair for m, pair in whole.items() if f"{m}.weight" in shapes}
        wrong = [
            f"{module} is {_product(*pair)}, expected {tuple(shapes[f'{module}.weight'])}"
            for module, pair in fitting.items()
            if not ranks and _product(*pair) != tuple(shapes[f"{module}.weight"])
        ]
        if wrong:
            problems.append(f"{len(wrong)} products do not have the shapes of their weights: {'; '.join(wrong[:5])}")
    return ". ".join(problems) or None


def _modules(manifest: Manifest) -> list[str]:
    """Return the modules that the tensors' names contain, in order, each once."""
    names = [t.name.removeprefix(PREFIX) for t in manifest.tensors if t.name.startswith(PREFIX)]
    return list(dict.fromkeys(n[: -len(_A)] for n in names if n.endswith((_A, _B))))


def _product(a: TensorSpec, b: TensorSpec) -> tuple[int, int]:
    return b.shape[0], a.shape[1]
