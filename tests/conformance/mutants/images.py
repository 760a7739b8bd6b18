"""Faults in how images reach the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.forwards import PackedPrompt
from inflight.engines.embedded.parameters import PreparedParameters
from inflight.model.vision import image_features
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


def in_the_last_rows(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Treat prompts with images as the last ones of a packed row."""
    forwards: Any = endpoint._engine.steps._forwards
    right = forwards._inputs

    def inputs(packed: Sequence[int], prompts: Sequence[PackedPrompt]) -> Any:
        with_images = [it for it in prompts if it.image_tensors is not None]
        return right(packed, with_images)

    forwards._inputs = inputs
    return endpoint


def features_kept_by_requests(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Compute the features of a request's images once, even if its completions are computed again or begin later."""
    forwards: Any = endpoint._engine.steps._forwards
    features: dict[int, tuple[Any, torch.Tensor]] = {}

    def inputs(packed: Sequence[int], prompts: Sequence[PackedPrompt]) -> dict[str, torch.Tensor]:
        token_ids_T, rows, found = torch.tensor(packed), [], []
        start = len(packed) - sum(len(it.token_ids) for it in prompts)
        embeddings_TH = forwards._model.get_input_embeddings()(token_ids_T)
        for prompt in prompts:
            if (tensors := prompt.image_tensors) is not None:
                computed = features.get(id(tensors)) or (
                    tensors,
                    image_features(forwards._model, tensors, embeddings_TH),
                )
                features[id(tensors)] = computed
                rows += [start + row for row in prompt.image_rows]
                found.append(computed[1])
            start += len(prompt.token_ids)
        if found:
            embeddings_TH = embeddings_TH.index_copy(0, torch.tensor(rows), torch.cat(found))
        return {"inputs_embeds": embeddings_TH[None]}

    forwards._inputs = inputs
    return endpoint


MUTANTS = (
    Mutant(
        "images cached by tokens",
        "E-75",
        "A prompt gets the images of an earlier prompt with the same tokens.",
        caching_by_tokens,
    ),
    Mutant(
        "images in the last rows",
        "E-75",
        "Prompts with images are taken for the last ones among those that are computed together.",
        in_the_last_rows,
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
    Mutant(
        "image features kept by requests",
        "E-74",
        "The vision tower runs once per request, even if an update comes before its completions are computed again.",
        features_kept_by_requests,
    ),
    Mutant("vision tower left out", "E-74", "Updates do not load the vision tower.", leaving_the_tower),
)
