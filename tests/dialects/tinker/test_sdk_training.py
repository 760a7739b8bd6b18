"""`TrainingClient` of the real SDK: what is trained, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.dialects.tinker.server import TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402

from tests.dialects.tinker.sdk import (  # noqa: E402
    ADAM,
    DEPRECATED,
    TOKENS,
    datum,
    forward,
    logprobs_of,
    new_model,
    refused,
    scores,
    tensor,
    train,
)


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full"])
def test_losses_fall_and_samplers_score_as_the_trainer_does(
    service: tinker.ServiceClient, sdk_server: TinkerServer, rank: int
) -> None:
    client = new_model(service, sdk_server, rank)
    info = client.get_info()
    assert (info.model_id, info.is_lora, info.lora_rank) == (client.model_id, rank > 0, rank)
    before = forward(client)
    losses = train(client, 4)
    assert losses[0] == pytest.approx(-before.sum(), rel=1e-5)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1
    trained = forward(client)
    snapshot = client.save_weights_and_get_sampling_client().result(60)
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result(60)
    np.testing.assert_allclose(scores(snapshot), trained, atol=1e-4)
    np.testing.assert_allclose(scores(inflight), trained, atol=1e-4)
    train(client)
    second = client.save_weights_and_get_sampling_client(kind="inflight").result(60)
    newer = forward(client)
    for sampler in (inflight, second):  # an earlier one moves too
        np.testing.assert_allclose(scores(sampler), newer, atol=1e-4)
    np.testing.assert_allclose(scores(snapshot), trained, atol=1e-4)
    base = service.create_sampling_client(base_model=str(sdk_server.model)).result(60)
    np.testing.assert_allclose(scores(base), before, atol=1e-4)
    path = client.save_weights_for_sampler("kept").result(60).path
    named = client.create_sampling_client(path).result(60)
    np.testing.assert_allclose(scores(named), newer, atol=1e-4)
    assert named.get_base_model() == str(sdk_server.model)


@DEPRECATED
def test_deprecated_methods_do_what_the_others_do(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    expected = new_model(service, sdk_server)
    train(expected, 2)

    async def deprecated() -> tuple[Any, ...]:
        client = await service.create_lora_training_client_async(str(sdk_server.model), rank=8, seed=1)
        for _ in range(2):
            backward = await client.forward_backward_async([datum()], "cross_entropy")
            step = await client.optim_step_async(ADAM)
            await backward
            assert (await step).metrics["gradient_norm"] > 0
        output = await (await client.forward_async([datum()], "cross_entropy"))
        state = await (await client.save_state_async("state"))
        saved = await (await client.save_weights_for_sampler_async("state"))
        snapshot = await client.save_weights_and_get_sampling_client_async()
        named = await client.create_sampling_client_async(saved.path)
        assert (state.path, saved.path) == tuple(
            f"tinker://{client.model_id}/{kind}/state" for kind in ("weights", "sampler_weights")
        )
        assert await client.get_info_async() == client.get_info()
        return logprobs_of(output)[0], snapshot, named

    logprobs, *samplers = asyncio.run(deprecated())
    np.testing.assert_array_equal(logprobs, forward(expected))
    for sampler in samplers:
        np.testing.assert_allclose(scores(sampler), logprobs, atol=1e-4)


def clipped(r: Any, a: Any, low: float, high: float) -> Any:
    return -np.minimum(r * a, np.clip(r, low, high) * a)


# Settings, and the loss of each token from the trainer's logprob, the ratio to the sampler's and the advantage.
LOSSES: dict[str, tuple[dict[str, float], Any]] = {
    "importance_sampling": ({}, lambda p, r, a: -r * a),
    "ppo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, lambda p, r, a: clipped(r, a, 0.9, 1.1)),
    "cispo": ({"clip_high_threshold": 1.1}, lambda p, r, a: -np.clip(r, 0, 1.1) * p * a),
    "dro": ({"beta": 0.1}, lambda p, r, a: -(p * a - 0.05 * np.log(r) ** 2)),
    "gspo": ({}, lambda p, r, a: clipped(np.full_like(r, np.exp(np.log(r).mean())), a, 0.8, 1.2)),
}


def test_each_loss_has_the_value_of_its_formula(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    l_N = forward(client).astype(np.float64)
    random = np.random.default_rng(3)
    q_N, a_N = l_N + random.normal(0, 0.3, l_N.shape), random.normal(0, 1, l_N.shape)
    for loss_fn, (settings, formula) in LOSSES.items():
        inputs = {"logprobs": q_N, "advantages": a_N}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones_like(l_N)
        for call in (client.forward, client.forward_backward):
            output = call([datum(**inputs)] * 2, loss_fn, settings).result(60)
            expected = 2 * formula(l_N, np.exp(l_N - q_N), a_N).sum()
            assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4), loss_fn
            np.testing.assert_allclose(logprobs_of(output)[1], l_N, atol=1e-5)
            assert output.loss_fn_output_type == "scalar"
            of_rows = np.concatenate([it["elementwise_loss"].to_numpy() for it in output.loss_fn_outputs])
            np.testing.assert_allclose(of_rows, np.tile(formula(l_N, np.exp(l_N - q_N), a_N), 2), rtol=1e-3, atol=1e-5)
            weights = np.arange(len(l_N)) % 2.0
            masked = call([datum(weights=weights, **inputs)], loss_fn, settings).result(60)
            expected = (weights * formula(l_N, np.exp(l_N - q_N), a_N)).sum()
            assert masked.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4), loss_fn


def test_a_step_without_data_is_one_with_a_gradient_of_zero(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    client, other = new_model(service, sdk_server), new_model(service, sdk_server)
    assert client.optim_step(ADAM).result(60).metrics["gradient_norm"] == 0.0
    np.testing.assert_array_equal(forward(client), forward(other))
    for it in (client, other):
        it.forward_backward([datum()], "cross_entropy")
        it.optim_step(ADAM)
    other.forward_backward([datum(weights=np.zeros(19))], "cross_entropy")
    for it in (client, other):  # the moments of the step before move the weights
        before = forward(it)
        assert it.optim_step(ADAM).result(60).metrics["gradient_norm"] == 0.0
        assert np.abs(forward(it) - before).max() > 1e-4
    trained = forward(client)
    assert client.optim_step(types.AdamParams(learning_rate=0.0)).result(60).metrics["gradient_norm"] == 0.0
    np.testing.assert_array_equal(forward(client), trained)


def weighted(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross entropy, as a client computes it."""
    parts = [(it.loss_fn_inputs["weights"].to_torch() * p).sum() for it, p in zip(data, logprobs, strict=True)]
    return -torch.stack(parts).sum(), {"mine": 1.0}


def of_datum(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:sum": loss}


@DEPRECATED
def test_a_loss_of_the_client_has_the_gradient_of_the_same_loss_of_the_server(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    data = [datum(weights=np.linspace(0, 1, 19)), datum(tuple(range(90, 100)), weights=np.ones(9))]
    handle = service.create_custom_loss(of_datum, {"logprobs": 1, "weights": 1}).result(60)

    def by_server(client: tinker.TrainingClient) -> Any:
        return client.forward_backward(data, "cross_entropy").result(60)

    def by_function(client: tinker.TrainingClient) -> Any:
        output = asyncio.run(client.forward_backward_custom_async(data, weighted)).result(60)
        assert output.metrics["mine"] == 1.0
        return output

    def by_handle(client: tinker.TrainingClient) -> Any:
        output = client.forward_backward_custom(data, handle).result(60)
        assert output.metrics["custom/mine:sum"] == output.metrics["loss:sum"]
        return output

    found = []
    for backward in (by_server, by_function, by_handle):
        client = new_model(service, sdk_server)
        loss = backward(client).metrics["loss:sum"]
        client.optim_step(ADAM).result(60)
        found.append((loss, forward(client, data)))
    for loss, logprobs in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        np.testing.assert_allclose(logprobs, found[0][1], atol=1e-4)


def test_several_targets_of_a_position_are_scored_dense_and_sparse(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    client = new_model(service, sdk_server)
    targets = np.zeros((19, 4), np.int64)
    targets[:, 0], targets[::5, 1] = TOKENS[1:], 7
    weights = np.where(targets > 0, 0.5, 0.0).astype(np.float32)
    found = []
    for to_data in (types.TensorData.from_torch, types.TensorData.from_torch_sparse):
        inputs = {"target_tokens": to_data(torch.tensor(targets)), "weights": to_data(torch.tensor(weights))}
        several = types.Datum(model_input=datum().model_input, loss_fn_inputs=inputs)
        found.append(client.forward_backward([several, several], "cross_entropy").result(60))
    assert inputs["weights"].sparse_crow_indices is not None
    for output in found:
        (first, second) = logprobs_of(output)
        assert first.shape == (19, 4)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first[:, 0], forward(client), atol=1e-5)
        assert output.metrics["loss:sum"] == pytest.approx(-2 * (weights * first).sum(), rel=1e-5)


def test_each_step_uses_its_own_settings(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    before = forward(client)
    client.forward_backward([datum()], "cross_entropy")
    still = client.optim_step(types.AdamParams(learning_rate=0.0, grad_clip_norm=0.5)).result(60)
    assert still.metrics["learning_rate"] == 0.0
    np.testing.assert_array_equal(forward(client), before)
    client.forward_backward([datum()], "cross_entropy")
    assert client.optim_step(adam_params=ADAM).result(60).metrics["learning_rate"] == pytest.approx(1e-2)
    assert np.abs(forward(client) - before).max() > 1e-3


def test_the_tokenizer_is_that_of_the_base_model(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    sampler = client.save_weights_and_get_sampling_client().result(60)
    for tokenizer in (client.get_tokenizer(), sampler.get_tokenizer()):
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
        assert tokenizer.encode("A") == [65]


def test_what_only_the_client_knows_needs_no_server(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    assert client.get_console_url().endswith(f"/training_runs/{client.model_id}")
    assert service.get_console_url().endswith(f"/sessions/{service.holder.get_session_id()}")
    assert client.get_telemetry() is None and service.get_telemetry() is None


@DEPRECATED
def test_calls_that_fail_leave_a_model_that_can_be_trained(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    client = new_model(service, sdk_server)
    rows = np.ones(19)
    bad = {"logprobs": rows, "advantages": rows}
    with refused("already writes the Hugging Face format"):
        client.save_weights_external("x").result(60)
    with refused("already writes the Hugging Face format"):
        asyncio.run(client.save_weights_external_async("x")).result(60)
    for loss_fn, inputs, settings, message in (
        ("stable_reinforce", bad, {}, "has no published formula"),
        ("custom", bad, {}, "uploads a graph"),
        ("custom", bad, {"loss_id": "x"}, "must be a number"),
        ("ppo", {"logprobs": rows}, {}, "needs advantages"),
        ("ppo", bad, {"beta": 1.0}, "has no setting 'beta'"),
        ("dro", bad | {"advantages": rows * np.nan}, {}, "not finite"),
    ):
        with refused(message):
            client.forward_backward([datum(**inputs)], loss_fn, settings).result(60)
    with refused("the id 70000, but the vocabulary has"):
        client.forward([datum((1, 70000))], "cross_entropy").result(60)
    assert client.forward([datum([65] * 1024)], "cross_entropy").result(60).metrics["loss:sum"] > 0
    with refused("it has 1024 tokens, but the model's context has room for only 1023 and a target"):
        client.forward([datum([65] * 1025)], "cross_entropy").result(60)
    with refused("only token ids are supported"):
        image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
        inputs = {"target_tokens": tensor([5], "int64"), "weights": tensor([1.0])}
        client.forward(
            [types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=inputs)], "cross_entropy"
        ).result(60)
    for params, message in (
        (types.DimuonParams(learning_rate=1.0), "only adam_params are supported"),
        (types.AdamParams(learning_rate=float("nan")), "learning_rate"),
        (types.AdamParams(beta1=1.5), "beta"),
    ):
        with refused(message):
            client.optim_step(params).result(60)
    with refused("cannot be the name of a checkpoint"):
        client.save_state("../evil").result(60)
    assert train(client, 2)[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_model": "other"}, "does not serve the base model 'other'"),
        ({"train_mlp": False}, "train_mlp and train_attn must be true"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "optimizer 'dimuon' is not supported"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    service: tinker.ServiceClient, sdk_server: TinkerServer, options: dict[str, Any], message: str
) -> None:
    with refused(message):
        service.create_lora_training_client(**{"base_model": str(sdk_server.model), **options}).result(60)
