"""Level ``tokens``: prompts with images, on an endpoint that serves a model that accepts images."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SERVED_S, within
from inflight.conformance.models import make_seeing_model
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InvalidRequestError, UnsupportedError
from inflight.model.images import ImageProcessor, image_url_of
from inflight.wire import Completion, GenerateRequest, InFlightPolicy, PromptImage

LEVEL = "tokens"
_COLOURS = ((220, 30, 30), (30, 40, 220), (20, 200, 60))
_DOT = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""An image of one pixel, made without any package."""
_NUM_TOKENS = 12
_NUM_RECOMPUTED, _NUM_TRIES = 100, 2
"""Number of tokens in the first recomputed completions, and how many times each tower is published."""
_MOST_SLOTS, _NUM_BEYOND = 16, 4
"""Maximum number of completions that run, and how many more wait for a slot."""
_ARRIVAL_S = 0.3
"""How long requests with images may take to be queued."""
_TOWER = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class _Seeing:
    """An endpoint whose model accepts images, and the same model in transformers as its reference."""

    subject: EndpointSubject
    endpoint: InferenceEndpoint
    reference: ReferenceCheckpoint
    images: ImageProcessor

    def request(self, *urls: str, name: str, num_tokens: int = _NUM_TOKENS, n: int = 1) -> GenerateRequest:
        """Return a request in which a letter precedes each image, and a question follows the images."""
        rendered = [token for _ in urls for token in (97, self.images.placeholder_id)]
        token_ids, images = self.images.placed((*rendered, *b"what?"), urls)
        plain = self.subject.request(token_ids, max_tokens=num_tokens, n=n, seed=None)
        return plain.model_copy(update={"request_id": f"{plain.request_id}-{name}", "images": images})

    async def answers(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return the completions of requests that are sent at the same time."""
        responses = await asyncio.gather(*(self.endpoint.generate(request) for request in requests))
        return [response.completions[0] for response in responses]

    def judged(self, completion: Completion) -> tuple[int, ...]:
        """Return the tokens before the first sampled placeholder, which transformers would treat as an image."""
        ids, placeholder = completion.token_ids, self.images.placeholder_id
        return ids[: ids.index(placeholder)] if placeholder in ids else ids

    def gap(self, weights: ReferenceWeights, request: GenerateRequest, completion: Completion, start: int = 0) -> float:
        """Return the largest difference between the reference's logprobs and those of the `judged` tokens from
        ``start`` on."""
        tokens = self.judged(completion)
        if not tokens[start:]:
            return 0.0
        urls = [image.url for image in request.images]
        expected = self.reference.logprobs(weights, request.prompt_token_ids, tokens, request.sampling, urls)
        return self.subject.difference(completion.logprobs[start : len(tokens)], expected[start:])


_NONE: dict[Path, str] = {}
"""Why no endpoint serves the kit's image model, by the directory of the kit's run."""
_REFERENCES: dict[Path, ReferenceCheckpoint] = {}
"""The kit's image model, by the directory of the kit's run."""


async def _open_seeing(subject: EndpointSubject) -> _Seeing:
    """Return an endpoint of the same kind that serves the kit's image model; skip the check if there is none.

    If the endpoint under check does not support images, an error here only means that there is no such endpoint. The
    attempt is then not repeated, because a server may take a minute to fail.
    """
    if reason := _NONE.get(subject.directory):
        skip(reason)
    reference = _REFERENCES.get(subject.directory)
    try:
        if reference is None:
            reference = ReferenceCheckpoint(make_seeing_model(subject.directory / "seeing"))
            _REFERENCES[subject.directory] = reference
        endpoint = (await subject.shared(reference.path)).endpoint
        can = await endpoint.capabilities()
    except Exception as error:  # packages may be missing, and a factory may raise anything for this model
        if subject.capabilities.images and not isinstance(error, ConfigError | UnsupportedError):
            raise
        reason = "this kind of endpoint serves no model that accepts images"
        if reference is None:
            reason = "the kit cannot create a model that accepts images"
        if reference is None or subject.capabilities.images:  # otherwise the error only repeats that images are missing
            reason += f": {shorten(str(error), 120)}"
        if not subject.capabilities.images:
            _NONE[subject.directory] = reason
        skip(reason)
    if not can.images:
        _NONE[subject.directory] = "images are not supported, even for a model that accepts them"
        skip(_NONE[subject.directory])
    assert reference.images is not None
    reference.cast(can.dtype)
    return _Seeing(subject, endpoint, reference, reference.images)


def _picture(colour: tuple[int, int, int]) -> str:
    """Return an image with a dark corner, in the model's input size: engines may scale other sizes differently."""
    from PIL import Image

    picture = Image.new("RGB", (28, 28), colour)
    picture.paste((10, 20, 30), (0, 0, 14, 9))
    return image_url_of(picture)


def _alike(colour: tuple[int, int, int]) -> str:
    """Return an image; the first half of its data does not depend on ``colour``."""
    from PIL import Image

    picture = Image.new("RGB", (28, 28))
    picture.putdata([(7 * i % 256, 13 * i % 256, 29 * i % 256) for i in range(28 * 28)])
    picture.paste(colour, (0, 14, 28, 28))
    data = io.BytesIO()
    picture.save(data, "PNG", compress_level=0)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


@check("E-75", "fresh", deadline_s=180)
@look_at(
    "which features fill which placeholders, and what is cached by token ids alone: prefixes, prefills and encoded "
    "images must be distinguished by the images too"
)
async def images_are_seen(subject: EndpointSubject) -> None:
    """Where images are supported, logprobs are those of the reference for the same tokens and the same images, in
    order, whatever images other requests with the same tokens contain, even alongside prompts without images."""
    seeing = await _open_seeing(subject)
    red, blue, green = map(_picture, _COLOURS)
    alike = [_alike(colour) for colour in _COLOURS[:2]]
    shown = [(red,), (blue,), (), (red, green), (green, red), (), (red,), *((it,) for it in alike), ()]
    requests = [seeing.request(*urls, name=str(number)) for number, urls in enumerate(shown)]
    worst = 0.0
    for _ in range(2):  # the second time, everything that an endpoint caches is cached
        requests = [it.model_copy(update={"request_id": f"{it.request_id}+"}) for it in requests]
        answered = await seeing.answers(requests)
        gaps = [seeing.gap(seeing.reference.weights, *pair) for pair in zip(requests, answered, strict=True)]
        worst = max(worst, *gaps)
    if subject.missing("updates") is None:
        publisher = SteppedPublisher(seeing.endpoint, await seeing.endpoint.capabilities())
        update = await publisher.request(seeing.reference.weights)
        requests = [it.model_copy(update={"request_id": f"{it.request_id}+"}) for it in requests]
        with_images = [it for it in requests if it.images]
        others = [it for it in requests if not it.images]
        waiting = []
        for group in (with_images, others):
            waiting.append(subject.begin(seeing.answers(group)))
            await asyncio.sleep(_ARRIVAL_S)
        await publisher.abort(update)
        publisher.lose_group()
        answered = [completion for task in waiting for completion in await task]
        pairs = zip((*with_images, *others), answered, strict=True)
        worst = max(worst, *(seeing.gap(seeing.reference.weights, *pair) for pair in pairs))
    subject.note(**{"largest logprob difference after images": worst})
    require(worst <= subject.tiny_tolerance, f"after images, logprobs differ by up to {worst:.3g} from the reference's")


@check("E-72")
@look_at("whether the field images of a request is checked even if the model cannot use it")
async def unsupported_images(subject: EndpointSubject) -> None:
    """Where images are not supported, a request with an image is refused with UnsupportedError."""
    if subject.capabilities.images:
        skip("images are supported")
    request = subject.request()
    image = PromptImage(url=_DOT, start=0, num_tokens=len(request.prompt_token_ids))
    with_image = request.model_copy(update={"images": (image,)})
    await subject.require_raises(subject.endpoint.generate(with_image), UnsupportedError, "a request with an image")
    await subject.generate()


@check("E-73", "fresh", deadline_s=180)
@look_at("whether the position and number of placeholders are compared with the model's before features are written")
async def misplaced_images(subject: EndpointSubject) -> None:
    """An image that cannot be decoded, or whose placeholders differ in position or number from what the request
    specifies, is refused with InvalidRequestError, and other requests continue.
    """
    seeing = await _open_seeing(subject)
    request = seeing.request(_picture(_COLOURS[0]), name="misplaced_images")
    (image,) = request.images
    broken = "data:image/png;base64,bm8gcGljdHVyZQ=="
    for what, change in (
        ("an image that cannot be decoded", {"url": broken}),
        ("an image one token too early", {"start": image.start - 1}),
        ("an image with one token too few", {"num_tokens": image.num_tokens - 1}),
    ):
        wrong = request.model_copy(update={"images": (image.model_copy(update=change),)})
        await subject.require_raises(seeing.endpoint.generate(wrong), InvalidRequestError, what)
    answered = await seeing.answers([request])
    gap = seeing.gap(seeing.reference.weights, request, answered[0])
    require(gap <= subject.tiny_tolerance, f"after refusals, logprobs after an image differ by {gap:.3g}")


@check("E-74", "fresh updates", deadline_s=180)
@look_at("names of the vision tower's tensors, and image features that are cached from before the update")
async def updated_tower(subject: EndpointSubject) -> None:
    """After an update of the vision tower, logprobs after an image that was seen before are those of the new tower,
    even in a recomputed completion or one that waited for a slot while others of its request ran."""
    seeing = await _open_seeing(subject)
    request = seeing.request(_picture(_COLOURS[0]), name="tower")
    await seeing.answers([request])
    weights = seeing.reference.weights
    # This changes logprobs by 2 nats or more; the tolerance in bfloat16 is 0.25.
    tensors = {
        name: -tensor if name.startswith(_TOWER) and tensor.dim() > 1 else tensor
        for name, tensor in weights.tensors.items()
    }
    other = ReferenceWeights("A with another vision tower", tensors)
    publisher = SteppedPublisher(seeing.endpoint, await seeing.endpoint.capabilities())
    await publisher.publish(other)
    again = request.model_copy(update={"request_id": f"{request.request_id}-again"})
    (completion,) = await seeing.answers([again])
    if InFlightPolicy.RECOMPUTE in (await seeing.endpoint.capabilities()).in_flight_policies:
        await _require_recomputed(seeing, publisher, [weights, other])
    publisher.lose_group()
    await subject.close_shared()
    gap, old = seeing.gap(other, again, completion), seeing.gap(weights, again, completion)
    subject.note(**{"largest logprob difference": gap, "difference from the old tower": old})
    require(gap <= subject.tiny_tolerance, f"after an update of the vision tower, logprobs differ by up to {gap:.3g}")
    require(old > subject.tiny_tolerance, "logprobs after the image do not depend on the vision tower")


async def _require_recomputed(seeing: _Seeing, publisher: SteppedPublisher, towers: Sequence[ReferenceWeights]) -> None:
    """Publish each tower under recompute while completions of a request with an image run or wait; require that later
    logprobs are those of the new tower."""
    subject, can = seeing.subject, await seeing.endpoint.capabilities()
    num = min(can.max_concurrent_sequences, _MOST_SLOTS) + _NUM_BEYOND
    first = seeing.request(_picture(_COLOURS[1]), name="recomputed")
    longest, worst, num_judged = can.max_model_len - len(first.prompt_token_ids), 0.0, 0
    for number, weights in enumerate(list(towers) * _NUM_TRIES):
        length = min(longest, _NUM_RECOMPUTED << number)
        request = seeing.request(_picture(_COLOURS[1]), name=f"recomputed-{number}", num_tokens=length, n=num)
        answer = subject.begin(seeing.endpoint.generate(request))
        while not answer.done() and (await seeing.endpoint.weight_version()).num_running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await publisher.publish(weights, in_flight=InFlightPolicy.RECOMPUTE)
        response = await within(SERVED_S, answer, "a recomputed request with an image")
        kinds = set()
        for completion in response.completions:
            last, num_tokens = completion.version_spans[-1], len(seeing.judged(completion))
            if last.version == publisher.version and num_tokens > last.start:
                worst = max(worst, seeing.gap(weights, request, completion, last.start))
                num_judged += num_tokens - last.start
                kinds.add(len(completion.version_spans) > 1)
        if len(kinds) > (num > can.max_concurrent_sequences) or (kinds and length == longest):
            break
    subject.note(**{"largest difference after an update of the tower": worst, "tokens after such updates": num_judged})
    words = "once the vision tower was updated under recompute, logprobs of running and waiting completions differ"
    require(worst <= subject.tiny_tolerance, f"{words} by up to {worst:.3g}")
    require(num_judged, "no completion of a request with an image was in flight during an update under recompute")
