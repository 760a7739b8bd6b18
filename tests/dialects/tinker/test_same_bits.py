"""What a model learns through the server is, bit for bit, what a worker learns that is called directly."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inflight.base.worker_kinds import load_worker_kind
from inflight.commands.tinker import add_arguments, config_of
from inflight.contracts import AdjustableWorker
from inflight.dialects.tinker.checkpoints import CheckpointStore
from inflight.dialects.tinker.data import Datum
from inflight.dialects.tinker.losses import LOSSES
from inflight.dialects.tinker.packing import loss_of, micro_batch_of, segment_of
from inflight.rollouts.packing import Packing
from inflight.run.ranks.workers import worker_settings
from inflight.types import AdamSettings
from tests.dialects.tinker.server import Client, TinkerServer
from tests.models import make_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]
SETTINGS = AdamSettings(learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, max_gradient_norm=0.5)
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 0.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    directory = tmp_path_factory.mktemp("bits")
    server = TinkerServer(make_model(directory / "model", "llama", max_model_len=1024), directory / "served")
    yield server
    server.end()


def sequences() -> list[tuple[list[int], dict[str, Any]]]:
    """Six sequences; the first four begin alike, so that the worker computes their beginning once."""
    random = np.random.default_rng(0)
    found = []
    for i in range(6):
        start = list(range(40, 64)) if i < 4 else []
        token_ids = start + random.integers(0, 256, 9 + 7 * i).tolist()
        weights = random.random(len(token_ids) - 1).astype(np.float32)
        found.append((token_ids[:-1], {"target_tokens": token_ids[1:], "weights": weights}))
    return found


def learned_directly(model: Path, splits: Sequence[int], directory: Path) -> dict[str, torch.Tensor]:
    """The weights after a step of the worker."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = config_of(parser.parse_args([str(model)]))
    torch.set_num_threads(1)
    worker = load_worker_kind("fsdp").create(worker_settings(config))
    assert isinstance(worker, AdjustableWorker)
    try:
        loss, rest = LOSSES["cross_entropy"], iter(sequences())
        for num in splits:
            given = itertools.islice(rest, num)
            data = [
                Datum(
                    tuple(token_ids),
                    {name: np.array(it, np.int64 if "tokens" in name else np.float32) for name, it in inputs.items()},
                )
                for token_ids, inputs in given
            ]
            packing = Packing(config.train.max_tokens_per_micro_batch, 1, share_prefixes=True)
            for part in packing.pack_texts([segment_of(it) for it in data])[0]:
                packed = micro_batch_of([data[i] for i in part], loss, share_prefixes=True)
                worker.backward(loss_of(packed, worker.forward(packed.batch), loss, {}))
        worker.step(SETTINGS)
        worker.save(directory)
        return load_file(directory / "model.safetensors")
    finally:
        worker.close()


@pytest.mark.parametrize("splits", [(6,), (1,) * 6, (2, 4), (5, 1), (3, 1, 2)], ids=str)
def test_a_step_has_the_bits_of_the_worker_however_the_data_are_split(
    server: TinkerServer, tmp_path: Path, splits: tuple[int]
) -> None:
    client = Client(server)
    made, rest = client.create_model(rank=0), iter(sequences())
    for num in splits:
        made.forward_backward(list(itertools.islice(rest, num)))
    made.step(**ADAM)
    path = made.save("bits")
    client.post(f"/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    saved = CheckpointStore(server.directory / "checkpoints").find(path).path
    found = load_file(saved / "model.safetensors")
    expected = learned_directly(server.model, splits, tmp_path / "saved")
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
