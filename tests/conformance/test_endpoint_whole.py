"""The ratios by which the kit tells defaults of a sampler are what its false-alarm rate rests on."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.conformance.endpoint.whole import _NUM_DEFAULTS, _gains
from inflight.wire import Completion, GenerateRequest, SamplingParams

V = 60
PROMPT = tuple(range(0, V, 3))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_each_ratio_is_one_in_the_mean_and_gains_what_is_said_of_it(temperature: float, seed: int) -> None:
    """Over all tokens that may come: sum of p r is 1, and sum of p r log r is the power, which is the gain under it."""
    logits_1V = 3 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed)).double()
    asked_V = torch.log_softmax(logits_1V[0] / temperature, dim=-1)
    request = GenerateRequest(
        request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(temperature=temperature, max_tokens=1)
    )
    subject: Any = SimpleNamespace(reference=SimpleNamespace(weights=None, logits=lambda *_: logits_1V))
    means: dict[str, float] = {}
    gained: dict[str, float] = {}
    said: dict[str, float] = {}
    for token in range(V):
        completion = Completion.model_construct(index=0, token_ids=(token,), logprobs=(0.0,))
        for name, gain, power in _gains(subject, request, completion):
            weight = math.exp(float(asked_V[token]) + gain)
            means[name] = means.get(name, 0.0) + weight
            gained[name] = gained.get(name, 0.0) + weight * gain
            said[name] = power
    assert {"repetition_penalty=1.1", "presence_penalty=1", "top_k=50", "top_p=0.9", "min_p=0.2"} <= set(means)
    assert means == pytest.approx(dict.fromkeys(means, 1.0), abs=1e-9)
    assert gained == pytest.approx(said, abs=1e-9)
    assert len(means) <= _NUM_DEFAULTS
