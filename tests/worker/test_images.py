"""Training on images: packed segments against a plain loop in float64, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inflight.contracts import ImageWorker
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.losses import collate
from inflight.run.ranks.messages import micro_batches_of, tensors_of
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import create_worker
from tests.models import make_model
from tests.pictures import make_image_model
from tests.worker.image_cases import loss_of, packed, plain_gradients, samples
from tests.worker.test_fsdp_ranks import run_ranks
from tests.worker.worker_cases import assert_close, make_batch, saved_gradients, settings

TOLERANCE = 1e-7
"""float64; the processor's pixels and the advantages are float32 on both sides, and sums are in another order."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    make_image_model(path / "model")
    return path


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    return plain_gradients(directory / "model")


def test_packed_segments_with_images_have_the_logprobs_and_gradients_of_a_plain_loop(
    directory: Path, plain: tuple[list[list[float]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    worker = create_worker(settings(directory / "model"))
    assert isinstance(worker, ImageWorker) and worker.takes_images
    logprobs, gradients = plain
    made = samples(directory / "model")
    for order in ([0, 1, 2], [4, 3]):
        batch = packed(directory / "model", [made[i] for i in order])
        logprobs_T = worker.forward(batch)
        expected = torch.tensor([value for i in order for value in logprobs[i]], dtype=torch.float64)
        assert float((logprobs_T.detach()[batch.loss_mask_T] - expected).abs().max()) < TOLERANCE
        worker.backward(loss_of(logprobs_T, batch))
    worker.step()
    worker.save(tmp_path / "after")
    found = saved_gradients(tmp_path / "after")
    assert_close(found, gradients, TOLERANCE)
    assert float(found["vision_tower.vision_model.embeddings.patch_embedding.weight"].abs().max()) > 1e-3
    worker.close()


@pytest.mark.exhaustive
def test_two_ranks_of_which_one_has_no_image_give_the_gradient_of_the_plain_loop(
    directory: Path, plain: tuple[list[list[float]], dict[str, torch.Tensor]]
) -> None:
    run_ranks(directory, "image_program")
    assert_close(saved_gradients(directory / "two ranks"), plain[1], TOLERANCE)


def test_the_vision_tower_is_published_under_the_names_of_the_checkpoint(directory: Path) -> None:
    worker = create_worker(settings(directory / "model", dtype="float32", wire_dtype="float32"))
    stored = load_file(directory / "model" / "model.safetensors")
    specs = worker.parameter_specs()
    assert {spec.name: spec.shape for spec in specs} == {name: tuple(t.shape) for name, t in stored.items()}
    for bucket in worker.gather_weights(plan_buckets(specs, 1 << 14)):
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
            assert torch.equal(tensor, stored[spec.name])
    worker.close()


def test_micro_batches_with_images_travel_to_the_ranks(directory: Path) -> None:
    batches = [packed(directory / "model", samples(directory / "model")), make_batch((4, 3), 1)]
    tensors = tensors_of(batches)
    found = micro_batches_of([batch.segment_lengths for batch in batches], tensors)
    assert found[1].image_rows_M is None and not found[1].image_tensors
    rows, own = found[0].image_rows_M, batches[0].image_rows_M
    assert rows is not None and own is not None and torch.equal(rows, own)
    assert torch.equal(found[0].image_tensors["pixel_values"], batches[0].image_tensors["pixel_values"])


def test_images_are_refused_without_a_processor_and_by_a_model_without_a_tower(directory: Path, tmp_path: Path) -> None:
    made = samples(directory / "model")
    with pytest.raises(InvalidRequestError, match="give collate the image_tensors"):
        collate(made)
    worker: Any = create_worker(settings(make_model(tmp_path / "text", vocab_size=259)))
    assert not worker.takes_images
    with pytest.raises(UnsupportedError, match="does not accept any"):
        worker.forward(packed(directory / "model", made))
    worker.close()
