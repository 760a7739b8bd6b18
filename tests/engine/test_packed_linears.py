"""Weights in oneDNN's layout give the same logits as weights in the ordinary one, before and after updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.packed_linears import PackedLinear, PackedLinears
from inflight.engines.embedded.parameters import ServedParameters
from inflight.model.checkpoints import load_causal_lm
from tests.models import make_model

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def models_of(path: Path) -> tuple[Any, Any]:
    """Return the same model twice, in bfloat16."""
    model, plain = (load_causal_lm(path, attention="sdpa", dtype="bfloat16", device=CPU).eval() for _ in range(2))
    return model, plain


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_packed_layers_compute_what_plain_ones_do_before_and_after_an_update(tmp_path: Path, tied: bool) -> None:
    model, plain = models_of(make_model(tmp_path / "model", tied=tied))
    weights = ServedParameters(model, keeps_addresses=False)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    can_pack = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on a processor without AVX-512
    assert layers and all((type(layer) is PackedLinear) == can_pack for layer in layers)
    assert torch.equal(logits_of(model), logits_of(plain))

    changed = {name: parameter.detach() * 1.5 for name, parameter in weights.by_name.items()}
    ready = weights.prepare(changed.items())
    assert torch.equal(logits_of(model), logits_of(plain)), "preparing an update changes nothing"
    weights.load(ready)
    by_name = dict(plain.named_parameters())
    for name, tensor in changed.items():
        by_name[name].data = tensor
    assert torch.equal(logits_of(model), logits_of(plain))


def test_an_update_of_one_layer_leaves_the_others(tmp_path: Path) -> None:
    model, plain = models_of(make_model(tmp_path / "model"))
    weights = ServedParameters(model, keeps_addresses=False)
    name = next(name for name in weights.by_name if name.endswith("q_proj.weight"))
    tensor = torch.randn_like(weights.by_name[name].detach())
    weights.load(weights.prepare([(name, tensor)]))
    dict(plain.named_parameters())[name].data = tensor
    assert torch.equal(logits_of(model), logits_of(plain))


def test_nothing_is_packed_in_float32_or_where_addresses_must_stay(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    single = load_causal_lm(path, attention="sdpa", dtype="float32", device=CPU)
    assert PackedLinears(single, dict(single.named_parameters())).pack(single.named_parameters()) == {}
    compiled, _ = models_of(path)
    ServedParameters(compiled, keeps_addresses=True)
    assert not any(isinstance(module, PackedLinear) for module in compiled.modules())
