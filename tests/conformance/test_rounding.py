"""What computing in 16 bits does to the reference's logprobs, and how much weights are perturbed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from inflight.conformance.reference import ReferenceCheckpoint
from tests.models import make_model

IDS = random.Random(0).choices(range(258), k=64)


def test_rounding_is_what_the_dtype_makes_of_the_logprobs(tmp_path: Path) -> None:
    reference = ReferenceCheckpoint(make_model(tmp_path / "model"))
    assert reference.rounding("float32", IDS) == 0.0
    assert 0 < reference.rounding("float16", IDS) < reference.rounding("bfloat16", IDS)


@pytest.mark.parametrize(("num_layers", "strength"), [(2, 0.25), (8, 0.125)])
def test_weights_of_deep_models_are_perturbed_less(tmp_path: Path, num_layers: int, strength: float) -> None:
    reference = ReferenceCheckpoint(make_model(tmp_path / "model", num_layers=num_layers))
    changed = reference.perturbed("B").tensors
    for name, tensor in reference.weights.tensors.items():
        factors = (changed[name] / tensor)[tensor != 0]
        torch.testing.assert_close((factors - 1).abs(), torch.full_like(factors, strength))
