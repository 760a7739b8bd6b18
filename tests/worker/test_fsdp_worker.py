"""One rank of the FSDP worker against plain transformers and plain torch, in float64."""

import dataclasses
import importlib.metadata
import itertools
import math
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoModelForCausalLM, BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from inflight.contracts import TrainerWorker
from inflight.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    PrecisionWarning,
    TrainerError,
    UnsupportedError,
)
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import FSDP, FsdpWorker, WorkerConfig, create_worker
from inflight_fsdp.optimizer import as_sharded, learning_rate_at
from tests.models import FAMILIES, TRAINED_FAMILIES, make_model
from tests.worker.with_torchao import seen_with_torchao
from tests.worker.worker_cases import (
    VOCAB,
    accumulate,
    assert_close,
    file_bytes,
    forget_checksums,
    make_batch,
    part_of,
    policy_loss,
    saved_gradients,
    settings,
)

LENGTHS = (9, 4, 17, 1, 6, 40)


def write_model(path, family="qwen3", *, tied=True):
    return make_model(path, family, tied=tied, dtype=torch.float64, tokenizer=False)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def make_worker(model_path):
    made: list[FsdpWorker] = []

    def make(path: Path = model_path, **others: object) -> FsdpWorker:
        made.append(create_worker(settings(path, **others)))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.close()
    assert not dist.is_initialized()


def weights_of(worker):
    specs = worker.parameter_specs()
    tensors = [t for bucket in worker.gather_weights(plan_buckets(specs, 4096)) for t in bucket.tensors]
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}


def gradients_of(worker, batches, directory):
    """Return the gradients of the batches at the weights of the checkpoint; the worker is left one step further."""
    accumulate(worker, batches)
    worker.step()
    worker.save(directory)
    return saved_gradients(directory)


def plain_logprobs(model, batch):
    """One segment at a time through the whole of transformers' model: log softmax of logits over temperature."""
    logprobs = []
    start = 0
    for length in batch.segment_lengths:
        tokens = batch.token_ids_T[start : start + length]
        logits = model(tokens[None], use_cache=False).logits[0]
        logprobs.append(torch.zeros(1, dtype=logits.dtype))
        for t in range(1, length):
            temperature = batch.temperature_T[start + t].double()
            logprobs.append(torch.log_softmax(logits[t - 1] / temperature, 0)[tokens[t]][None])
        start += length
    return torch.where(batch.loss_mask_T, torch.cat(logprobs), 0.0)


def plain_model(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )


# ---------------------------------------------------------------------------------------------------------------
# Logprobs and gradients


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_logprobs_and_gradients_equal_plain_transformers(tmp_path, make_worker, family, tied):
    path = write_model(tmp_path / "model", family, tied=tied)
    worker, model, batch = make_worker(path), plain_model(path), make_batch(LENGTHS, seed=1)
    logprobs = worker.forward(batch)
    expected = plain_logprobs(model, batch)
    assert logprobs.dtype == torch.float64
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-10)  # float64, but norms inside are float32
    assert (logprobs[~batch.loss_mask_T] == 0).all()
    policy_loss(expected, batch).backward()
    gradients = gradients_of(worker, [batch], tmp_path / "checkpoint")
    assert ("lm_head.weight" in gradients) is not tied
    expected_gradients = {name: p.grad for name, p in model.named_parameters()}
    # Gemma's norms and the router of a mixture of experts compute in float32.
    tolerance = 1e-10 if family in FAMILIES else 1e-7
    assert_close(gradients, revert_weight_conversion(model, expected_gradients), tolerance)
    assert weights_of(worker).keys() == load_file(path / "model.safetensors").keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_narrower_models_are_float32(make_worker, model_path, dtype):
    worker, batch = make_worker(dtype=dtype), make_batch(LENGTHS, seed=1)
    logprobs = worker.forward(batch)
    expected = plain_logprobs(plain_model(model_path), batch)
    assert logprobs.dtype == torch.float32
    # Rounding of two layers; bfloat16 has 8 bits, and logits here reach 10.
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol={"float32": 2e-4, "bfloat16": 1.0}[dtype])


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 3, 4, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_any_split_into_micro_batches_gives_the_same_gradient(tmp_path, make_worker, cuts):
    whole = make_batch(LENGTHS, seed=2)
    expected = gradients_of(make_worker(), [whole], tmp_path / "whole")
    parts = [part_of(whole, range(a, b)) for a, b in itertools.pairwise(cuts)]
    assert_close(gradients_of(make_worker(), parts, tmp_path / "parts"), expected, 1e-10)


def test_a_segment_does_not_see_its_neighbours(make_worker):
    worker, batch = make_worker(), make_batch((12, 9, 30), seed=3)
    other_tokens_T = batch.token_ids_T.clone()
    other_tokens_T[12:21] = (other_tokens_T[12:21] + 1) % VOCAB
    with torch.no_grad():
        before = worker.forward(batch)
        after = worker.forward(dataclasses.replace(batch, token_ids_T=other_tokens_T))
    assert torch.equal(before[:12], after[:12])
    assert torch.equal(before[21:], after[21:])
    assert not torch.equal(before[12:21], after[12:21])


def test_tokens_of_a_neighbour_get_no_gradient(tmp_path, make_worker):
    worker = make_worker(write_model(tmp_path / "model", tied=False))
    tokens_T = torch.cat([torch.arange(0, 12), torch.arange(20, 29), torch.arange(30, 60)])
    batch = dataclasses.replace(make_batch((12, 9, 30), seed=3), token_ids_T=tokens_T)
    worker.backward(worker.forward(batch)[12:21].sum())
    worker.step()
    worker.save(tmp_path / "checkpoint")
    gradient = saved_gradients(tmp_path / "checkpoint")["model.embed_tokens.weight"]
    touched = gradient.abs().sum(1) > 0
    assert touched[20:28].any()
    assert not touched[:20].any()
    assert not touched[29:].any()


@pytest.mark.parametrize(
    "batch",
    [make_batch((5, 3), seed=4, targets=False), make_batch((1,), seed=4), make_batch((), seed=4)],
    ids=["no targets", "one token", "no tokens"],
)
def test_a_batch_without_targets_gives_zeros_and_a_gradient_of_zero(tmp_path, make_worker, batch):
    worker = make_worker()
    logprobs = worker.forward(batch)
    assert logprobs.shape == (batch.num_tokens,)
    assert (logprobs == 0).all()
    assert logprobs.requires_grad
    gradients = gradients_of(worker, [batch], tmp_path / "checkpoint")
    assert gradients.keys() == {spec.name for spec in worker.parameter_specs()}
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_a_forward_without_a_backward_leaves_nothing_behind(tmp_path, make_worker):
    batch, other = make_batch(LENGTHS, seed=5), make_batch((8, 8), seed=6)
    steady, disturbed = make_worker(), make_worker()
    for _ in range(2):
        accumulate(steady, [batch])
        with torch.no_grad():
            disturbed.forward(other)
        disturbed.forward(other)
        accumulate(disturbed, [batch])
        with torch.no_grad():
            disturbed.forward(other)
        assert steady.step() == disturbed.step()
    with torch.no_grad():
        assert torch.equal(steady.forward(batch), disturbed.forward(batch))


# ---------------------------------------------------------------------------------------------------------------
# Steps


def test_three_steps_equal_plain_adamw(tmp_path, make_worker, model_path):
    options = {"betas": (0.8, 0.95), "weight_decay": 0.1, "max_gradient_norm": 0.5, "eps": 1e-6}
    worker = make_worker(**options, warmup_steps=2, schedule="linear", total_steps=4)
    model = plain_model(model_path)
    reference = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), weight_decay=0.1, eps=1e-6, foreach=False)
    for step, learning_rate in enumerate([0.005, 0.01, 0.01]):
        batches = [make_batch(LENGTHS, seed=10 + step), make_batch((5, 20), seed=20 + step)]
        accumulate(worker, batches)
        result = worker.step()
        for batch in batches:
            policy_loss(plain_logprobs(model, batch), batch).backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 0.5 / norm))
        reference.param_groups[0]["lr"] = learning_rate
        reference.step()
        reference.zero_grad()
        assert result.version == worker.version == step + 1
        assert result.learning_rate == pytest.approx(learning_rate, rel=1e-12)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-9)
    assert_close(weights_of(worker), dict(model.named_parameters()), 1e-9)  # Adam divides by small second moments


def test_moments_of_8_bits_step_nearly_as_those_of_32_and_are_resumed(tmp_path, make_worker):
    """In a process of its own, which finds torchao: the others need not load it."""
    make_model(tmp_path / "model", hidden_size=64, tokenizer=False)
    seen = seen_with_torchao("eight_bit_program", tmp_path)
    assert "torch.uint8" in seen["dtypes"]
    assert 0 < seen["apart"] < 0.2 * seen["moved"]  # rounded to 8 bits
    for found, expected in seen["norms"]:
        assert found == pytest.approx(expected, rel=0.05)
    assert seen["resumed apart"] < 0.01 * seen["moved"], (
        seen
    )  # a block whose largest moment is negative is rounded again
    with pytest.raises(ConfigError, match=r"adamw8bit.*float32"):
        make_worker(tmp_path / "model", optimizer="adamw8bit")
    with pytest.raises(ConfigError, match=r"needs torchao.*pip install torchao"):
        make_worker(tmp_path / "model", optimizer="adamw8bit", dtype="float32")


def test_float8_layers_give_nearly_the_logprobs_and_gradients_of_float32_whatever_is_packed_together(
    tmp_path, make_worker
):
    """Emulated on a CPU, in a process of its own, which finds torchao."""
    seen = seen_with_torchao("float8_program", tmp_path)
    assert seen["same names"]
    assert seen["same weights"]  # publishing does not round them
    assert 1e-3 * seen["spread"] < seen["apart"] < 0.2 * seen["spread"]  # 3 bits after the leading one, over two layers
    assert 1e-3 < seen["gradient apart"] < 0.3
    assert seen["packing"] < 1e-4  # float32; a scale for a whole micro-batch would show
    assert seen["gradient of parts"] < 1e-4
    assert re.search(r"multiples of 16, but self_attn.q_proj is \(24, 24\)", seen["refused"])
    with pytest.raises(ConfigError, match=r"float8 needs torchao.*pip install torchao"):
        make_worker(tmp_path / "model", float8=True, dtype="float32")
    with pytest.raises(ConfigError, match="float8 needs dtype"):
        make_worker(tmp_path / "model", float8=True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0, 0]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule, expected):
    config = WorkerConfig(
        model_path=Path("unused"), learning_rate=2.0, warmup_steps=2, schedule=schedule, total_steps=6
    )
    assert [learning_rate_at(version, config) for version in range(8)] == pytest.approx([2 * f for f in expected])


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_everything_unchanged(tmp_path, make_worker, factor):
    worker, batch = make_worker(), make_batch(LENGTHS, seed=7)
    accumulate(worker, [batch])
    worker.step()
    worker.save(tmp_path / "before")
    accumulate(worker, [batch])
    worker.backward(policy_loss(worker.forward(batch), batch) * factor)
    with pytest.raises(NonFiniteError, match=r"from version 1 is (nan|inf)"):
        worker.step()
    assert worker.version == 1
    worker.save(tmp_path / "after")
    assert file_bytes(tmp_path / "after") == file_bytes(tmp_path / "before")
    accumulate(worker, [batch])
    after = worker.step()
    worker.load(tmp_path / "before")
    accumulate(worker, [batch])
    assert worker.step() == after


def test_a_step_without_a_gradient_is_refused(make_worker):
    with pytest.raises(TrainerError, match="call backward first"):
        make_worker().step()


# ---------------------------------------------------------------------------------------------------------------
# Publishing


def test_gathered_weights_follow_the_specs_and_equal_the_model(make_worker, model_path):
    worker, model = make_worker(), plain_model(model_path)
    specs = worker.parameter_specs()
    buckets = plan_buckets(specs, 8192)
    gathered = list(worker.gather_weights(buckets))
    assert len(buckets) > 2
    assert [bucket.index for bucket in gathered] == [bucket.index for bucket in buckets]
    assert [spec for bucket in gathered for spec in bucket.specs] == list(specs)
    assert [spec.name for spec in specs] == [name for name, _ in model.named_parameters()]
    for spec, tensor in weights_of(worker).items():
        assert torch.equal(tensor, model.get_parameter(spec))
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_experts_that_lie_in_several_files_are_read(tmp_path, make_worker):
    whole = write_model(tmp_path / "whole", "qwen3_moe", tied=False)
    plain_model(whole).save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    expected = weights_of(make_worker(whole))
    found = weights_of(make_worker(tmp_path / "parts"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_gathered_weights_do_not_change_with_the_next_step(make_worker):
    worker = make_worker()
    before = weights_of(worker)
    copies = {name: tensor.clone() for name, tensor in before.items()}
    accumulate(worker, [make_batch(LENGTHS, seed=8)])
    worker.step()
    assert all(torch.equal(before[name], copies[name]) for name in copies)
    assert not all(torch.equal(tensor, copies[name]) for name, tensor in weights_of(worker).items())


def test_wire_dtype_is_the_one_that_is_computed_in_unless_it_is_set(make_worker, model_path):
    model = plain_model(model_path).to(torch.bfloat16)
    default, chosen = make_worker(dtype="bfloat16", wire_dtype=None), make_worker(wire_dtype="float16")
    assert {spec.dtype for spec in default.parameter_specs()} == {"bfloat16"}
    for name, tensor in weights_of(default).items():
        assert torch.equal(tensor, model.get_parameter(name))
    for name, tensor in weights_of(chosen).items():
        assert torch.equal(tensor, plain_model(model_path).get_parameter(name).to(torch.float16))


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.fixture
def stepped(make_worker):
    """A worker two steps from its start, with a state in every part."""
    worker = make_worker(betas=(0.9, 0.99), schedule="cosine", total_steps=10)
    for seed in (30, 31):
        accumulate(worker, [make_batch(LENGTHS, seed=seed)])
        worker.step()
    return worker


def test_a_loaded_worker_goes_on_as_the_saved_one(tmp_path, make_worker, stepped):
    stepped.save(tmp_path / "checkpoint")
    other = make_worker(betas=(0.9, 0.99), schedule="cosine", total_steps=10)
    other.load(tmp_path / "checkpoint")
    assert other.version == 2
    other.save(tmp_path / "again")
    assert file_bytes(tmp_path / "again") == file_bytes(tmp_path / "checkpoint")
    for worker in (stepped, other):
        accumulate(worker, [make_batch(LENGTHS, seed=32)])
    assert stepped.step() == other.step()
    assert all(torch.equal(tensor, weights_of(other)[name]) for name, tensor in weights_of(stepped).items())


def test_nothing_of_the_weights_before_a_load_is_used_after_it(tmp_path, make_worker, stepped):
    stepped.save(tmp_path / "checkpoint")
    worker, batch = make_worker(), make_batch(LENGTHS, seed=35)
    accumulate(worker, [batch])
    with torch.no_grad():
        worker.forward(batch)
        worker.load(tmp_path / "checkpoint")
        assert torch.equal(worker.forward(batch), stepped.forward(batch))
    with pytest.raises(TrainerError, match="without a gradient"):
        worker.step()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_is_a_hugging_face_model_without_pickles(tmp_path, make_worker, tied):
    path = write_model(tmp_path / "model", tied=tied)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    worker = make_worker(path)
    accumulate(worker, [make_batch(LENGTHS, seed=9)])
    worker.step()
    worker.save(tmp_path / "deep" / "checkpoint")
    assert file_bytes(tmp_path / "deep" / "checkpoint").keys() == {
        *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"),
        *("model.safetensors", "trainer.json", "trainer/optimizer.safetensors"),
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "checkpoint")
    assert model.dtype == torch.float64
    assert model.config.tie_word_embeddings is tied
    weights = weights_of(worker)
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in weights.items())


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(tmp_path, stepped):
    stepped.save(tmp_path / "checkpoint")
    first = file_bytes(tmp_path / "checkpoint")
    accumulate(stepped, [make_batch(LENGTHS, seed=33)])
    stepped.step()
    stepped.save(tmp_path / "checkpoint")
    assert file_bytes(tmp_path / "checkpoint").keys() == first.keys()
    assert file_bytes(tmp_path / "checkpoint") != first
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, stepped):
    disk = tmp_path / "disk"
    disk.mkdir()
    stepped.save(tmp_path / "probe")
    size_kib = sum(map(len, file_bytes(tmp_path / "probe").values())) * 3 // 2 // 1024  # one fits, two do not
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)], capture_output=True, timeout=10
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk takes more rights; test_fsdp_ranks.py limits the file size instead")
    try:
        stepped.save(disk / "checkpoint")
        before = file_bytes(disk)
        accumulate(stepped, [make_batch(LENGTHS, seed=34)])
        stepped.step()
        with pytest.raises(CheckpointError, match=r"No space left on device.*an earlier checkpoint there is intact"):
            stepped.save(disk / "checkpoint")
        assert file_bytes(disk) == before
        stepped.load(disk / "checkpoint")
        assert stepped.version == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_rename_that_fails_leaves_the_previous_checkpoint_whole(tmp_path, stepped, monkeypatch):
    stepped.save(tmp_path / "checkpoint")
    before = file_bytes(tmp_path)
    accumulate(stepped, [make_batch(LENGTHS, seed=36)])
    stepped.step()
    rename = Path.rename

    def failing_rename(source, target):
        if source.name == ".checkpoint.new":
            raise OSError("the disk went away")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(CheckpointError, match="the disk went away"):
        stepped.save(tmp_path / "checkpoint")
    assert file_bytes(tmp_path) == before


def test_a_death_between_the_two_renames_loses_nothing(tmp_path, stepped):
    stepped.save(tmp_path / "checkpoint")
    content = file_bytes(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old")
    (tmp_path / ".checkpoint.new").mkdir()
    (tmp_path / ".checkpoint.new" / "model.safetensors").write_bytes(b"half of a file")
    stepped.load(tmp_path / "checkpoint")
    stepped.save(tmp_path / "checkpoint")
    assert file_bytes(tmp_path / "checkpoint") == content
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path, stepped):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint that a worker saved"):
        stepped.save(tmp_path / "thesis")
    assert file_bytes(tmp_path) == {"thesis/thesis.tex": b"years of work"}


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


BREAKAGES = {
    "no trainer.json": (lambda path: (path / "trainer.json").unlink(), "no trainer.json"),
    "another edition": (lambda path: (path / "trainer.json").write_text('{"edition": 99}'), "edition 1"),
    "no json": (lambda path: (path / "trainer.json").write_text("{"), "JSONDecodeError"),
    "no optimizer": (lambda path: (path / "trainer" / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "truncated": (
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
        "SafetensorError",
    ),
    "missing tensor": (
        lambda path: rewrite(path / "model.safetensors", lambda t: t.pop("model.norm.weight")),
        r"missing tensors: 'model.norm.weight'",
    ),
    "extra tensor": (
        lambda path: rewrite(path / "trainer" / "optimizer.safetensors", lambda t: t.update(extra=torch.zeros(1))),
        r"unknown tensors: 'extra'",
    ),
    "other shape": (
        lambda path: rewrite(
            path / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(31, dtype=torch.float64)})
        ),
        r"model.norm.weight is F64 \(31,\), not torch.float64 \(32,\)",
    ),
    "other dtype": (
        lambda path: rewrite(path / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(32)})),
        "model.norm.weight is F32",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_is_named_and_nothing_is_loaded(tmp_path, stepped, breakage):
    break_it, words = BREAKAGES[breakage]
    stepped.save(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "broken")
    rewrite(tmp_path / "broken" / "model.safetensors", lambda t: [tensor.zero_() for tensor in t.values()])
    forget_checksums(tmp_path / "broken")
    break_it(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=words):
        stepped.load(tmp_path / "broken")
    stepped.save(tmp_path / "after")
    assert file_bytes(tmp_path / "after") == file_bytes(tmp_path / "before")


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(tmp_path, stepped):
    with pytest.raises(CheckpointError, match="nowhere"):
        stepped.load(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------------
# Making and ending a worker


def test_the_worker_is_a_trainer_worker_found_by_its_entry_point(make_worker):
    (entry,) = importlib.metadata.entry_points(group="inflight.workers", name="fsdp")
    assert entry.load() is FSDP
    worker = make_worker()
    assert isinstance(worker, TrainerWorker)
    assert (worker.rank, worker.world_size, worker.version) == (0, 1, 0)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"learning_rat": 1.0}, "unknown key 'learning_rat'; did you mean learning_rate"),
        ({"dtype": "int8"}, "dtype"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"schedule": "cosine"}, "needs total_steps above warmup_steps"),
        ({"model_path": "/no/such/model"}, "/no/such/model.*does not exist"),
    ],
)
def test_settings_that_cannot_be_used_are_named(model_path, others, words):
    with pytest.raises(ConfigError, match=words):
        create_worker(settings(model_path) | others)
    assert not dist.is_initialized()


def test_directories_that_hold_no_causal_model_are_refused(tmp_path, model_path):
    (tmp_path / "empty").mkdir()
    BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)).save_pretrained(
        tmp_path / "bert"
    )
    shutil.copytree(model_path, tmp_path / "other names")
    rewrite(tmp_path / "other names" / "model.safetensors", lambda t: t.update(name=t.pop("model.norm.weight")))
    for name, words in {"empty": "no config.json", "bert": "causal", "other names": "model.norm.weight|name"}.items():
        with pytest.raises(ConfigError, match=words):
            create_worker(settings(tmp_path / name))
        assert not dist.is_initialized()


def test_models_that_cannot_be_packed_are_refused(tmp_path):
    Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8,
        )
    ).save_pretrained(tmp_path / "gemma2")  # fmt: skip
    with pytest.raises(UnsupportedError, match="gemma2"):
        create_worker(settings(tmp_path / "gemma2"))
    assert not dist.is_initialized()


def test_more_ranks_than_this_one_need_a_group_first(model_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        create_worker(settings(model_path))


def test_closing_ends_only_what_the_worker_made(model_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        worker = create_worker(settings(model_path))
        worker.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    worker = create_worker(settings(model_path))
    worker.close()
    worker.close()
    assert not dist.is_initialized()


# -------------------------------------------------------------------------------------------- memory and precision


def test_recomputed_layers_give_the_same_gradient_bit_for_bit(make_worker, tmp_path):
    batch, gradients, counts = make_batch((9, 4, 17), 1), [], []
    for name, recompute in (("kept", False), ("recomputed", True)):
        worker, seen = make_worker(activation_checkpointing=recompute), Counter()
        with nn.modules.module.register_module_forward_hook(lambda m, *_, seen=seen: seen.update([type(m).__name__])):
            accumulate(worker, [batch])
        worker.step()
        worker.save(tmp_path / name)
        gradients.append(saved_gradients(tmp_path / name))
        counts.append(seen["Qwen3Attention"])
    assert counts[1] == 2 * counts[0]
    assert_close(*gradients, tolerance=1e-15)


def masters_of(worker, path):
    worker.save(path)
    return load_file(path / "model.safetensors")


def share_changed(before, after):
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def test_bfloat16_is_computed_and_sent_over_masters_of_float32(make_worker, tmp_path):
    batch = make_batch((9, 4, 17), 1)
    exact = make_worker(dtype="float32")
    worker = make_worker(dtype="bfloat16", wire_dtype=None, learning_rate=1e-6, betas=(0.9, 0.999))
    difference = (exact.forward(batch) - worker.forward(batch)).abs().max().item()
    assert 1e-4 < difference < 1.0  # 8 bits of mantissa in two layers, and logits that reach 10
    before = masters_of(worker, tmp_path / "before")
    for step in range(20):
        accumulate(worker, [make_batch(LENGTHS, seed=step)])
        assert worker.step().rounded_away is None
    after = masters_of(worker, tmp_path / "after")
    assert share_changed(before, after) > 0.99
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moments = load_file(tmp_path / "after" / "trainer" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    sent = weights_of(worker)
    assert all(torch.equal(sent[name], after[name].bfloat16()) for name in after)


@pytest.mark.filterwarnings("ignore::inflight.errors.PrecisionWarning")
def test_what_is_sent_computes_bit_for_bit_what_the_trainer_computes(make_worker, tmp_path, model_path):
    worker, batch = make_worker(dtype="bfloat16", wire_dtype=None, learning_rate=1e-3), make_batch(LENGTHS, seed=1)
    for step in range(3):
        accumulate(worker, [make_batch(LENGTHS, seed=step)])
        worker.step()
    shutil.copytree(model_path, tmp_path / "sent")
    save_file(weights_of(worker), tmp_path / "sent" / "model.safetensors", {"format": "pt"})
    served = make_worker(tmp_path / "sent", dtype="bfloat16", master_dtype="bfloat16", wire_dtype=None)
    with torch.no_grad():
        assert torch.equal(worker.forward(batch), served.forward(batch))


def test_masters_of_bfloat16_are_warned_of_with_the_share_of_updates_that_round_away(make_worker, tmp_path):
    options = {"dtype": "bfloat16", "master_dtype": "bfloat16", "wire_dtype": None, "betas": (0.9, 0.999)}
    with pytest.warns(PrecisionWarning, match="master_dtype 'bfloat16'.*is rounded away"):
        worker = make_worker(**options, learning_rate=1e-6)
    before = masters_of(worker, tmp_path / "before")

    def share_lost(step):
        previous = masters_of(worker, tmp_path / "previous")
        accumulate(worker, [make_batch(LENGTHS, seed=step)])
        share = worker.step().rounded_away
        changed = share_changed(previous, masters_of(worker, tmp_path / "now"))
        assert share == pytest.approx(1 - changed, abs=0.002)  # but for gradients of exactly 0
        return share

    shares = [share_lost(0), share_lost(1)]
    with pytest.warns(PrecisionWarning, match=r"\d+\.\d% of the updates .* rounded away") as warned:
        shares.append(share_lost(2))
    shares += [share_lost(step) for step in range(3, 20)]  # which would fail with another warning
    assert share_changed(before, masters_of(worker, tmp_path / "after")) < 0.05
    told = float(re.search(r"([\d.]+)%", str(warned[0].message))[1])
    assert told == pytest.approx(100 * sum(shares[:3]) / 3, abs=0.1)
    with pytest.warns(PrecisionWarning, match="is rounded away"):
        faster = make_worker(**options, learning_rate=1e-2)
    accumulate(faster, [make_batch(LENGTHS, seed=0)])
    assert faster.step().rounded_away < 0.1


@pytest.mark.parametrize("others", [{}, {"dtype": "bfloat16", "activation_checkpointing": True}], ids=str)
def test_shards_in_host_memory_give_the_same_bits(make_worker, tmp_path, others):
    workers = [
        make_worker(**{"dtype": "float32", "cpu_offload": flag, "betas": (0.9, 0.99), **others})
        for flag in (False, True)
    ]
    for worker, name in zip(workers, ("device", "host"), strict=True):
        for seed in range(2):  # two micro-batches: the second is added to a gradient that is in host memory
            accumulate(worker, [make_batch(LENGTHS, seed=seed), make_batch((5, 20), seed=seed + 10)])
            worker.step()
        worker.save(tmp_path / name)
    assert file_bytes(tmp_path / "host") == file_bytes(tmp_path / "device")
    workers[1].load(tmp_path / "device")
    results = []
    for worker in workers:
        accumulate(worker, [make_batch(LENGTHS, seed=5)])
        results.append(worker.step())
    assert results[0] == results[1]
    assert all(torch.equal(tensor, weights_of(workers[1])[name]) for name, tensor in weights_of(workers[0]).items())


def test_a_shard_stays_in_host_memory_whatever_the_device_of_its_mesh():
    """With shards in host memory a mesh of GPUs has local tensors on the CPU; `DTensor.from_local` would move them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
        meta = TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32)
        parameter = DTensor(torch.ones(4, 3), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
        moment = torch.zeros(4, 3)
        sharded = as_sharded(moment, parameter)
        assert sharded.device_mesh.device_type == "cuda"
        assert sharded.to_local().data_ptr() == moment.data_ptr()
        assert (sharded.shape, sharded.stride(), sharded.placements) == (parameter.shape, (3, 1), (Shard(0),))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32", "master_dtype": "bfloat16"}, "narrower than dtype 'float32'"),
        ({"dtype": "float64", "master_dtype": "float32"}, "narrower than dtype 'float64'"),
        ({"dtype": "bfloat16", "master_dtype": "float16"}, "master_dtype"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(make_worker, options, says):
    with pytest.raises(ConfigError, match=says):
        make_worker(**options)


def test_no_rank_reads_more_than_its_rows_and_a_misfit_is_named(make_worker, model_path, tmp_path):
    for name, change in {
        "missing": lambda t: t.pop("model.norm.weight"),
        "unknown": lambda t: t.update(other=torch.zeros(2)),
        "misshapen": lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
        "integers": lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int64)}),
    }.items():
        shutil.copytree(model_path, tmp_path / name)
        rewrite(tmp_path / name / "model.safetensors", change)
        with pytest.raises(ConfigError, match="other" if name == "unknown" else "model.norm.weight"):
            make_worker(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------------
# Frozen parameters


def test_frozen_parameters_stay_and_the_others_train_as_without_them(tmp_path, make_worker, model_path):
    """Gradients of the trained parameters do not depend on who else takes some; frozen ones have no optimizer state."""
    batch = make_batch(LENGTHS, seed=1)
    everything = gradients_of(make_worker(), [batch], tmp_path / "all")
    worker = make_worker(frozen=("model.embed_tokens.*", "model.layers.0.*"), weight_decay=0.1)
    sent, frozen = [spec.name for spec in worker.parameter_specs()], worker.frozen_names()
    before = load_file(model_path / "model.safetensors")
    assert sorted([*sent, *frozen]) == sorted(before)
    assert set(frozen) == {n for n in before if n.startswith(("model.embed_tokens.", "model.layers.0."))}
    gradients = gradients_of(worker, [batch], tmp_path / "checkpoint")
    assert_close(gradients, {name: everything[name] for name in sent}, 1e-12)
    after = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) is (name in frozen) for name in before)
    assert_close(weights_of(worker), {name: after[name] for name in sent}, 1e-15)
    again = make_worker(frozen=("model.embed_tokens.*", "model.layers.0.*"), weight_decay=0.1)
    again.load(tmp_path / "checkpoint")
    assert_close(weights_of(again), weights_of(worker), 1e-15)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [(["model.layers.7.*"], "'model.layers.7.*' matches no parameter"), (["*"], "nothing would be trained")],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(make_worker, patterns, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_worker(frozen=patterns)
