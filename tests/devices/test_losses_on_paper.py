"""Micro-batches, losses, metrics and the head with everything on a GPU on paper: the numbers are those of the CPU."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from inflight.losses import (
    PRESETS,
    KeptTokens,
    chunked_logprobs,
    chunked_logprobs_and_entropy,
    collate,
    grpo_loss,
    one_pass,
    prepare,
    reinforce_loss,
)
from inflight.types import MicroBatch, Rollout, Sample
from inflight.wire import VersionSpan
from tests.devices.gpu_on_paper import CUDA, assert_values, on_cuda, paper_gpu
from tests.losses.steps import VERSION, further, logprobs_of, loss_and_gradient, random_step
from tests.losses.test_head import gradients, inputs, kept_tokens, weighted


def batch_on_cuda(batch: MicroBatch) -> MicroBatch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: on_cuda(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)})


def needs_of(loss, batch, trainer_T):
    """What a trainer gives to `prepare` and to a call beside the micro-batch."""
    first = [trainer_T.detach()] if "first_forward" in loss.needs else None
    plan = prepare(loss, [batch], trainer_logprobs=first, current_version=VERSION)
    entropy_T = 0.1 * trainer_T.detach().abs() if "entropy" in loss.needs else None
    return plan, entropy_T


SOME = (
    "grpo",
    "gspo",
    "gmpo",
    "sapo",
    "vespo",
    "deepseek_v32",
    "m2po",
    "dppo_kl",
    "a3po",
    "scalerl",
    "opd",
    "verl_forward_kl",
)
"""Presets in which each gate, correction and penalty occurs."""


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in PRESETS]
)
def test_every_preset_has_the_loss_gradient_and_metrics_of_the_cpu(name):
    loss = PRESETS[name].loss
    batch, logits_TV = random_step(drift=0.5)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    plan, entropy_T = needs_of(loss, batch, trainer_T)
    expected = loss(batch, trainer_T, plan, entropy_T=entropy_T, **further(loss, batch))
    _, expected_T = loss_and_gradient(loss, batch, trainer_T, plan, entropy_T=entropy_T)
    with paper_gpu() as gpu:
        there, there_T = batch_on_cuda(batch), on_cuda(trainer_T)
        plan_there, entropy_there_T = needs_of(loss, there, there_T)
        assert plan_there == plan
        gpu.waits.clear()
        more = further(loss, there)
        output = loss(there, there_T, plan_there, entropy_T=entropy_there_T, **more)
        # Which tokens are targets, which segments have one, which targets are fresh and which stale.
        assert gpu.waits["nonzero"] == 4
        assert gpu.waits["index.Tensor"] <= ("group_ids" in loss.needs)
        _, gradient_T = loss_and_gradient(loss, there, there_T, plan_there, entropy_T=entropy_there_T)
        assert output.metrics == expected.metrics
        assert_values(output.loss, expected.loss)
        assert_values(gradient_T, expected_T)


@pytest.mark.parametrize("everyday", [grpo_loss, reinforce_loss])
def test_the_everyday_losses_have_the_loss_and_metrics_of_the_cpu(everyday):
    generator = torch.Generator().manual_seed(0)
    trainer, behaviour = (-torch.rand(3, 7, generator=generator) for _ in range(2))
    advantages, mask = torch.randn(3, generator=generator), torch.rand(3, 7, generator=generator) < 0.7
    expected = everyday(trainer, behaviour, advantages, mask)
    with paper_gpu():
        output = everyday(*map(on_cuda, (trainer, behaviour, advantages, mask)))
        assert output.metrics == expected.metrics
        assert_values(output.loss, expected.loss)


def test_samples_are_collated_on_the_device_alike():
    rollout = Rollout([5, 6], [7, 8, 9], [-0.5, -1.0, -0.1], [VersionSpan(version=3, start=0, end=3)], "stop", 1.0, 0.7)
    samples = [Sample(rollout, [0.5] * 3, [True, False, True]), Sample(rollout, [-0.5] * 3, [True] * 3)]
    expected = collate(samples)
    with paper_gpu():
        there = collate(samples, CUDA)
        for field in fields(expected):
            wanted, found = getattr(expected, field.name), getattr(there, field.name)
            if isinstance(wanted, torch.Tensor):
                assert_values(found, wanted)


# ---- the head


def head_inputs(dtype, **changes):
    """The inputs of the tests of the head, on the host."""
    return inputs(dtype) | changes


def on_device(given):
    return {name: None if value is None else on_cuda(value) for name, value in given.items()}


TILES = {"chunk_size": 4, "vocab_chunk_size": 5}


@pytest.mark.parametrize("kept", [False, True])
def test_the_head_has_the_logprobs_entropies_and_gradients_of_the_cpu(kept):
    given = head_inputs(torch.float32)
    kept = kept_tokens(given["targets_N"]) if kept else None
    grad_N = torch.linspace(-1, 1, len(given["targets_N"]), dtype=torch.float64)
    grad_N[3:6] = 0.0
    expected = chunked_logprobs_and_entropy(**given, kept=kept, **TILES)
    expected_gradients = gradients(expected[0] + 0.3 * expected[1], given, grad_N)
    with paper_gpu() as gpu:
        there = on_device(given)
        kept_there = None if kept is None else KeptTokens(on_cuda(kept.token_ids_K), on_cuda(kept.offsets))
        gpu.waits.clear()
        found = chunked_logprobs_and_entropy(**there, kept=kept_there, **TILES)
        if kept is None:
            assert sum(gpu.waits.values()) == 1, gpu.waits  # whether the arguments are in range, and nothing per tile
        found_gradients = gradients(found[0] + 0.3 * found[1], there, on_cuda(grad_N))
        if kept is None:
            assert gpu.waits["nonzero"] == 1  # which targets have a gradient
            assert sum(gpu.waits.values()) == 2, gpu.waits
        for left, right in zip((*found, *found_gradients), (*expected, *expected_gradients), strict=True):
            # float32, and logits divided where hidden states are on the host.
            assert_values(left, right, atol=2e-5)


def test_one_pass_has_the_loss_and_gradients_of_the_cpu_and_waits_for_no_tile():
    given = head_inputs(torch.float32)
    upstream_N = torch.linspace(-1, 1, len(given["targets_N"]))
    leaves = ["hidden_NH", "weight_VH", "bias_V"]
    expected = 0.3 * one_pass(**given, loss_of=weighted(upstream_N), chunk_size=4)
    expected_gradients = torch.autograd.grad(expected, [given[name] for name in leaves])
    with paper_gpu() as gpu:
        there, upstream_there_N = on_device(given), on_cuda(upstream_N)
        gpu.waits.clear()
        found = 0.3 * one_pass(**there, loss_of=weighted(upstream_there_N), chunk_size=4)
        assert sum(gpu.waits.values()) == 1, gpu.waits
        found_gradients = torch.autograd.grad(found, [there[name] for name in leaves])
        assert sum(gpu.waits.values()) == 2, gpu.waits
        for left, right in zip((found, *found_gradients), (expected, *expected_gradients), strict=True):
            assert_values(left, right, atol=2e-5)  # float32


def test_bfloat16_is_multiplied_in_16_bits_on_a_gpu_with_the_gradients_of_the_cpu():
    given = head_inputs(torch.bfloat16)
    ones_N = torch.ones(len(given["targets_N"]), dtype=torch.float64)
    expected_N = chunked_logprobs(**given, **TILES)
    expected = gradients(expected_N, given, ones_N)
    with paper_gpu():
        there = on_device(given)
        logprobs_N = chunked_logprobs(**there, **TILES)
        assert logprobs_N.dtype == torch.float32
        assert_values(logprobs_N, expected_N, atol=5e-6)  # float32
        for left, right in zip(gradients(logprobs_N, there, on_cuda(ones_N)), expected, strict=True):
            # Both are rounded to bfloat16 once, at most to neighbours.
            assert_values(left, right, rtol=2**-7, atol=1e-5)
