"""Drawing tokens: temperature, top-k, top-p, min-p, and the logprob of the drawn token.

Shape suffixes: B rows (one per sequence), V vocabulary, C chunks of the vocabulary, W tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.wire import SamplingParams

_CHUNK = 128
"""Number of tokens per chunk of the vocabulary."""


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
    if any(_filters(p) for p in params):
        logits_BV = _apply_filters(logits_BV, params)
    largest_B, likeliest_B = logits_BV.max(dim=-1)
    weights_BV = (logits_BV - largest_B[:, None]).exp_()
    sums_BC = _chunk_sums(weights_BV)
    cumulative_BC = sums_BC.cumsum(dim=-1)
    greedy = [p.temperature == 0.0 for p in params]
    if all(greedy):
        tokens_B = likeliest_B
    else:
        uniform_B = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)
        tokens_B = _invert(weights_BV, cumulative_BC, uniform_B)
        if any(greedy):
            tokens_B = torch.where(torch.tensor(greedy, device=logits_BV.device), likeliest_B, tokens_B)
    drawn_B = (logits_BV.gather(1, tokens_B[:, None])[:, 0] - largest_B).double() - cumulative_BC[:, -1].log()
    # Both in one transfer, because each one waits for the GPU; float64 holds every token id exactly.
    tokens, logprobs = torch.stack([tokens_B.double(), drawn_B]).tolist()
    return [int(token) for token in tokens], logprobs


def _chunk_sums(weights_BV: torch.Tensor) -> torch.Tensor:
    """Return the sums of chunks of the vocabulary [B, C] in float64; the last chunk may be shorter."""
    num_whole = weights_BV.shape[1] // _CHUNK
    whole_BCW = weights_BV[:, : num_whole * _CHUNK].view(len(weights_BV), num_whole, _CHUNK)
    rest_BW = weights_BV[:, num_whole * _CHUNK :]
    return torch.cat([whole_BCW.sum(dim=-1), rest_BW.sum(dim=-1, keepdim=True)], dim=1).double()


def _invert(weights_BV: torch.Tensor, cumulative_BC: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the first token of each row at which the cumulative distribution exceeds the row's uniform.

    Cumulative sums are in float64: in float32, they would lose the tail of a large vocabulary. Only the chunk that
    contains the token is summed token by token.
    """
    threshold_B1 = _below(uniform_B * cumulative_BC[:, -1], cumulative_BC[:, -1])[:, None]
    chunk_B1 = torch.searchsorted(cumulative_BC, threshold_B1, right=True)
    before_B1 = torch.where(chunk_B1 > 0, cumulative_BC.gather(1, (chunk_B1 - 1).clamp_(min=0)), 0.0)
    ids_BW = chunk_B1 * _CHUNK + torch.arange(_CHUNK, device=weights_BV.device)
    size = weights_BV.shape[1]
    inside_BW = (weights_BV.gather(1, ids_BW.clamp(max=size - 1)).double() * (ids_BW < size)).cumsum(dim=-1)
    offset_B1 = torch.searchsorted(inside_BW, _below(threshold_B1 - before_B1, inside_BW[:, -1:]), right=True)
    return (chunk_B1 * _CHUNK + offset_B1)[:, 0].clamp_(max=size - 1)  # a row of NaN finds no token


def _below(values: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Clamp values to just below their limits, so that rounding cannot select a token of probability 0."""
    return torch.minimum(values, torch.nextafter(limits, torch.zeros_like(limits)))


def _filters(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _apply_filters(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the logits with -inf for tokens that a row's filters remove. The most likely token always remains."""
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
