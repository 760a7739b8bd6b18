"""Mixtures of experts on real engines: an update brings the matrices of each expert under their checkpoint names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inflight.conformance.models import make_tiny_model
from inflight.errors import UnsupportedError
from inflight.model.checkpoints import load_causal_lm
from tests.real_engines.servers import ENGINES, publish, request, run, running

TOLERANCE = 2e-3
"""float32: engines compute experts and softmax in other orders."""


@pytest.mark.parametrize("name", ENGINES)
def test_a_published_mixture_of_experts_is_sampled_from(name: str, tmp_path: Path) -> None:
    first, second = (make_tiny_model(tmp_path / f"{seed}", family="qwen3_moe", seed=seed) for seed in (0, 1))
    with running(name, first) as engine:
        with engine.publisher() as publisher:
            report = publish(publisher, load_file(second / "model.safetensors"), 1)
            assert report.applied_everywhere, report.summary()
        asked = request(24, temperature=1.0)
        (completion,) = run(engine.endpoint(), lambda endpoint: endpoint.generate(asked)).completions
        with pytest.raises(UnsupportedError, match="routed_experts"):
            run(engine.endpoint(), lambda it: it.generate(asked.model_copy(update={"routed_experts": True})))
    ids = torch.tensor([[*asked.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        model = load_causal_lm(second, attention="sdpa", dtype="float32")
        expected = torch.log_softmax(model(ids).logits[0, len(asked.prompt_token_ids) - 1 : -1], dim=-1)
    expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < TOLERANCE
