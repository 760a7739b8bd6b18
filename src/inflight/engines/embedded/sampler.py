"""Drawing tokens: temperature, top-k, top-p, min-p, and the logprob of the drawn token.

Shape suffixes: B rows (one per sequence), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.wire import SamplingParams


def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return one token per row and its behaviour logprob.

    Row b inverts the cumulative distribution at ``uniforms[b]`` (0 <= u < 1), so the draw depends only on the row's
    logits and uniform. Greedy rows (temperature 0) take the largest logit; their logprob is the log-softmax of the
    unscaled logits.
    """
    logits_BV = logits_BV.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        # The largest logit is subtracted first, so that a low temperature cannot make two logits infinite.
        smallest = torch.finfo(torch.float32).tiny
        temperature_B = logits_BV.new_tensor([max(p.temperature or 1.0, smallest) for p in params])
        logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature_B[:, None]
    greedy = [p.temperature == 0.0 for p in params]
    if any(_filters(p) for p in params):
        logits_BV = _apply_filters(logits_BV, params)
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if all(greedy):
        tokens_B = logits_BV.argmax(dim=-1)
    else:
        # In float32 the sum would lose the tail of a large vocabulary.
        cumulative_BV = torch.cumsum(logprobs_BV.exp().double(), dim=-1)
        uniform_B = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)
        threshold_B = uniform_B * cumulative_BV[:, -1]
        tokens_B = torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]
        tokens_B = tokens_B.clamp_(max=logits_BV.shape[-1] - 1)
        if any(greedy):
            tokens_B = torch.where(torch.tensor(greedy, device=logits_BV.device), logits_BV.argmax(dim=-1), tokens_B)
    drawn_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    # Both in one transfer, because each one waits for the GPU; float64 holds every token id exactly.
    tokens, logprobs = torch.stack([tokens_B.double(), drawn_B.double()]).tolist()
    return [int(token) for token in tokens], logprobs


def _filters(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _apply_filters(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the logits with -inf outside each row's kept set, which always contains the most likely token."""
    logits_BV = logits_BV.clone()
    for row, p in enumerate(params):
        if not _filters(p):
            continue
        logits_V = logits_BV[row]
        if 0 < p.top_k < logits_V.numel():
            logits_V.masked_fill_(logits_V < logits_V.topk(p.top_k).values[-1], -torch.inf)
        if p.top_p < 1.0:
            sorted_V, order_V = logits_V.sort(descending=True)
            probabilities_V = sorted_V.softmax(dim=-1)
            is_outside_V = probabilities_V.cumsum(dim=-1) - probabilities_V >= p.top_p
            # The first token stays: a top_p too small for float32 is 0, like the mass before it.
            is_outside_V[0] = False
            logits_V.masked_fill_(torch.empty_like(is_outside_V).scatter_(0, order_V, is_outside_V), -torch.inf)
        if p.min_p > 0.0:
            probabilities_V = logits_V.softmax(dim=-1)
            logits_V.masked_fill_(probabilities_V < p.min_p * probabilities_V.max(), -torch.inf)
    return logits_BV
