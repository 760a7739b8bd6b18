"""Faults in how images reach the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.parameters import PreparedParameters
from inflight.wire import GenerateRequest
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


def caching_by_tokens(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    made, encode = {}, endpoint._image_tensors

    async def tensors(request: GenerateRequest) -> dict[str, Any] | None:
        known = request.prompt_token_ids
        if known not in made:
            made[known] = await encode(request)
        found: dict[str, Any] | None = made[known]
        return found

    faulty._image_tensors = tensors
    return endpoint


def in_another_order(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    if (images := endpoint._images) is not None:
        faulty: Any = images
        encode = images.tensors

        def tensors(urls: Iterable[str]) -> dict[str, Any]:
            return encode(reversed(list(urls)))

        faulty.tensors = tensors
    return endpoint


def ignoring_unsupported(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    generate = endpoint.generate
    faulty: Any = endpoint
    if endpoint._images is None:
        faulty.generate = lambda request: generate(request.model_copy(update={"images": ()}))
    return endpoint


def without_looking(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    if endpoint._images is not None:
        faulty: Any = endpoint._images
        faulty.check = lambda token_ids, images: None
    return endpoint


@replaces("_engine.load")
def leaving_the_tower(endpoint: EmbeddedEndpoint, load: Any, ready: PreparedParameters, *others: Any) -> None:
    kept = [it for it in ready.tensors if not it[0].startswith("vision_tower.")]
    load(endpoint._engine.weights.prepare(kept), *others)


MUTANTS = (
    Mutant(
        "images cached by tokens",
        "E-75",
        "A prompt gets the images of an earlier prompt with the same tokens.",
        caching_by_tokens,
    ),
    Mutant("images in another order", "E-75", "The last image fills the first placeholders.", in_another_order),
    Mutant(
        "unsupported images ignored",
        "E-72",
        "A model without a vision tower treats a prompt with images as text.",
        ignoring_unsupported,
    ),
    Mutant(
        "images written unchecked",
        "E-73",
        "Image features are written to the positions that the request specifies, whatever tokens are there.",
        without_looking,
    ),
    Mutant("vision tower left out", "E-74", "Updates do not load the vision tower.", leaving_the_tower),
)
