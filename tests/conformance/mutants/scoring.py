"""Faults in scores of given tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import ScoreRequest, ScoreResponse, VersionSpan
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces, with_capabilities


def scoring(change: Callable[[ScoreRequest, torch.Tensor], torch.Tensor]) -> Callable[[Any], EmbeddedEndpoint]:
    """Change the hidden states [N, H] from which tokens are scored."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        queue: Any = endpoint._engine.scoring
        response = queue._response
        queue._response = lambda request, hidden, version: response(request, change(request, hidden), version)
        return endpoint

    return infect


def answering_scores(change: Callable[[ScoreRequest, ScoreResponse], dict[str, Any]]) -> Callable[[Any], Any]:
    """Change the response."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        score = endpoint.score

        async def faulty(request: ScoreRequest) -> ScoreResponse:
            response = await score(request)
            return response.model_copy(update=change(request, response))

        endpoint.score = faulty
        return endpoint

    return infect


def remembering(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Return the first answer for equal tokens again."""
    score, known = endpoint.score, {}

    async def faulty(request: ScoreRequest) -> ScoreResponse:
        key = request.model_dump_json(exclude={"request_id"})
        version = (await endpoint.weight_version()).version
        found = known[key] = known.get(key) or await score(request)
        span = VersionSpan(version=version, start=0, end=request.num_scored)
        return found.model_copy(update={"request_id": request.request_id, "version_spans": (span,)})

    endpoint.score = faulty
    return endpoint


def remembering_versions(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Return the first answer again for equal requests under a version with the same number."""
    score, known = endpoint.score, {}

    async def faulty(request: ScoreRequest) -> ScoreResponse:
        key = (await endpoint.weight_version()).version, request.model_dump_json(exclude={"request_id"})
        found = known[key] = known.get(key) or await score(request)
        return found.model_copy(update={"request_id": request.request_id})

    endpoint.score = faulty
    return endpoint


@replaces("score")
async def labelled_on_arrival(endpoint: EmbeddedEndpoint, score: Any, request: ScoreRequest) -> ScoreResponse:
    version = (await endpoint.weight_version()).version
    span = VersionSpan(version=version, start=0, end=request.num_scored)
    return (await score(request)).model_copy(update={"version_spans": (span,)})


def truncating_scores(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    endpoint._engine.limits.__class__.check_scored = lambda limits, request: None
    score, longest = endpoint.score, endpoint._engine.limits.max_model_len

    async def faulty(request: ScoreRequest) -> ScoreResponse:
        return await score(request.model_copy(update={"token_ids": request.token_ids[:longest]}))

    endpoint.score = faulty
    return endpoint


def remembering_tokens(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Answer later requests for the same tokens under the same version like the first, whatever the candidates are."""
    score, known = endpoint.score, {}

    async def faulty(request: ScoreRequest) -> ScoreResponse:
        version = (await endpoint.weight_version()).version
        key = version, request.token_ids, request.start, request.top_k, request.num_candidates
        found = known[key] = known.get(key) or await score(request)
        return found.model_copy(update={"request_id": request.request_id})

    endpoint.score = faulty
    return endpoint


def _first_twenty(response: ScoreResponse) -> dict[str, Any]:
    return {name: tuple(row[:20] for row in getattr(response, name)) for name in ("top_token_ids", "top_logprobs")}


MUTANTS = (
    Mutant(
        "scores bounded",
        "U-74",
        "No score is below -100.",
        answering_scores(lambda _, response: {"logprobs": tuple(max(it, -100.0) for it in response.logprobs)}),
    ),
    Mutant(
        "scores one token late",
        "E-82",
        "A token is scored from a hidden state that already includes the token.",
        scoring(lambda _, hidden: hidden.roll(-1, 0)),
    ),
    Mutant("scores with a temperature", "E-82", "Logits are divided by 0.7.", scoring(lambda _, hidden: hidden / 0.7)),
    Mutant(
        "likeliest tokens out of order",
        "E-82",
        "The likeliest tokens are listed in ascending order of probability.",
        answering_scores(
            lambda _, response: {
                "top_token_ids": tuple(row[::-1] for row in response.top_token_ids),
                "top_logprobs": tuple(row[::-1] for row in response.top_logprobs),
            }
        ),
    ),
    Mutant(
        "candidates of the first token",
        "E-82",
        "The candidates of every position get the scores of the first position.",
        answering_scores(
            lambda request, response: {
                "candidate_logprobs": response.candidate_logprobs[:1] * len(response.candidate_logprobs)
            }
        ),
    ),
    Mutant(
        "scores kept across updates",
        "E-83",
        "Scores are cached by tokens and returned again after an update.",
        remembering,
    ),
    Mutant(
        "scores kept by number",
        "E-83",
        "Scores are kept under the number of the version that computed them.",
        remembering_versions,
    ),
    Mutant("scores labelled on arrival", "E-84", "The version is read before the forward pass.", labelled_on_arrival),
    Mutant("scores of a part", "E-85", "Tokens beyond the context are dropped.", truncating_scores),
    Mutant(
        "scores that are not reported",
        "E-86",
        "Scoring is supported, but not reported as a capability.",
        with_capabilities(scoring=False),
    ),
    Mutant(
        "scores kept whatever the candidates",
        "E-82",
        "Tokens that are scored again with other candidates get the answer for the first candidates.",
        remembering_tokens,
    ),
    Mutant(
        "twenty likeliest tokens",
        "E-82",
        "At most twenty of the likeliest tokens are returned.",
        answering_scores(lambda _, response: _first_twenty(response)),
    ),
)
