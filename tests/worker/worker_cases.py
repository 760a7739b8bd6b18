"""Packed batches, a plain loss and settings for the tests of the worker; seeded, so that every rank makes the same."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from inflight.contracts import TrainerWorker
from inflight.types import MicroBatch

VOCAB = 256
"""Tokens that batches are made of; the models have two more."""


def make_batch(lengths: tuple[int, ...], seed: int, *, targets: bool = True) -> MicroBatch:
    """Return packed segments with a mask that has holes, advantages of both signs, and mixed temperatures."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    positions_T = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.arange(0)
    mask_T = (torch.rand(num_tokens, generator=random) < 0.7) & (positions_T > 0) & torch.tensor(targets)
    return MicroBatch(
        token_ids_T=torch.randint(VOCAB, (num_tokens,), generator=random),
        position_ids_T=positions_T,
        segment_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        segment_lengths=lengths,
        loss_mask_T=mask_T,
        behaviour_logprobs_T=torch.where(mask_T, -2.0 * torch.rand(num_tokens, generator=random), 0.0),
        advantages_T=torch.randn(num_tokens, generator=random),
        temperature_T=0.5 + torch.rand(num_tokens, generator=random),
        versions_T=torch.where(mask_T, 0, -1),
    )


def make_tree(seed: int) -> MicroBatch:
    """Return segments of a tree: a group with one prompt, a branch of one of them, a repeated segment, and others."""
    ids = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
    prompt, other = ids[:11], ids[40:44]
    first = [*prompt, *ids[11:18]]
    segments = [
        *(first, [*prompt, *ids[20:23]], other, [*first, *ids[24:33]], [*prompt, *ids[33:34]], first),
        *([*other, *ids[50:52]], [*first[:14], *ids[53:60]], prompt[:1]),
    ]
    batch = make_batch(tuple(map(len, segments)), seed)
    prefixes = [tuple(segment[: i + 1]) for segment in segments for i in range(len(segment))]
    return replace(
        batch,
        token_ids_T=torch.tensor([prefix[-1] for prefix in prefixes]),
        prefix_ids_T=torch.tensor([prefixes.index(prefix) for prefix in prefixes]),
    )


def part_of(batch: MicroBatch, segments: range) -> MicroBatch:
    """Return some neighbouring segments of a batch as a batch of their own."""
    edges = [0, *itertools.accumulate(batch.segment_lengths)]
    rows = slice(edges[segments.start], edges[segments.stop])
    return MicroBatch(
        token_ids_T=batch.token_ids_T[rows],
        position_ids_T=batch.position_ids_T[rows],
        segment_ids_T=batch.segment_ids_T[rows] - segments.start,
        segment_lengths=batch.segment_lengths[segments.start : segments.stop],
        loss_mask_T=batch.loss_mask_T[rows],
        behaviour_logprobs_T=batch.behaviour_logprobs_T[rows],
        advantages_T=batch.advantages_T[rows],
        temperature_T=batch.temperature_T[rows],
        versions_T=batch.versions_T[rows],
    )


def policy_loss(logprobs_T: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return a plain sum over targets that is not linear in the logprobs."""
    ratio_T = torch.exp(logprobs_T - batch.behaviour_logprobs_T)
    return -torch.where(batch.loss_mask_T, ratio_T * batch.advantages_T, 0.0).sum() / 16


def shared_and_separate(worker: TrainerWorker, batch: MicroBatch) -> tuple[float, float, float]:
    """Return how much logprobs differ between shared and separate prefixes, the norm of the difference of the
    gradients, and that of the separate gradient. Takes two steps."""
    separate = replace(batch, prefix_ids_T=None)
    shared_T, separate_T = worker.forward(batch), worker.forward(separate)
    difference = float((shared_T - separate_T).detach().abs().max())
    worker.backward(-policy_loss(separate_T, separate))
    worker.backward(policy_loss(shared_T, batch))
    norm = worker.step().gradient_norm
    accumulate(worker, [separate])
    return difference, norm, worker.step().gradient_norm


def accumulate(worker: TrainerWorker, batches: list[MicroBatch]) -> None:
    """Forward and backward over the micro-batches."""
    for batch in batches:
        worker.backward(policy_loss(worker.forward(batch), batch))


def settings(model_path: Path, **others: object) -> dict[str, object]:
    """Return the settings of a float64 worker on the CPU whose first moments, once saved, are the gradients."""
    return {
        "model_path": str(model_path),
        "dtype": "float64",
        "wire_dtype": "float64",
        "device": "cpu",
        "learning_rate": 1e-2,
        "betas": (0.0, 0.0),
        "max_gradient_norm": None,
        "logprob_chunk_size": 5,
        **others,
    }


def saved_gradients(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step of a worker of `settings`: with beta 0 the first moment is the gradient."""
    states = load_file(checkpoint / "trainer" / "optimizer.safetensors")
    return {name.removesuffix(".exp_avg"): state for name, state in states.items() if name.endswith(".exp_avg")}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Assert that both have the same names and that no element differs by more, relative to the largest of all."""
    assert found.keys() == expected.keys()
    expected = {name: value.detach() for name, value in expected.items()}
    scale = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max()) / scale
        assert difference < tolerance, f"{name} differs by {difference:.1e} of {scale:.1e}"


def file_bytes(directory: Path) -> dict[str, bytes]:
    """Return the content of every file under a directory."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def forget_checksums(checkpoint: Path) -> None:
    """Make a checkpoint one without checksums, so that what is wrong with it is found by what it is."""
    file = checkpoint / "trainer.json"
    file.write_text(json.dumps({key: it for key, it in json.loads(file.read_text()).items() if key != "checksums"}))
