"""Ranks that share tensors, rows, layers, experts and data against one rank, and how rows and boxes are cut."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ConfigError
from inflight_fsdp.config import RankLayout, WorkerConfig
from inflight_fsdp.layout import Sharding
from inflight_fsdp.rows import rows_of
from inflight_fsdp.sharding import runs_of
from tests.worker.layouts import LAYOUTS, differences, run_layouts
from tests.worker.worker_cases import make_batch

TOLERANCES = {"logprobs": 2e-5, "gradients": 2e-5, "gradient norms": 1e-5, "weights": 2e-3, "moments": 1e-3}
"""float32, absolute in nats and else relative to the largest. Adam divides by small second moments."""


def assert_like_one_rank(directory: Path, name: str) -> None:
    found = differences(directory, name)
    for rank in range(LAYOUTS[name].ranks):
        seen = json.loads((directory / name / f"rank{rank}.json").read_text())
        assert seen["shared"] < TOLERANCES["logprobs"]
        assert seen["shared gradient"] < TOLERANCES["gradient norms"] * seen["separate gradient"]
    assert found.pop("weights resumed").relative < TOLERANCES["weights"]
    for what, difference in found.items():
        value = difference.absolute if what == "logprobs" else difference.relative
        assert value < TOLERANCES[what], f"{name}: {what} differ by {difference}"


def test_two_ranks_that_share_rows_compute_what_one_does_and_resume_its_checkpoint(tmp_path):
    run_layouts(tmp_path, ["CP 2, worker fsdp"], 200.0)
    assert_like_one_rank(tmp_path, "CP 2, worker fsdp")


@pytest.fixture(scope="module", params=[2, 4, 8])
def several(request, tmp_path_factory):
    """Where all layouts of so many ranks have run, and their names."""
    directory = tmp_path_factory.mktemp("layouts")
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == request.param]
    run_layouts(directory, names, 900.0)
    return directory, names


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)
def test_every_layout_computes_what_one_rank_does_and_resumes_its_checkpoint(several):
    directory, names = several
    for name in names:
        assert_like_one_rank(directory, name)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_rows_hold_whole_segments_and_every_target_once(num_rows):
    batch = make_batch((9, 4, 17, 1, 6, 40), 3)
    rows = rows_of(batch, num_rows, None, 8, torch.device("cpu"))
    assert len(rows) == num_rows
    assert torch.cat([row.places_N for row in rows]).tolist() == batch.loss_mask_T.nonzero().squeeze(1).tolist()
    found = torch.cat([row.token_ids_R[: row.plan.num_tokens] for row in rows if row.places_N.numel()])
    assert found.tolist() == batch.token_ids_T.tolist()
    for row in rows:
        assert torch.equal(batch.token_ids_T[row.places_N], row.targets.token_ids_N)
        assert torch.equal(batch.token_ids_T[row.places_N - 1], row.token_ids_R[row.targets.rows_N])


def test_a_batch_without_segments_gives_rows_of_one_token():
    rows = rows_of(make_batch((), 1), 3, None, 8, torch.device("cpu"))
    assert [(row.plan.num_tokens, row.places_N.numel()) for row in rows] == [(1, 0)] * 3


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_the_order_of_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = tuple(
        slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )
    whole = torch.arange(math.prod(shape)).reshape(shape)
    part, found = whole[box], []
    for first, leading in runs_of(box, shape):
        run = part[leading].reshape(-1).tolist()
        assert run == list(range(first, first + len(run)))
        found += run
    assert found == part.reshape(-1).tolist()


def test_the_lowest_rank_with_a_box_owns_it():
    upper, lower = (slice(0, 2),), (slice(2, 3),)
    sharding = Sharding((3,), (None, lower, upper, lower, upper))
    assert sharding.owners == {1: lower, 2: upper}


def test_neighbours_share_tensors_then_rows_then_data():
    layout = RankLayout(16, tensor=2, context=2, stages=2)
    assert layout.data_size == 2
    assert [layout.data_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_ranks_that_cannot_be_divided_are_refused():
    config = WorkerConfig(model_path=Path("model"), context_parallel=4)
    with pytest.raises(ConfigError, match="context_parallel 4 does not divide the 6 ranks"):
        config.rank_layout(6)
    assert dataclasses.asdict(config.rank_layout(8)) == {"num_ranks": 8, "tensor": 1, "context": 4, "stages": 1}
