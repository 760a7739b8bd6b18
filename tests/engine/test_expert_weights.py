"""Updates of a mixture of experts bring the tensors of its checkpoint, one matrix of one expert at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from inflight.engines.embedded.parameters import StoredTensors
from tests.engine.reference import (
    assert_close,
    forward_logprobs,
    load_reference,
    make_request,
    random_prompt,
)
from tests.engine.test_in_flight_policies import completions_of, publishing
from tests.models import make_model


def test_a_published_mixture_of_experts_is_served(tmp_path: Path) -> None:
    first, second = (make_model(tmp_path / f"{seed}", "qwen3_moe", seed=seed) for seed in (0, 1))
    prompt = random_prompt(9, 9)
    with publishing(first, max_concurrent=2) as it:
        it.publish(load_file(second / "model.safetensors"), 1, "keep")
        (completion,) = completions_of(it.start(make_request("r", prompt, max_tokens=20)))
    assert_close(completion.logprobs, forward_logprobs(load_reference(second), prompt, completion.token_ids))


def test_experts_that_an_update_leaves_out_stay(tmp_path: Path) -> None:
    model = load_reference(make_model(tmp_path / "model", "qwen3_moe"))
    stored = StoredTensors(model)
    parameters = dict(model.named_parameters())
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    sent = torch.full((32, 32), 7.0)
    before = {part: view.clone() for part, view in stored.views(parameters).items()}
    ((owner, whole),) = stored.assemble([(name, sent)], parameters.__getitem__)
    after = stored.views(parameters | {owner: whole})
    assert owner == "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(after.pop(name), sent)
    assert all(torch.equal(view, before[part]) for part, view in after.items())
