"""A check of segments with images. It uses a model that accepts images, whatever model the kit was started with.

Shape suffixes: T packed tokens, M tokens that images fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from inflight.conformance.checks import check, look_at, skip
from inflight.conformance.worker.batches import accumulate, make_batch, prefix_ids_of
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import ImageWorker, PrefixSharingWorker, TrainerWorker
from inflight.model.images import image_url_of, load_image_processor
from inflight.types import MicroBatch

LEVEL = "packing"
_COLOURS = ((220, 30, 30), (30, 40, 220), (20, 200, 60))
_PROMPT = b"which colour?"
_SEGMENTS: tuple[tuple[tuple[int, ...], bytes], ...] = (
    ((0,), _PROMPT),
    ((), _PROMPT),
    ((1, 2), _PROMPT),
    ((2,), _PROMPT),
)
"""The images of each segment, as indices, and the text after them: one, no and two images, and the first segment's
tokens with a different image."""
_SHARING: tuple[tuple[tuple[int, ...], bytes], ...] = (
    ((), _PROMPT + b" none"),
    ((0,), _PROMPT + b" it is red"),
    ((0,), _PROMPT + b" perhaps blue"),
    ((1,), _PROMPT + b" it is red"),
    ((0, 1), _PROMPT),
)
"""As above: two segments share an image and a prompt, one has equal tokens but a different image, one has no image, and
one has another image after the shared one."""


@check("W-46", deadline_s=40)
@look_at(
    "image_rows_M: which features fill which packed tokens, also if shared prefixes are computed once; whether "
    "gradients reach the vision tower; a rank without images must take part in the collectives of its vision tower"
)
def segments_with_images(subject: WorkerSubject) -> None:
    """Where a worker supports images, segments with images have the logprobs and gradients that transformers computes
    from each of them alone, even if they are packed with segments that have other images or none, or share prefixes
    that contain images."""
    if not subject.reports_images:
        skip("images are not supported: it is not an ImageWorker")
    model = subject.seeing_model()
    worker = subject.create_or_skip(model, "model with images")
    if not (isinstance(worker, ImageWorker) and worker.takes_images):
        skip("images are not supported")
    _, batch = _packed(_SEGMENTS, model)
    _compare(subject, worker, batch, batch, "segments with images")
    if isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes:
        shared, separate = _packed(_SHARING, model)
        _compare(subject, subject.create(model=model), shared, separate, "segments that share prefixes with images")


def _compare(subject: WorkerSubject, worker: TrainerWorker, batch: MicroBatch, separate: MicroBatch, what: str) -> None:
    """Fail unless logprobs and the gradient norm of ``batch`` are those of transformers for ``separate``, the same
    segments without shared prefixes."""
    reference = ReferenceModel(subject.seeing_model())
    with torch.no_grad():
        expected_T = reference.logprobs(separate)
    difference = float((worker.forward(batch).detach().double() - expected_T).abs().max())
    subject.note(allowed=subject.tolerance.logprob, **{f"largest_difference ({what})": difference})
    subject.require_on_all_ranks(
        difference <= subject.tolerance.logprob, f"{what}: logprobs differ by up to {difference:.2e} nats"
    )
    others = replace(make_batch((7,), seed=3, targets=False), group_ids_S=None)
    accumulate(worker, [batch if subject.data_rank == 0 else others])
    subject.compare_norm(worker, reference.gradient_norm([separate]), what)


def _packed(segments: Sequence[tuple[tuple[int, ...], bytes]], model: Path) -> tuple[MicroBatch, MicroBatch]:
    """Return a micro-batch of the segments with the ids of their prefixes, and one without.

    In the first, the image of a shared prefix is included only once, where the prefix first occurs.
    """
    from PIL import Image  # needed for this check only

    images = load_image_processor(model)
    assert images is not None
    urls = [image_url_of(Image.new("RGB", (28, 28), colour)) for colour in _COLOURS]
    token_ids: list[tuple[int, ...]] = []
    contents: list[list[int | str]] = []
    placed: list[tuple[str, range]] = []
    for own, text in segments:
        rendered = [token for _ in own for token in (97, images.placeholder_id)]
        tokens, in_segment = images.placed([*rendered, *text], [urls[i] for i in own])
        start = sum(map(len, token_ids))
        content: list[int | str] = [*tokens]
        for image in in_segment:
            content[image.start : image.end] = [image.url] * image.num_tokens
            placed.append((image.url, range(start + image.start, start + image.end)))
        token_ids.append(tokens)
        contents.append(content)
    batch = make_batch([len(tokens) for tokens in token_ids], seed=46)
    mask_T = batch.loss_mask_T.clone()
    mask_T[[row for _, rows in placed for row in rows]] = False
    batch = replace(
        batch,
        token_ids_T=torch.tensor([token for tokens in token_ids for token in tokens]),
        loss_mask_T=mask_T,
        behaviour_logprobs_T=torch.where(mask_T, batch.behaviour_logprobs_T, 0.0),
    )
    prefix_ids_T = prefix_ids_of(contents)
    first = [(url, rows) for url, rows in placed if prefix_ids_T[rows[-1]] == rows[-1]]

    def showing(shown: Sequence[tuple[str, range]]) -> MicroBatch:
        rows_M = torch.tensor([row for _, rows in shown for row in rows])
        return replace(batch, image_rows_M=rows_M, image_tensors=images.tensors([url for url, _ in shown]))

    return replace(showing(first), prefix_ids_T=prefix_ids_T), showing(placed)
