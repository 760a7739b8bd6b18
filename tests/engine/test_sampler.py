"""The sampler against plain float64 loops: filters, renormalised logprobs, and the frequencies that are drawn."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engines.embedded.sampler import sample
from inflight.wire import SamplingParams


def softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of each token: temperature, top-k, top-p, min-p, each on what the one before left."""
    scaled = [x / params.temperature for x in logits]
    kept = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        nucleus, mass = [], 0.0
        for token, probability in zip(kept, softmax([scaled[i] for i in kept]), strict=True):
            if mass >= params.top_p:
                break
            nucleus.append(token)
            mass += probability
        kept = nucleus
    if params.min_p:
        probabilities = softmax([scaled[i] for i in kept])
        kept = [i for i, p in zip(kept, probabilities, strict=True) if p >= params.min_p * max(probabilities)]
    distribution = [0.0] * len(logits)
    for token, probability in zip(kept, softmax([scaled[i] for i in kept]), strict=True):
        distribution[token] = probability
    return distribution


def edge_is_sharp(logits: Sequence[float], params: SamplingParams) -> bool:
    """Whether float32 must keep the same set: no token within 1e-4 of where a filter cuts."""
    scaled = [x / params.temperature for x in logits]
    order = sorted(scaled, reverse=True)
    if params.top_k and params.top_k < len(order):
        if order[params.top_k - 1] - order[params.top_k] < 1e-4:
            return False
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass, count = 0.0, 0
        for probability in softmax(order):
            if abs(mass - params.top_p) < 1e-4:
                return False
            if mass < params.top_p:
                count += 1
            mass += probability
        if count < len(order) and order[count - 1] - order[count] < 1e-4:
            return False
        order = order[:count]
    return not params.min_p or all(abs(p - params.min_p * softmax(order)[0]) > 1e-5 for p in softmax(order))


logit_rows = st.lists(st.floats(-12, 12, width=32), min_size=1, max_size=40)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.5, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05, 1e-30, 1e-46, 5e-324]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 0.9]),
)


@settings(max_examples=300)
@given(
    rows=st.lists(st.tuples(sampling_params, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=4),
    logits=logit_rows,
    data=st.data(),
)
def test_a_drawn_token_has_its_renormalised_probability_and_inverts_the_distribution(
    rows: list[tuple[SamplingParams, float]], logits: list[float], data: st.DataObject
) -> None:
    batch = [data.draw(st.permutations(logits)) for _ in rows]
    tokens, logprobs = sample(torch.tensor(batch), [p for p, _ in rows], [u for _, u in rows])
    for row, (params, uniform), token, logprob in zip(batch, rows, tokens, logprobs, strict=True):
        if not edge_is_sharp(row, params):
            continue
        distribution = reference_distribution(row, params)
        assert distribution[token] > 0, "a masked token was drawn"
        # float32 log-softmax of logits of up to 60 (12 / 0.2): relative error of 2**-24 at 60, summed over the row.
        assert logprob == pytest.approx(math.log(distribution[token]), abs=3e-5)
        # float32 probabilities: the cumulative distribution is off by some 1e-6.
        before = math.fsum(distribution[:token])
        assert before - 1e-5 <= uniform <= before + distribution[token] + 1e-5


@settings(max_examples=100)
@given(logits=logit_rows, params=sampling_params)
def test_greedy_rows_take_the_largest_logit_whatever_their_filters(logits: list[float], params: SamplingParams) -> None:
    greedy = params.model_copy(update={"temperature": 0.0})
    tokens, logprobs = sample(torch.tensor([logits, logits]), [greedy, params], [0.9, 0.9])
    assert logits[tokens[0]] == max(logits)
    # float32 log-softmax of logits of up to 12.
    assert logprobs[0] == pytest.approx(math.log(softmax(logits)[tokens[0]]), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.4, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=lambda params: str(params.model_dump(exclude_defaults=True)),
)
def test_drawn_frequencies_match_the_distribution_and_masked_tokens_are_never_drawn(params: SamplingParams) -> None:
    rng = random.Random(7)
    logits = [rng.gauss(0, 1.5) for _ in range(12)]
    expected = reference_distribution(logits, params)
    num_draws = 16_000
    counts: Counter[int] = Counter()
    for _ in range(16):
        batch = torch.tensor([logits] * (num_draws // 16))
        tokens, _ = sample(batch, [params] * len(batch), [rng.random() for _ in range(len(batch))])
        counts.update(tokens)
    for token, probability in enumerate(expected):
        if probability == 0:
            assert counts[token] == 0
        # Five standard deviations of a binomial count; the seed is fixed.
        deviation = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) <= 5 * deviation + 1e-9


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53], ids=["smallest", "largest"])
@pytest.mark.parametrize("best", [0, 5, 9])
def test_the_ends_of_the_uniform_draw_no_masked_token(uniform: float, best: int) -> None:
    logits = [-1.0 - 0.01 * i for i in range(10)]
    logits[best] = 3.0
    tokens, logprobs = sample(torch.tensor([logits]), [SamplingParams(top_k=1)], [uniform])
    assert (tokens, logprobs) == ([best], [0.0])


def test_a_draw_depends_on_its_own_row_only() -> None:
    rng = random.Random(3)
    rows = [[rng.gauss(0, 2) for _ in range(50)] for _ in range(6)]
    params = [SamplingParams(temperature=t, top_p=p) for t, p in ((1, 1), (0.5, 1), (0, 1), (2, 0.7), (1, 0.3), (1, 1))]
    uniforms = [rng.random() for _ in rows]
    together = sample(torch.tensor(rows), params, uniforms)
    alone = [sample(torch.tensor([row]), [p], [u]) for row, p, u in zip(rows, params, uniforms, strict=True)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    # float32: rows of a batch may be summed in another order.
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
def test_tiny_temperatures_draw_the_largest_logit_with_certainty(temperature: float) -> None:
    tokens, logprobs = sample(torch.tensor([[1.0, 9.0, -3.0]]), [SamplingParams(temperature=temperature)], [0.7])
    assert (tokens, logprobs) == ([1], [0.0])


@settings(max_examples=200)
@given(
    size=st.sampled_from([1, 127, 128, 129, 256, 700]),
    seed=st.integers(0, 10_000),
    share_masked=st.sampled_from([0.0, 0.5, 0.99]),
    uniforms=st.lists(
        st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, math.nextafter(1.0, 0.0)])),
        min_size=1,
        max_size=5,
    ),
)
def test_a_large_vocabulary_is_inverted_across_chunks_and_masked_tokens_are_never_drawn(
    size: int, seed: int, share_masked: float, uniforms: list[float]
) -> None:
    rng = random.Random(seed)
    logits = [-math.inf if rng.random() < share_masked else rng.uniform(-8, 8) for _ in range(size)]
    logits[rng.randrange(size)] = 1.0
    rows = torch.tensor([logits] * len(uniforms))
    tokens, logprobs = sample(rows, [SamplingParams()] * len(uniforms), uniforms)
    distribution = reference_distribution(rows[0].tolist(), SamplingParams())
    for token, logprob, uniform in zip(tokens, logprobs, uniforms, strict=True):
        assert distribution[token] > 0, "a masked token was drawn"
        assert logprob == pytest.approx(math.log(distribution[token]), abs=1e-5)
        before = math.fsum(distribution[:token])
        assert before - 1e-6 <= uniform <= before + distribution[token] + 1e-6
