"""What computing in 16 bits does to the reference's logprobs, and how much weights are perturbed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from inflight.conformance.checks import CheckFailed
from inflight.conformance.endpoint.rounding import moved_by_rounding, roundings, unexplained_difference
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceCheckpoint, chosen, distribution
from inflight.conformance.targets import EndpointTarget
from inflight.wire import Capabilities, Completion, GenerateRequest, SamplingParams, VersionSpan
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


def coarse_subject(path: Path, tolerance: float) -> EndpointSubject:
    """Return the subject of an endpoint that computes in bfloat16."""
    target = EndpointTarget(factory="never.opened:make", model=path, tolerance=tolerance)
    subject = EndpointSubject(target, path, 1.0)
    subject.capabilities = Capabilities.model_construct(dtype="bfloat16")
    return subject


def test_tokens_that_rounding_alone_moves_are_not_judged_and_others_are(tmp_path: Path) -> None:
    subject = coarse_subject(make_model(tmp_path / "model"), tolerance=0.5)
    reference, tokens, errors = subject.reference, IDS[8:], torch.zeros(56)
    request = GenerateRequest(request_id="1", prompt_token_ids=IDS[:8], sampling=SamplingParams(max_tokens=56))
    exact_T = reference.logprobs(reference.weights, IDS[:8], tokens)

    def found(errors_T: torch.Tensor) -> Completion:
        spans = (VersionSpan(version=0, start=0, end=len(tokens)),)
        logprobs = tuple((exact_T + errors_T).tolist())
        return Completion(
            index=0, token_ids=tuple(tokens), logprobs=logprobs, version_spans=spans, finish_reason="length"
        )

    def logits_of(given: ReferenceCheckpoint, dtype: str) -> torch.Tensor:
        """The reference's logits; in 16 bits those of token 3 are far off, with rounded weights those of token 5."""
        logits_TV = reference.logits(reference.weights, IDS[:8], tokens).clone()
        if dtype != "float32":
            logits_TV[3, tokens[3]] += 5.0
        elif given is not reference:
            logits_TV[5, tokens[5]] += 5.0
        return logits_TV

    errors[3] = 7.0
    assert subject.gap_to(logits_of, request, found(errors)) == 0.0
    assert subject.gap_to(logits_of, request, found(errors), is_exact=True) == pytest.approx(7.0, abs=1e-4)
    errors[5] = 7.0
    assert subject.gap_to(logits_of, request, found(errors)) == 0.0
    errors[20] = 0.75
    assert subject.gap_to(logits_of, request, found(errors)) == pytest.approx(0.75, abs=1e-4)
    assert chosen(distribution(logits_of(reference, "float32")), tokens).equal(exact_T)


def test_a_rounded_reference_uses_nothing_that_exact_weights_computed(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    reference, (prompt, ids) = ReferenceCheckpoint(path), (IDS[:40], IDS[40:])
    weights, spans = (
        reference.weights,
        [VersionSpan(version=1, start=0, end=12), VersionSpan(version=2, start=12, end=24)],
    )
    exact_TV = reference.logits(weights, prompt, ids)
    views = list(roundings(reference, "bfloat16"))
    assert views[0] == (reference, "bfloat16")
    for seed, (view, dtype) in enumerate(views[1:], 1):
        alone = ReferenceCheckpoint(path)
        rounded = alone.rounded_again(weights, "bfloat16", seed)
        found_TV = view.logits(weights, prompt, ids, dtype=dtype)
        assert found_TV.equal(alone.logits(rounded, prompt, ids))
        kept_TV = view.kept_logits({1: weights, 2: weights}, spans, prompt, ids, dtype)
        torch.testing.assert_close(kept_TV, found_TV, atol=1e-4, rtol=0)
        assert not torch.allclose(found_TV, exact_TV, atol=1e-4, rtol=0)
        assert reference.logits(weights, prompt, ids).equal(exact_TV)


def test_a_reference_that_rounding_moves_almost_everywhere_is_no_reference() -> None:
    assert moved_by_rounding(torch.tensor([0.0, -0.2, 0.1]), 0.5, "bfloat16").tolist() == [False, True, False]
    with pytest.raises(CheckFailed, match="changes 2 of 3 logprobs of the reference"):
        moved_by_rounding(torch.tensor([0.0, -0.2, 0.3]), 0.5, "bfloat16")
    assert moved_by_rounding(torch.tensor([0.0, -0.2, 0.3]), 0.5, "bfloat16", most=0.75).sum() == 2


def test_a_comparison_that_different_roundings_leave_hardly_any_token_for_is_refused() -> None:
    exact_T, found_T = torch.zeros(8), torch.full((8,), 2.0)
    moved = [torch.zeros(8).index_fill(0, torch.arange(start, start + 4), 1.0) for start in (0, 2, 4)]
    assert unexplained_difference(found_T, exact_T, moved[:2], 0.5, "bfloat16") == 2.0
    with pytest.raises(CheckFailed, match="leave 0 of 8 logprobs of the reference itself unchanged: too few"):
        unexplained_difference(found_T, exact_T, moved[::2], 0.5, "bfloat16")
