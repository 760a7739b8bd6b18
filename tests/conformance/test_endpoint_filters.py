"""The bounds that the kit sets for logprobs hold for logits that are off, and are tight for exact ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.conformance.endpoint.filters import logprob_bounds
from inflight.conformance.reference import distribution
from inflight.wire import SamplingParams

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
)


def logits_of(seed: int) -> torch.Tensor:
    return 3 * torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))


@given(sampling=SAMPLING, seed=st.integers(0, 10_000), tolerance=st.sampled_from([1e-3, 0.05, 0.25]))
@settings(max_examples=100)
def test_bounds_hold_for_logits_that_are_off_by_half_the_tolerance(sampling, seed, tolerance):
    logits_TV = logits_of(seed)
    noise_TV = torch.rand(logits_TV.shape, generator=torch.Generator().manual_seed(seed + 1)) - 0.5
    found_TV = distribution(logits_TV + tolerance * noise_TV, sampling)
    least_TV, most_TV = logprob_bounds(logits_TV, sampling, tolerance)
    assert bool((found_TV <= most_TV).all())
    assert bool((found_TV >= least_TV)[~found_TV.isneginf()].all())


@given(sampling=SAMPLING, seed=st.integers(0, 10_000))
@settings(max_examples=50)
def test_bounds_of_exact_logits_are_the_distribution(sampling, seed):
    logits_TV = logits_of(seed)
    least_TV, most_TV = logprob_bounds(logits_TV, sampling, 1e-9)
    torch.testing.assert_close(least_TV, distribution(logits_TV, sampling), atol=1e-6, rtol=0)
    torch.testing.assert_close(most_TV, least_TV, atol=1e-6, rtol=0)
