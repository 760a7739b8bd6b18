"""Ranks that are processes of their own, joined by gloo, against one rank. Every wait has a deadline."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from inflight_fsdp import create_worker
from tests.models import make_model
from tests.worker.rank_program import ADAM, three_steps, whole_batch
from tests.worker.ranks import run_ranks
from tests.worker.worker_cases import accumulate, assert_close, file_bytes, saved_gradients, settings

NUM_RANKS = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two ranks have run every case of rank_program.py, next to what one rank makes of the same."""
    path = tmp_path_factory.mktemp("ranks")
    # An odd vocabulary: its rows cannot be shared out evenly.
    make_model(path / "model", tied=True, vocab_size=259, dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(path / "model", **ADAM))
    (path / "one rank.json").write_text(json.dumps(three_steps(worker, 0, 1)))
    worker.save(path / "one rank")
    worker.close()
    run_ranks(path)
    return path


def seen_by(directory: Path, rank: int) -> dict:
    return json.loads((directory / f"rank{rank}.json").read_text())


@pytest.fixture(scope="module")
def whole_gradients(directory):
    """The gradients of one float64 rank that gets all segments in one micro-batch."""
    worker = create_worker(settings(directory / "model"))
    accumulate(worker, [whole_batch(1)])
    worker.step()
    worker.save(directory / "gradients" / "whole")
    worker.close()
    return saved_gradients(directory / "gradients" / "whole")


@pytest.mark.parametrize("case", ["even", "all on rank 1", "several"])
def test_two_ranks_give_the_gradient_of_one(directory, whole_gradients, case):
    # float64; sums are taken in another order
    assert_close(saved_gradients(directory / "gradients" / case), whole_gradients, 1e-10)


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("summed in bfloat16", "float32", 0.02),
        ("bfloat16", "float32", 0.1),
        ("all bfloat16", "bfloat16", 0.1),
    ],
)
def test_ranks_sum_gradients_of_narrower_dtypes_too(directory, whole_gradients, case, dtype, tolerance):
    # Rounding of parameters and activations, 24 or 8 bits; an average would be off by half.
    gradients = saved_gradients(directory / "gradients" / case)
    assert {gradient.dtype for gradient in gradients.values()} == {getattr(torch, dtype)}
    assert_close({name: gradient.double() for name, gradient in gradients.items()}, whole_gradients, tolerance)


def test_ranks_sum_gradients_in_the_dtype_that_is_asked_for(directory):
    def is_bfloat16(case):
        gradients = saved_gradients(directory / "gradients" / case).values()
        return all(bool((gradient == gradient.bfloat16()).all()) for gradient in gradients)

    assert is_bfloat16("summed in bfloat16")
    assert not is_bfloat16("float32")
    assert not is_bfloat16("bfloat16")
    same = (saved_gradients(directory / "gradients" / case) for case in ("bfloat16", "summed in float32"))
    assert_close(*same, tolerance=1e-12)  # float32 is what it is unless asked for


def test_ranks_agree_how_many_updates_round_away(directory):
    everyone = [seen_by(directory, rank)["rounded away"] for rank in range(NUM_RANKS)]
    assert everyone[0] == everyone[1]
    assert [everyone[0][case] for case in ("float32", "bfloat16")] == [None, None]
    assert 0.01 < everyone[0]["all bfloat16"] < 0.99  # at a learning rate between too small and large enough


def test_parameters_that_are_frozen_have_no_gradients_on_any_rank(directory, whole_gradients):
    gradients = saved_gradients(directory / "gradients" / "frozen")
    names = {n for n in whole_gradients if n != "model.embed_tokens.weight" and ".k_proj." not in n}
    assert_close(gradients, {name: whole_gradients[name] for name in names}, 1e-10)


def test_three_steps_on_two_ranks_equal_three_on_one(directory):
    expected = json.loads((directory / "one rank.json").read_text())
    for rank in range(NUM_RANKS):
        for (norm, learning_rate), (expected_norm, expected_rate) in zip(
            seen_by(directory, rank)["steps"], expected, strict=True
        ):
            assert norm == pytest.approx(expected_norm, rel=1e-10)
            assert learning_rate == expected_rate
    weights = (load_file(directory / name / "model.safetensors") for name in ("stepped/checkpoint", "one rank"))
    assert_close(*weights, tolerance=1e-9)  # Adam divides by small second moments


def test_gathered_weights_are_those_of_the_checkpoint_and_on_rank_0_only(directory):
    weights = load_file(directory / "stepped" / "checkpoint" / "model.safetensors")
    for rank in range(NUM_RANKS):
        seen = seen_by(directory, rank)["gather"]
        assert seen["bucket_specs"] == seen["specs"] == seen_by(directory, 0)["gather"]["specs"]
        assert {name: tuple(shape) for name, shape in seen["specs"]} == {n: tuple(w.shape) for n, w in weights.items()}
        assert len(seen["values"]) == (len(weights) if rank == 0 else 0)
        for (name, _), values in zip(seen["specs"], seen["values"], strict=rank == 0):
            assert torch.equal(torch.tensor(values, dtype=torch.float64), weights[name])


def test_shards_in_host_memory_give_the_same_bits(directory):
    """On a CPU nothing moves; what is seen is that every path bears the policy of ``fully_shard``."""
    for rank in range(NUM_RANKS):
        seen = seen_by(directory, rank)
        assert seen["offloaded steps"] == seen["steps"]
        assert seen["offloaded gather"] == seen["gather"]
    expected = file_bytes(directory / "stepped" / "checkpoint")
    assert file_bytes(directory / "offloaded" / "checkpoint") == expected
    assert file_bytes(directory / "offloaded" / "loaded") == expected


def test_a_gradient_that_is_not_finite_on_one_rank_raises_on_all_and_changes_nothing(directory):
    for rank in range(NUM_RANKS):
        seen = seen_by(directory, rank)["non-finite"]
        assert seen["error"][0] == "NonFiniteError"
        assert seen["version"] == 3
    assert file_bytes(directory / "non-finite" / "after") == file_bytes(directory / "non-finite" / "before")


def test_a_full_disk_raises_on_all_ranks_and_leaves_the_previous_checkpoint_whole(directory):
    for rank in range(NUM_RANKS):
        seen = seen_by(directory, rank)["full disk"]
        assert seen["error"][0] == "CheckpointError"
        assert "File too large" in seen["error"][1]
        assert seen["untouched"]


def test_a_checkpoint_that_one_rank_cannot_read_is_loaded_by_none(directory):
    errors = [seen_by(directory, rank)["broken"]["error"] for rank in range(NUM_RANKS)]
    assert [error[0] for error in errors] == ["CheckpointError"] * NUM_RANKS
    assert "rank 1: " in errors[0][1]
    assert "it has no trainer.json" in errors[0][1]


def test_a_model_that_one_rank_cannot_find_stops_all(directory):
    for rank in range(NUM_RANKS):
        error = seen_by(directory, rank)["missing model"]
        assert error[0] == "ConfigError"
        assert "nowhere" in error[1]


def test_a_checkpoint_of_two_ranks_loads_on_one_bit_for_bit(directory, tmp_path):
    worker = create_worker(settings(directory / "model", **ADAM))
    worker.load(directory / "stepped" / "checkpoint")
    assert worker.version == 3
    worker.save(tmp_path / "again")
    worker.close()
    assert file_bytes(tmp_path / "again") == file_bytes(directory / "stepped" / "checkpoint")
    assert not dist.is_initialized()


def test_a_checkpoint_of_one_rank_loads_on_two_bit_for_bit(directory):
    assert seen_by(directory, 0)["loaded version"] == 3
    assert file_bytes(directory / "resharded") == file_bytes(directory / "one rank")


def test_copies_of_shards_and_experts_step_as_one_rank_does_and_what_does_not_divide_is_refused(tmp_path):
    """Four ranks in two copies of two: gradients and the norm that is clipped count every rank once."""
    make_model(tmp_path / "model", tied=True, vocab_size=259, dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(tmp_path / "model", **ADAM))
    expected = three_steps(worker, 0, 1)
    worker.save(tmp_path / "one rank")
    worker.close()
    make_model(tmp_path / "experts", "qwen3_moe", dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(tmp_path / "experts", **ADAM))
    three_steps(worker, 0, 1)
    worker.save(tmp_path / "experts on one rank")
    worker.close()
    run_ranks(tmp_path, "hybrid_program", 4)
    for rank in range(4):
        seen = seen_by(tmp_path, rank)
        assert seen["refused"] == ["ConfigError", "shard_size 3 does not divide the 4 ranks"]
        for found, wanted in zip(seen["steps"], expected, strict=True):
            assert found == pytest.approx(list(wanted), rel=1e-10)
        assert seen["resharded version"] == 3
    for name in ("hybrid", "resharded"):
        weights = (load_file(tmp_path / path / "model.safetensors") for path in (name, "one rank"))
        assert_close(*weights, tolerance=1e-9)  # Adam divides by small second moments
    assert file_bytes(tmp_path / "resharded") == file_bytes(tmp_path / "hybrid")
    # Experts, which ranks share out by rows of one parameter and checkpoints hold one by one. Their router computes in
    # float32.
    stepped = load_file(tmp_path / "experts stepped" / "model.safetensors")
    assert_close(stepped, load_file(tmp_path / "experts on one rank" / "model.safetensors"), tolerance=1e-6)
    gathered = load_file(tmp_path / "experts gathered.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in gathered
    assert gathered.keys() == stepped.keys()
    assert all(torch.equal(tensor, stepped[name]) for name, tensor in gathered.items())
