"""What one rank of several writes of a checkpoint: its own rows, in their place, and nothing that others hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from inflight_fsdp import create_worker
from tests.models import make_model
from tests.worker.worker_cases import settings


@pytest.fixture
def first_of_three() -> Iterator[None]:
    """This process is rank 0 of three; what the others would do does not happen."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


def test_rank_0_writes_its_rows_and_gathers_nothing(tmp_path: Path, first_of_three: None) -> None:
    model = make_model(tmp_path / "model", vocab_size=259, dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(model))
    worker.save(tmp_path / "saved")
    whole, written = load_file(model / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert written.keys() == whole.keys()
    for name, tensor in whole.items():
        num_rows = -(-len(tensor) // 3)
        assert torch.equal(written[name][:num_rows], tensor[:num_rows]), name
        assert not written[name][num_rows:].any(), f"{name} has rows that only the other ranks hold"
