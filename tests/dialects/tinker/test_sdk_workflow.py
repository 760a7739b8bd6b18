"""Programs like those of SkyRL's tests of its server (NovaSky-AI/SkyRL, ``tests/tinker``), on a server of one slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
from tinker import types  # noqa: E402

from tests.dialects.tinker.sdk import DEPRECATED, prompt_of, refused  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    from tests.models import make_model

    parent = tmp_path_factory.mktemp("workflow")
    model = make_model(parent / "model", "llama", tied=True)
    server = TinkerServer(model, parent / "served", "--name", str(model))
    yield server
    server.end()


@pytest.fixture
def session(server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as session:
        yield session


def example(tokenizer: Any, prompt: str, completion: str, weight: float | None = 1.0) -> types.Datum:
    """A question with an answer; without a weight, each token counts once."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(f"{completion}\n\n", add_special_tokens=False)
    tokens = before + after
    inputs: dict[str, Any] = {"target_tokens": [*tokens[1:], tokenizer.eos_token_id]}
    if weight is not None:
        inputs["weights"] = [0.0] * (len(before) - 1) + [weight] * (len(after) + 1)
    return types.Datum(model_input=prompt_of(tokens), loss_fn_inputs=inputs)


def outputs_of(output: types.ForwardBackwardOutput) -> list[dict[str, Any]]:
    found = output.loss_fn_outputs
    return [{key: (it.dtype, it.shape, list(it.data)) for key, it in of_datum.items()} for of_datum in found]


def loss_of(output: types.ForwardBackwardOutput) -> float:
    return sum(sum(of_datum["elementwise_loss"].data) for of_datum in output.loss_fn_outputs)


def cross_entropy(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    weights = [it.loss_fn_inputs.get("weights") for it in data]
    losses = [-(l_N * (1.0 if w is None else w.to_torch())).sum() for l_N, w in zip(logprobs, weights, strict=True)]
    return sum(losses), {}


@DEPRECATED
def test_a_state_is_saved_trained_restored_and_listed(session: tinker.ServiceClient, server: TinkerServer) -> None:
    client = session.create_lora_training_client(base_model=str(server.model)).result(60)
    tokenizer = client.get_tokenizer()
    data = [
        example(tokenizer, "Question: What is 2+2?\nAnswer:", " 4", 0.0),
        example(tokenizer, "Question: What color is the sky?\nAnswer:", " Blue"),
        example(tokenizer, "Question: What is 3+3?\nAnswer:", " 6", None),
    ]
    path = client.save_state(name="0000").result(60).path
    client.save_weights_for_sampler(name="0000").result(60)
    backward, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
    output = backward.result(60)
    assert step.result(60).metrics["gradient_norm"] > 0
    assert output.loss_fn_output_type == "scalar"
    losses = [list(it["elementwise_loss"].data) for it in output.loss_fn_outputs]
    assert set(losses[0]) == {0.0} and any(losses[1]) and all(losses[2])
    with refused("LoadWeights is not permitted"):
        client.load_state(path).result(60)
    restored = session.create_training_client_from_state(path).result(60)
    assert outputs_of(restored.forward_backward(data, "cross_entropy").result(60)) == outputs_of(output)
    assert outputs_of(restored.forward_backward_custom(data, cross_entropy).result(60)) == outputs_of(output)
    continued = session.create_training_client_from_state_with_optimizer(path).result(60)
    assert outputs_of(continued.forward_backward(data, "cross_entropy").result(60)) == outputs_of(output)
    assert client.forward(data, "cross_entropy").result(60).metrics["loss:sum"] < output.metrics["loss:sum"]
    rest = session.create_rest_client()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {it.checkpoint_id for it in listed} == {"weights/0000", "sampler_weights/0000"}
    runs = rest.list_training_runs().result()
    (run,) = [it for it in runs.training_runs if it.training_run_id == client.model_id]
    assert runs.cursor.total_count == len(runs.training_runs)
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == (str(server.model), True, 32, False)


def test_two_adapters_learn_and_sample_alike_while_they_take_turns(
    session: tinker.ServiceClient, server: TinkerServer
) -> None:
    made = [session.create_lora_training_client(str(server.model), rank=8, seed=1) for _ in range(2)]
    clients = [it.result(60) for it in made]
    tokenizer = clients[0].get_tokenizer()
    data = [example(tokenizer, "Question: 1+1?\nAnswer:", " 2")]
    prompt, greedy = (
        prompt_of(tokenizer.encode("Question: 2+2?\nAnswer:")),
        types.SamplingParams(max_tokens=8, temperature=0),
    )
    losses, tokens = [], []
    for _ in range(2):
        for client in clients:
            losses.append(loss_of(client.forward_backward(data, "cross_entropy").result(60)))
            client.optim_step(ADAM).result(60)
            sampler = client.save_weights_and_get_sampling_client().result(60)
            tokens.append(sampler.sample(prompt, 1, greedy).result(60).sequences[0].tokens)
    assert losses[0] == losses[1] and losses[2] == losses[3] and losses[2] < losses[0]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]


def test_gradients_accumulate_over_requests_and_turns(session: tinker.ServiceClient, server: TinkerServer) -> None:
    split, whole = (session.create_lora_training_client(str(server.model), rank=8, seed=1).result(60) for _ in "12")
    tokenizer = split.get_tokenizer()
    data = [example(tokenizer, f"Question: {i}+{i}?\nAnswer:", f" {2 * i}", float(i > 0)) for i in (1, 2, 0)]
    for datum in data:
        split.forward_backward([datum], "cross_entropy").result(60)
    whole.forward_backward(data, "cross_entropy").result(60)  # now the gradient of the other is computed again
    after = []
    for client in (split, whole):
        client.optim_step(ADAM).result(60)
        after.append(loss_of(client.forward(data, "cross_entropy").result(60)))
    assert after[0] == pytest.approx(after[1], rel=1e-6)
