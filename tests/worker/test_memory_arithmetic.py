"""The memory that ``inflight train --dry-run`` computes, against the tensors of real workers on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight.contracts import MemoryTerm
from inflight.engines.embedded.slots import token_bytes_of
from inflight.model import attention
from inflight.model.checkpoints import load_causal_lm, max_model_len_of
from inflight.model.shapes import model_shape
from inflight.run.config import RunConfig, load_config
from inflight.run.machines.memory import CONTEXT_BYTES, server_terms, trainer_terms
from inflight.run.ranks.workers import worker_settings
from inflight_fsdp import FsdpWorker, WorkerConfig, create_worker
from inflight_fsdp.memory import activation_bytes, shard_elements
from inflight_fsdp.model import empty_policy
from inflight_fsdp.rows import rows_of
from tests.models import TRAINED_FAMILIES, make_model
from tests.worker.worker_cases import make_batch

NUM_RANKS = 3


@pytest.fixture
def first_of_three() -> Iterator[None]:
    """This process is rank 0 of three, and the others do nothing: enough to make shards, and to compute with them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


def configured(tmp_path: Path, model: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndirectory = "{tmp_path}/run"\n[model]\npath = "{model}"\n[task]\nname = "x"\n')
    return load_config(path, overrides)


def terms(config: RunConfig) -> dict[str, int]:
    return {term.name: term.size_bytes for term in trainer_terms(config, MemoryTerm("context", CONTEXT_BYTES))}


def local_bytes(tensors: Any) -> int:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.itemsize for part in parts)


def moments_of(worker: FsdpWorker) -> list[torch.Tensor]:
    return [tensor for tensors in worker._optimizer.states.values() for tensor in tensors.values()]


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_and_moments_of_rank_0_are_as_large_as_computed(
    tmp_path: Path, first_of_three: None, family: str, dtype: str
) -> None:
    # 259 rows of the vocabulary, 4 experts and 32 rows of most matrices: three ranks cannot share them out evenly.
    model = make_model(tmp_path / "model", family, vocab_size=259, tokenizer=False, tied=family == "gemma")
    config = configured(tmp_path, model, "--train.num_ranks", str(NUM_RANKS), "--train.master_dtype", dtype)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    with pytest.warns() if dtype == "bfloat16" else _nothing():
        worker = create_worker(worker_settings(config))
    computed = terms(config)
    assert local_bytes(part.local for part in worker._parameters.parts.values()) == computed["parameters"]
    assert local_bytes(moments_of(worker)) == computed["optimizer states"]


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_what_is_frozen_has_neither_gradients_nor_moments(tmp_path: Path, model_dir: Path) -> None:
    options = '{ frozen = ["model.layers.0.*", "lm_head.weight"] }'
    config = configured(tmp_path, model_dir, "--train.trainer_options", options)
    worker = create_worker(worker_settings(config))
    batch = make_batch((9, 5), seed=1)
    worker.backward(worker.forward(batch).sum())
    gradients = [p.grad for p in worker._policy.parameters() if p.grad is not None]
    computed = terms(config)
    assert local_bytes(gradients) == computed["gradients"] < computed["parameters"]
    assert local_bytes(moments_of(worker)) == computed["optimizer states"]
    assert local_bytes(part.local for part in worker._parameters.parts.values()) == computed["parameters"]
    worker.close()


def test_a_reference_model_has_parameters_and_nothing_else(tmp_path: Path, model_dir: Path) -> None:
    alone, beside = (terms(configured(tmp_path, model_dir, *more)) for more in ((), ("--loss.reference_kl", "0.1")))
    assert beside["parameters"] == 2 * alone["parameters"]
    assert beside["optimizer states"] == alone["optimizer states"]


def test_shards_that_share_a_copy_are_those_of_the_shard_size(tmp_path: Path, model_dir: Path) -> None:
    four = configured(tmp_path, model_dir, "--train.num_ranks", "4")
    pairs = configured(tmp_path, model_dir, "--train.num_ranks", "4", "--train.trainer_options", "{ shard_size = 2 }")
    shape = model_shape(model_dir)
    assert terms(four)["parameters"] == 4 * shard_elements(shape.tensors, 4)
    assert terms(pairs)["parameters"] == 4 * shard_elements(shape.tensors, 2)


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_weights_and_cache_of_the_embedded_engine_are_as_large_as_computed(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path / "model", family, tokenizer=False)
    config = configured(tmp_path, model, "--servers.max_concurrent", "8")
    member = config.servers.members[0]
    computed = {
        term.name: term.size_bytes
        for term in server_terms(config, member, member.kind.gpu_use(()), model_shape(model), 80 << 30)
    }
    loaded = load_causal_lm(model, attention="eager", dtype="float32")
    assert local_bytes(loaded.parameters()) == computed["weights"]
    a_token = token_bytes_of(loaded.config, torch.float32)
    assert 8 * max_model_len_of(loaded.config) * a_token == computed["KV cache"]


# ---------------------------------------------------------------------------------------------------------------
# Activations


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, until they are freed."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self._live = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.current = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.current -= self._live.pop(key, 0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_computed_within_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, checkpointing: bool
) -> None:
    monkeypatch.setattr(attention, "_LONG", 0)  # as on a GPU, where attention is in the dtype of the model
    model = make_model(tmp_path / "model", family, hidden_size=64, num_layers=4, tokenizer=False)
    settings = WorkerConfig(
        model_path=model, dtype=dtype, master_dtype=dtype, activation_checkpointing=checkpointing, device="cpu"
    )
    policy = empty_policy(settings, torch.device("cpu"))
    policy.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(0.01)
    batch = make_batch((307, 200, 100, 64, 50), seed=0)
    every_token = torch.arange(batch.num_tokens) > 0
    (row,) = rows_of(replace(batch, loss_mask_T=every_token), 1, None, 1024, torch.device("cpu"))
    known = (*policy.parameters(), *policy.buffers(), row.token_ids_R, row.position_ids_R, row.targets.rows_N)
    with Allocated(iter(known)) as allocated:
        logprobs_N = policy(row)
        measured = allocated.current
        logprobs_N.sum().backward()
    shape = model_shape(model)
    computed = activation_bytes(shape, dtype, batch.num_tokens, checkpointing=checkpointing)
    if checkpointing:  # one layer at a time is computed again in the backward
        measured = allocated.peak
    assert measured / 1.1 < computed < measured * 1.1, f"{computed / measured:.2f} of what was measured"
