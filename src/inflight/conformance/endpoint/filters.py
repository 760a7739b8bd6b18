"""Applies temperature, top-k, top-p and min-p to a distribution whose logits are known only up to a tolerance.

An engine in low precision may keep a token at the edge of a filter that the reference drops, which changes the
normalization of all kept tokens. A logprob therefore has bounds rather than a value.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from inflight.wire import SamplingParams


def logprob_bounds(
    logits_TV: torch.Tensor, sampling: SamplingParams, tolerance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float64 tensors [T, V]: the smallest and the largest logprob of each token, -inf where the token is
    dropped.

    ``tolerance`` is the largest error of a logit before it is divided by the temperature.
    """
    error = tolerance / sampling.temperature
    least, most = [], []
    for logits_V in logits_TV.double() / sampling.temperature:
        sure_V, possible_V = _kept(logits_V, sampling, error)
        least_V = logits_V - logits_V[possible_V].logsumexp(dim=-1) - error
        most_V = logits_V - logits_V[sure_V].logsumexp(dim=-1) + error if sure_V.any() else torch.zeros_like(logits_V)
        least.append(least_V.where(possible_V, -torch.inf))
        most.append(most_V.where(possible_V, -torch.inf))
    return torch.stack(least), torch.stack(most)


def _kept(logits_V: torch.Tensor, sampling: SamplingParams, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bool tensors [V]: the tokens that every engine keeps, and those that some engine keeps.

    Logits with an error of up to ``error`` may swap ranks if they differ by less than twice that error.
    """
    sure_V = torch.ones_like(logits_V, dtype=torch.bool)
    possible_V = sure_V.clone()
    ordered_V = logits_V.sort(descending=True).values
    if 0 < sampling.top_k < len(logits_V):
        possible_V &= logits_V + 2 * error >= ordered_V[sampling.top_k - 1]
        sure_V &= logits_V - 2 * error > ordered_V[sampling.top_k]
    if sampling.top_p < 1:
        probabilities_V = logits_V.softmax(dim=-1)
        mass = torch.cat([logits_V.new_zeros(1), ordered_V.softmax(dim=-1).cumsum(dim=-1)])
        num_above_V = torch.searchsorted(-ordered_V, -(logits_V + 2 * error))
        num_not_below_V = torch.searchsorted(-ordered_V, -(logits_V - 2 * error), right=True)
        least_V = mass[num_above_V] / probabilities_V[possible_V].sum()
        most_V = (mass[num_not_below_V] - probabilities_V) / probabilities_V[sure_V].sum()
        # An error of e in the logits changes a probability m by at most 2 e m (1 - m).
        possible_V &= least_V - 2 * error * least_V * (1 - least_V) < sampling.top_p
        sure_V &= most_V + 2 * error * most_V * (1 - most_V) < sampling.top_p
    if sampling.min_p > 0:
        smallest = ordered_V[0] + torch.tensor(sampling.min_p, dtype=torch.float64).log()
        possible_V &= logits_V + 2 * error >= smallest
        sure_V &= logits_V - 2 * error >= smallest
    return sure_V, possible_V
