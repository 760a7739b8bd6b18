"""A trainer rank's forward, backward and step with its model on a GPU on paper, beside the FSDP worker on the CPU.

There is one rank, without ``fully_shard``, which needs a real device for its collectives and streams. So this walks the
worker's own code and the model's arithmetic. It does not walk how shards are gathered.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from inflight.errors import NonFiniteError
from inflight.model.attention import register_segment_attention
from inflight.model.checkpoints import load_causal_lm
from inflight_fsdp import WorkerConfig, create_worker
from inflight_fsdp.layout import Sharding
from inflight_fsdp.model import PolicyModel, layouts_of
from inflight_fsdp.optimizer import ShardedAdamW
from inflight_fsdp.parts import DTensorPart
from inflight_fsdp.sharded import ShardedWorker
from tests.devices.gpu_on_paper import CUDA, assert_values, move_parameters, on_cuda, paper_gpu
from tests.devices.test_losses_on_paper import batch_on_cuda
from tests.models import make_model
from tests.worker.worker_cases import make_batch, policy_loss, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
OPTIONS = {"dtype": "float32", "wire_dtype": "float32", "max_gradient_norm": 0.5, "betas": (0.9, 0.99)}


@pytest.fixture
def path(tmp_path):
    return make_model(tmp_path / "model", tied=True, tokenizer=False)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def whole_shards(monkeypatch):
    """The one rank holds every parameter whole, as its own shard."""
    monkeypatch.setattr(FakeTensor, "to_local", lambda self: self, raising=False)


@contextlib.contextmanager
def worker_on_paper(path):
    """A rank whose model is on the device."""
    config = WorkerConfig.model_validate(settings(path, **OPTIONS))
    attention = register_segment_attention()
    causal_lm = load_causal_lm(path, attention=attention, dtype="float32", device=torch.device("cpu"))
    layouts = layouts_of(causal_lm)
    shapes = {name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()}
    shardings = {name: Sharding(shape, (tuple(slice(0, size) for size in shape),)) for name, shape in shapes.items()}
    policy = PolicyModel(causal_lm.eval())
    with paper_gpu() as gpu:
        move_parameters(policy)
        causal_lm.tie_weights()
        parameters = dict(causal_lm.named_parameters())
        adamw = torch.optim.AdamW(list(parameters.values()), fused=True, **config.adamw_settings)
        worker = ShardedWorker(
            config,
            CUDA,
            owns_group=False,
            policy=policy,
            parts={name: DTensorPart(parameter) for name, parameter in parameters.items()},
            shardings=shardings,
            layouts=layouts,
            optimizer=ShardedAdamW(adamw, parameters),
            hf_config=causal_lm.config,
        )
        yield worker, parameters, gpu


@pytest.mark.parametrize("where", ["host", "device"])
def test_two_steps_have_the_logprobs_norms_and_weights_of_the_fsdp_worker_on_the_cpu(
    path, tmp_path, one_rank, whole_shards, where
):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    usual = create_worker(settings(path, **OPTIONS))
    expected, norms = [], []
    for batch in batches:
        logprobs_T = usual.forward(batch)
        usual.backward(policy_loss(logprobs_T, batch))
        expected.append(logprobs_T.detach())
        norms.append(usual.step().gradient_norm)
    weights = {name: part.parameter.full_tensor().detach() for name, part in usual._parameters.parts.items()}
    with worker_on_paper(path) as (worker, parameters, gpu):
        for batch, wanted_T, norm in zip(batches, expected, norms, strict=True):
            mine = batch if where == "host" else batch_on_cuda(batch)
            gpu.waits.clear()
            logprobs_T = worker.forward(mine)
            assert logprobs_T.device == mine.token_ids_T.device
            # Arguments of the head, and either the logprobs on their way to the host or the mask's indices.
            assert sum(gpu.waits.values()) == 2, gpu.waits
            there_T = logprobs_T if where == "device" else on_cuda(logprobs_T)
            assert_values(there_T, wanted_T, atol=2e-5)  # float32
            worker.backward(policy_loss(logprobs_T, mine))
            result = worker.step()
            assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
        for name, parameter in parameters.items():
            assert_values(parameter, weights[name], atol=2e-4)  # Adam divides


def test_a_step_with_a_gradient_that_is_not_finite_is_refused_by_its_value(path, one_rank, whole_shards):
    batch = make_batch(LENGTHS, seed=1)
    with worker_on_paper(path) as (worker, _, _):
        worker.backward(policy_loss(worker.forward(batch), batch) * math.nan)
        with pytest.raises(NonFiniteError, match="gradient norm"):
            worker.step()
