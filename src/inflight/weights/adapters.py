"""Low-rank adapters on the wire: what their tensors are called, and which weights of the model they change.

Names are those that PEFT saves: ``base_model.model.<module>.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r]
change ``<module>.weight`` [out, in]. Holds no tensors: `inflight.weights.merging` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inflight.wire import Manifest, TensorSpec

PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def adapter_names(module: str) -> tuple[str, str]:
    """Return the names of A and B of the adapter of one module."""
    return f"{PREFIX}{module}{_A}", f"{PREFIX}{module}{_B}"


def changed_names(manifest: Manifest) -> list[str]:
    """Return the model's tensors that an update changes: those that it sends, or that its adapter belongs to."""
    if manifest.adapter is None:
        return [tensor.name for tensor in manifest.tensors]
    return [f"{module}.weight" for module in _modules(manifest)]


def adapter_difference(shapes: Mapping[str, Sequence[int]] | None, manifest: Manifest) -> str | None:
    """Return what keeps an adapter from being merged into a model of these tensors, None if nothing does.

    ``shapes`` None is a model that is not known. The text names up to five tensors of each kind.
    """
    adapter = manifest.adapter
    assert adapter is not None
    sent = {tensor.name: tensor for tensor in manifest.tensors}
    modules = _modules(manifest)
    problems = []
    pairs = {name for module in modules for name in adapter_names(module)}
    if alone := sorted(pairs.symmetric_difference(sent)):
        problems.append(f"{len(alone)} tensors are no pair of {PREFIX}<module>{_A} and {_B}: {alone[:5]}")
    whole = {m: (sent[a], sent[b]) for m in modules for a, b in [adapter_names(m)] if a in sent and b in sent}
    ranks = [
        f"{module} has {a.shape} and {b.shape}"
        for module, (a, b) in whole.items()
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == adapter.rank
    ]
    if ranks:
        problems.append(f"{len(ranks)} pairs are not of rank {adapter.rank}: {'; '.join(ranks[:5])}")
    if shapes is not None:
        if unknown := [m for m in modules if f"{m}.weight" not in shapes]:
            problems.append(f"{len(unknown)} modules are unknown here: {unknown[:5]}")
        fitting = {m: pair for m, pair in whole.items() if f"{m}.weight" in shapes}
        wrong = [
            f"{module} is {_product(*pair)}, here {tuple(shapes[f'{module}.weight'])}"
            for module, pair in fitting.items()
            if not ranks and _product(*pair) != tuple(shapes[f"{module}.weight"])
        ]
        if wrong:
            problems.append(f"{len(wrong)} products have other shapes: {'; '.join(wrong[:5])}")
    return ". ".join(problems) or None


def _modules(manifest: Manifest) -> list[str]:
    """Return the modules that tensors are named for, in order, each once."""
    names = [t.name.removeprefix(PREFIX) for t in manifest.tensors if t.name.startswith(PREFIX)]
    return list(dict.fromkeys(n[: -len(_A)] for n in names if n.endswith((_A, _B))))


def _product(a: TensorSpec, b: TensorSpec) -> tuple[int, int]:
    return b.shape[0], a.shape[1]
