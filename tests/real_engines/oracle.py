"""Logprobs that transformers gives to what an engine sampled, for weights that are given as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from inflight.wire import GenerateResponse

PROMPT = tuple(b"weights")


def transformers_logprobs(model: Path, tensors: Mapping[str, torch.Tensor], response: GenerateResponse) -> list[float]:
    """Return the logprobs of the first completion's tokens behind `PROMPT` under these weights, in float32."""
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    missing = causal_lm.load_state_dict(dict(tensors), strict=False)
    assert missing.unexpected_keys == []
    tokens = response.completions[0].token_ids
    with torch.no_grad():
        logits_TV = causal_lm(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    return [float(logprobs_TV[i, token]) for i, token in enumerate(tokens)]
