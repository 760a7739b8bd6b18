"""The server of Tinker's API on a real trainer rank and a real embedded server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.dialects.tinker.server import KEY, Client, Model, TinkerServer, output_of, response_of, tokens_of
from tests.engine.reference import assert_close, forward_logprobs, load_reference
from tests.gates import wait_until
from tests.models import make_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]
PROMPT = tuple(range(40, 52))
TOKENS = tuple(range(60, 80))


def datum(tokens: tuple[int, ...] = TOKENS, **inputs: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A sequence whose every next token is a target."""
    given = inputs if inputs else {"weights": np.ones(len(tokens) - 1)}
    return tokens[:-1], {"target_tokens": tokens[1:], **given}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tinker") / "model", "llama", tied=True, max_model_len=4096)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    server = TinkerServer(model, tmp_path_factory.mktemp("served"), "--models", "2", "--samplers", "2")
    yield server
    server.end()


@pytest.fixture
def client(server: TinkerServer) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.post(f"/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    client.http.close()


def score(client: Client, sampler: str, tokens: tuple[int, ...]) -> list[float]:
    """Logprobs of given tokens by a sampler, without the first."""
    response = client.sample(sampler, tokens, number=next(NUMBERS), params={"max_tokens": 1}, prompt_logprobs=True)
    logprobs = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(logprobs[0]) and len(logprobs) == len(tokens)
    return [float(it) for it in logprobs[1:]]


NUMBERS = iter(range(10**6))
IDLE_S = 5.0


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full"])
def test_training_follows_adamw_and_samplers_serve_what_was_trained(client: Client, model: Path, rank: int) -> None:
    made = client.create_model(rank)
    info = client.post("/get_info", {"model_id": made.model_id})
    assert (info["lora_rank"], info["is_lora"], info["model_data"]["tokenizer_id"]) == (rank, rank > 0, str(model))
    (logprobs,), loss = made.forward_backward([datum()], forward_only=True)
    expected = forward_logprobs(load_reference(model), TOKENS[:1], TOKENS[1:])
    assert_close(logprobs.tolist(), expected)
    assert loss == pytest.approx(-sum(expected), rel=1e-5)
    assert made.step()["gradient_norm"] == 0.0  # a forward leaves no gradient
    np.testing.assert_array_equal(made.forward_backward([datum()], forward_only=True)[0][0], logprobs)
    losses = []
    for _ in range(3):
        (logprobs,), loss = made.forward_backward([datum()])
        losses.append(loss)
        metrics = made.step()
        assert metrics["learning_rate"] == 1e-2 and metrics["gradient_norm"] > 0
    assert losses == sorted(losses, reverse=True)
    (logprobs,), _ = made.forward_backward([datum()], forward_only=True)
    inflight, snapshot = made.sampler(0, "inflight"), made.sampler(1, "snapshot")
    assert_close(score(client, inflight, TOKENS), logprobs.tolist(), 1e-4)
    assert_close(score(client, snapshot, TOKENS), logprobs.tolist(), 1e-4)
    made.forward_backward([datum()])
    made.step()
    moved = made.sampler(2, "inflight")
    (newer,), _ = made.forward_backward([datum()], forward_only=True)
    for sampler in (inflight, moved):  # an earlier session moves too
        assert_close(score(client, sampler, TOKENS), newer.tolist(), 1e-4)
    assert_close(score(client, snapshot, TOKENS), logprobs.tolist(), 1e-4)
    base = client.sampler(3, base_model="tiny")
    assert_close(score(client, base, TOKENS), expected, 1e-4)
    named = client.sampler(4, model_path=made.save("kept", "save_weights_for_sampler"))
    assert_close(score(client, named, TOKENS), newer.tolist(), 1e-4)


def test_gradients_do_not_depend_on_how_data_are_divided_into_calls(client: Client, model: Path) -> None:
    """Data of one call compute their common prefixes once, and those of separate calls do not."""
    texts = [(*range(first, first + 8), tail, tail + 1) for first in (1, 30) for tail in (50, 60, 70, 80)]
    data = [datum(text) for text in (*texts, tuple(range(1, 40)))]
    expected = [forward_logprobs(load_reference(model), text[:1], text[1:]) for text in texts]
    logprobs = []
    for number, parts in enumerate(([data], [data[:1], data[1:]], [[it] for it in data])):
        made = client.create_model(0, number)
        before = [it for part in parts for it in made.forward_backward(part)[0]]
        for found, it in zip(before, expected, strict=False):
            assert_close(found.tolist(), it)
        made.step()
        after, _ = made.forward_backward(data, forward_only=True)
        logprobs.append(np.concatenate(after))
        client.post(f"/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
        client.session_id = client.post("/create_session", {})["session_id"]
    for other in logprobs[1:]:
        np.testing.assert_allclose(other, logprobs[0], atol=2e-4)


def test_candidates_of_a_token_are_scored_and_learned(client: Client, model: Path) -> None:
    made = client.create_model(0)
    targets = np.random.default_rng(1).integers(0, 250, (5, 3))
    weights = np.full((5, 3), 1 / 3)
    (logprobs,), loss = made.forward_backward([((1, 2, 3, 4, 5), {"target_tokens": targets, "weights": weights})])
    reference = load_reference(model)
    with torch.no_grad():
        logits = reference(torch.tensor([[1, 2, 3, 4, 5]])).logits[0].double()
    expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(targets)).numpy()
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    assert loss == pytest.approx(-(expected * weights).sum(), rel=1e-5)
    made.step()
    _, after = made.forward_backward(
        [((1, 2, 3, 4, 5), {"target_tokens": targets, "weights": weights})], forward_only=True
    )
    assert after < loss


def test_running_generations_span_an_inflight_save_and_the_answer_names_the_versions(
    server: TinkerServer, client: Client
) -> None:
    made = client.create_model(8)
    sampler = made.sampler(0, "inflight")
    running = client.begin_sample(sampler, PROMPT, 1, params={"max_tokens": 1500, "seed": 5})
    wait_until(lambda: any(httpx.get(f"{url}/weight_version").json()["num_running"] for url in server.samplers()))
    samplers = server.pids("server-")
    assert len(samplers) == 2
    for pid in samplers:  # however long training takes, the generation is not over when the weights come
        os.kill(pid, signal.SIGSTOP)
    made.forward_backward([datum()])
    made.step(learning_rate=0.05)
    for pid in samplers:
        os.kill(pid, signal.SIGCONT)
    made.sampler(1, "inflight")
    (sequence,) = response_of(client.retrieve(running)).sequences
    spans = [(it.version, it.start, it.end) for it in sequence.version_spans]
    assert len(tokens_of(sequence)) == 1500
    assert spans[0][1] == 0 and spans[-1][2] == 1500
    assert [it[0] for it in spans] == sorted(it[0] for it in spans)
    assert len(spans) == 2
    found = client.http.get(f"/inflight/sequences/{running['sample_sequence_ids'][0]}").json()["version_spans"]
    assert [(it["version"], it["start"], it["end"]) for it in found] == spans


def test_calls_are_executed_by_number_and_repeated_ones_once(client: Client) -> None:
    made = client.create_model(8)
    second = made.begin_forward_backward([datum()], seq_id=2)
    first = made.begin_forward_backward([datum()], seq_id=1)
    again = made.begin_forward_backward([datum()], seq_id=1)
    assert again["request_id"] == first["request_id"]
    assert client.retrieve(first) == client.retrieve(again)
    client.retrieve(second)
    other = {"model_id": made.model_id, "seq_id": 2, "path": "x"}
    assert "seq_id 2 was used for another call" in client.post("/save_weights", other, 400)["detail"]


def test_the_snapshots_that_were_used_last_are_kept(server: TinkerServer, client: Client) -> None:
    made = client.create_model(8)
    first, *_, last = (made.sampler(number, "snapshot") for number in range(18))
    message = client.post("/asample", {"prompt": {"chunks": []}, "sampling_session_id": first}, 404)["detail"]
    assert "the snapshot was deleted" in message
    assert len(score(client, last, TOKENS)) == len(TOKENS) - 1
    kept = list((server.directory / "snapshots").iterdir())
    assert len(kept) == 16
    assert not any((path / "trainer").exists() for path in kept)  # the state of an optimizer


def test_samples_are_different_reproducible_and_end_as_asked(client: Client) -> None:
    sampler = client.sampler(0, base_model="tiny")
    several = client.sample(sampler, PROMPT, 0, num_samples=3, params={"seed": 7, "max_tokens": 12})
    again = client.sample(sampler, PROMPT, 1, num_samples=3, params={"seed": 7, "max_tokens": 12})
    found = [tokens_of(it) for it in several.sequences]
    assert found == [tokens_of(it) for it in again.sequences]
    assert len({tuple(it) for it in found}) == 3
    assert [it.stop_reason for it in several.sequences] == [1, 1, 1]
    stopped = client.sample(sampler, PROMPT, 2, params={"seed": 7, "max_tokens": 12, "stop": [found[0][4]]})
    (sequence,) = stopped.sequences
    end = found[0].index(found[0][4])
    assert (tokens_of(sequence), sequence.stop_reason) == (found[0][: end + 1], 0)
    repeated = client.begin_sample(sampler, PROMPT, 2, params={"seed": 7, "max_tokens": 12, "stop": [found[0][4]]})
    assert tokens_of(response_of(client.retrieve(repeated)).sequences[0]) == tokens_of(sequence)
    greedy = client.sample(sampler, PROMPT, 3, params={"top_k": 1, "max_tokens": 4})
    assert tokens_of(greedy.sequences[0]) == tokens_of(
        client.sample(sampler, PROMPT, 4, params={"temperature": 0, "max_tokens": 4}).sequences[0]
    )


def test_prompts_are_scored_with_alternatives_and_targets(client: Client, model: Path) -> None:
    sampler, length = client.sampler(0, base_model="tiny"), len(PROMPT)
    targets = np.full((length - 1, 2), -1)
    targets[:, 0] = PROMPT[1:]
    targets[3, 1] = 9
    response = client.sample(
        sampler,
        PROMPT,
        params={"max_tokens": 1},
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_logprobs_last_n=length,
        target_prompt_logprobs={"data": targets.ravel().tolist(), "dtype": "int64", "shape": list(targets.shape)},
    )
    expected = forward_logprobs(load_reference(model), PROMPT[:1], PROMPT[1:])
    assert_close(np.frombuffer(response.prompt_logprobs, "<f4")[1:].tolist(), expected)
    top = response.topk_prompt_logprobs
    assert (top.k, top.length) == (3, length)
    rows = np.frombuffer(top.logprobs, "<f4").reshape(length, 3)
    assert (rows[0] == -99999.0).all() and (np.diff(rows[1:], axis=1) <= 0).all()
    found = np.frombuffer(response.target_prompt_logprobs.dense, "<f4").reshape(targets.shape)
    assert_close(found[:, 0].tolist(), expected)
    assert (found[targets == -1] == 0.0).all() and found[3, 1] < 0
    last = client.sample(sampler, PROMPT, 1, params={"max_tokens": 1}, prompt_logprobs=True, prompt_logprobs_last_n=4)
    logprobs = np.frombuffer(last.prompt_logprobs, "<f4")
    assert np.isnan(logprobs[:-4]).all()
    assert_close(logprobs[-4:].tolist(), expected[-4:])


def test_two_models_are_trained_independently_and_a_third_is_refused(client: Client) -> None:
    one, other = client.create_model(8, 0), client.create_model(4, 1)
    (before,), _ = other.forward_backward([datum()], forward_only=True)
    for _ in range(2):
        one.forward_backward([datum()])
        one.step()
    (after,), _ = other.forward_backward([datum()], forward_only=True)
    np.testing.assert_array_equal(before, after)
    samplers = one.sampler(0, "inflight"), other.sampler(1, "inflight")
    (trained,), _ = one.forward_backward([datum()], forward_only=True)
    assert_close(score(client, samplers[0], TOKENS), trained.tolist(), 1e-4)
    assert_close(score(client, samplers[1], TOKENS), after.tolist(), 1e-4)
    body = {"session_id": client.session_id, "model_seq_id": 2, "base_model": "tiny"}
    error, category = client.failure(client.post("/create_model", body))
    assert "this server trains at most 2 at a time" in error and "--models" in error and category == "user"


def test_models_beyond_the_number_in_training_take_turns_and_learn_as_if_alone(
    server: TinkerServer, client: Client
) -> None:
    batches = [datum(), datum(tuple(range(100, 130)))]
    parked = server.directory / "parked"

    def learned(models: list[Model]) -> list[Any]:
        """Logprobs after two steps; between the calls of one model come those of the others."""
        for batch in batches:
            for call in (lambda it: it.begin_forward_backward([batch]), lambda it: it.begin_step()):  # noqa: B023
                for future in [call(it) for it in models]:
                    client.retrieve(future)
        found = [it.begin_forward_backward([datum()], forward_only=True) for it in models]
        return [output_of(client.retrieve(it))[0][0] for it in found]

    alone = client.create_model(8)
    (expected,) = learned([alone])
    client.retrieve(client.post("/unload_model", {"model_id": alone.model_id}))
    models = [client.create_model(8, number) for number in range(1, 4)]
    assert len(list(parked.iterdir())) == 1
    for logprobs in learned(models):
        np.testing.assert_array_equal(logprobs, expected)
    assert len(list(parked.iterdir())) == 1
    client.post(f"/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    assert not list(parked.iterdir())
    error, category = client.failure(models[0].begin_step())
    assert "has ended (its session has finished)" in error and category == "user"


def test_checkpoints_are_listed_loaded_and_deleted(client: Client) -> None:
    made = client.create_model(8)
    made.forward_backward([datum()])
    made.step()
    path = made.save("first", user_metadata={"a": 1})
    sampling = made.save("first", "save_weights_for_sampler")
    assert path == f"tinker://{made.model_id}/weights/first"
    error, category = client.failure(made.begin_save(path="first"))
    assert "exists; choose another name" in error and category == "user"
    error, _ = client.failure(made.begin_save(path="../evil"))
    assert "cannot be the name of a checkpoint" in error
    run = client.http.get(f"/training_runs/{made.model_id}").json()
    assert (run["is_lora"], run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (True, 8, path)
    listed = client.http.get(f"/training_runs/{made.model_id}/checkpoints").json()["checkpoints"]
    assert {(it["tinker_path"], it["checkpoint_type"]) for it in listed} == {(path, "training"), (sampling, "sampler")}
    assert all(it["size_bytes"] > 1000 for it in listed)
    info = client.post("/weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"]) == ("tiny", 8)
    (expected,), _ = made.forward_backward([datum()], forward_only=True)
    loaded = client.load_model(path, 1)
    (found,), _ = loaded.forward_backward([datum()], forward_only=True)
    np.testing.assert_array_equal(found, expected)
    for of in (made, loaded):  # with the optimizer's state both continue alike
        of.forward_backward([datum()])
        of.step()
    results = [of.forward_backward([datum()], forward_only=True)[0][0] for of in (made, loaded)]
    np.testing.assert_array_equal(*results)
    assert client.http.delete(f"/training_runs/{made.model_id}/checkpoints/weights/first").status_code == 204
    gone = client.http.delete(f"/training_runs/{made.model_id}/checkpoints/weights/first")
    assert gone.status_code == 404 and "there is no checkpoint" in gone.json()["detail"]
    bare = client.http.delete(f"/training_runs/{made.model_id}/checkpoints/first")
    assert bare.status_code == 400 and "weights/NAME or sampler_weights/NAME" in bare.json()["detail"]
    assert client.http.put(
        f"/training_runs/{made.model_id}/checkpoints/sampler_weights/first/ttl", json={"ttl_seconds": 60}
    ).json()
    kept = client.http.get("/checkpoints", params={"limit": 1}).json()
    assert kept["cursor"]["limit"] == 1 and len(kept["checkpoints"]) == 1


def test_an_unloaded_model_leaves_its_place_to_another(client: Client) -> None:
    one, other = client.create_model(8, 0), client.create_model(8, 1)
    waiting = one.begin_forward_backward([datum()], seq_id=2)
    made = client.retrieve(client.post("/unload_model", {"model_id": one.model_id, "type": "unload_model"}))
    assert (made["type"], made["model_id"]) == ("unload_model", one.model_id)
    for future in (one.begin_forward_backward([datum()], seq_id=1), waiting):
        error, category = client.failure(future)
        assert "has ended (it was unloaded); its state was never saved" in error and category == "user"
    client.create_model(8, 2).forward_backward([datum()])
    other.forward_backward([datum()])
    assert other.step()["gradient_norm"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/create_model", {"session_id": "none", "model_seq_id": 0, "base_model": "tiny"}, 404, "there is no session"),
        ("/create_model", {"model_seq_id": 0}, 422, "session_id"),
        (
            "/asample",
            {"prompt": {"chunks": []}, "sampling_session_id": "none"},
            404,
            "sampling session 'none' does not exist",
        ),
        ("/weights_info", {"tinker_path": "tinker://a/b/c"}, 400, "is not the path of a checkpoint"),
        ("/weights_info", {"tinker_path": "tinker://a/weights/c"}, 404, "there is no checkpoint"),
        ("/unload_model", {"model_id": "none"}, 404, "there is no model"),
        ("/retrieve_future", {"request_id": "none"}, 410, "there is no future"),
        ("/forward", {}, 404, "POST /api/v1/forward"),
        ("/copy_weights", {}, 400, "this server has no projects"),
    ],
)
def test_requests_that_name_nothing_are_refused(
    client: Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    assert message in client.post(path, body, status)["detail"]


def test_another_base_model_is_refused_by_the_name_that_is_served(client: Client) -> None:
    body = {"session_id": client.session_id, "model_seq_id": 0, "base_model": "other"}
    assert "request 'tiny'" in client.post("/create_model", body, 400)["detail"]


def test_data_that_no_loss_can_use_fail_and_training_continues(client: Client) -> None:
    made = client.create_model(8)
    for loss_fn, inputs, message in (
        ("stable_reinforce", {"weights": np.ones(19)}, "has no published formula"),
        ("ppo", {"logprobs": np.ones(19)}, "needs advantages"),
        ("ppo", {"logprobs": np.ones(19), "advantages": np.ones(19), "mask": np.ones(19)}, "does not use mask"),
    ):
        error, category = client.failure(made.begin_forward_backward([datum(**inputs)], loss_fn))
        assert message in error and category == "user"
    for begun, message in (
        (made.begin_step(learning_rate=None), "learning_rate"),
        (made.begin_save("save_weights_external", path="x"), "is not supported"),
    ):
        error, category = client.failure(begun)
        assert message in error and category == "user"
    made.forward_backward([datum()])
    assert made.step()["gradient_norm"] > 0


def test_a_session_lists_its_samplers_and_numbers_their_further_clients(client: Client) -> None:
    sampler = client.sampler(0, base_model="tiny")
    assert client.http.get("/sessions", params={"limit": 1}).json()["sessions"] == [client.session_id]
    assert client.http.get(f"/sessions/{client.session_id}").json()["sampler_ids"] == [sampler]
    joined = [client.post("/join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
    assert [it["client_counter"] for it in joined] == [1, 2]


def test_numbers_that_no_call_can_use_are_refused_and_training_continues(client: Client) -> None:
    made = client.create_model(8)
    far = {"model_id": made.model_id, "seq_id": 2**62, "path": "x"}
    assert "the next call of this model is 1" in client.post("/save_weights", far, 400)["detail"]
    for params, name in (({"eps": 0.0}, "eps"), ({"learning_rate": -1.0}, "learning_rate"), ({"beta1": 1.0}, "beta1")):
        error, category = client.failure(made.begin_step(**params))
        assert name in error and category == "user", error
    for seconds in (0, 10**15, 10**400):
        error, category = client.failure(made.begin_save(path="x", ttl_seconds=seconds))
        assert "ttl_seconds must be from 1 to" in error and category == "user"
    content = b'{"model_id": "%s", "seq_id": 99, "path": "x", "user_metadata": {"a": NaN}}' % made.model_id.encode()
    assert client.http.post("/save_weights", content=content).status_code == 422
    sampler = client.sampler(0, base_model="tiny")
    targets = {"data": [], "shape": [len(PROMPT) - 1, 10**11], "sparse_crow_indices": [0] * len(PROMPT)}
    for number, fields in enumerate(
        ({"target_prompt_logprobs": targets}, {"params": {"seed": 10**26}}, {"params": {"stop": [-1]}})
    ):
        error, category = client.failure(client.begin_sample(sampler, PROMPT, number, **fields))
        assert "pydantic" not in error and category == "user", error
    made.forward_backward([datum()])
    assert made.step()["gradient_norm"] > 0


@pytest.mark.parametrize("key", [None, "tml-wrong", KEY[:-1]])
def test_every_route_needs_the_key(server: TinkerServer, key: str | None) -> None:
    headers = {} if key is None else {"X-API-Key": key}
    for method, path in (("POST", "/create_session"), ("GET", "/training_runs"), ("POST", "/forward_backward")):
        answer = httpx.request(method, f"{server.url}/api/v1{path}", headers=headers)
        assert answer.status_code == 401 and "X-API-Key" in answer.json()["detail"]
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}


# ---------------------------------------------------------------------------------------------------------------
# Processes that end


@pytest.fixture
def own_server(model: Path, tmp_path: Path) -> Iterator[TinkerServer]:
    server = TinkerServer(model, tmp_path / "served")
    yield server
    server.end()


def trained(client: Client) -> tuple[Model, str]:
    made = client.create_model(8)
    made.forward_backward([datum()])
    made.step()
    return made, made.save("state")


def test_a_model_that_cannot_be_loaded_leaves_no_ranks(own_server: TinkerServer) -> None:
    client = Client(own_server)
    _, path = trained(client)
    client.post(f"/sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    wait_until(lambda: not own_server.pids("trainer"))
    (weights,) = (own_server.directory / "checkpoints").rglob("adapter_model.safetensors")
    weights.write_bytes(b"broken")
    other = Client(own_server)
    body = {"session_id": other.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    error, _ = other.failure(other.post("/load_weights", body))
    assert "nothing was loaded from" in error
    wait_until(lambda: not own_server.pids("trainer"))
    other.create_model(8, 1)


def test_a_rank_that_dies_fails_its_calls_and_names_the_last_saved_state(own_server: TinkerServer) -> None:
    client = Client(own_server)
    made, path = trained(client)
    (rank,) = own_server.pids("trainer")
    os.kill(rank, signal.SIGKILL)
    error, category = client.failure(made.begin_forward_backward([datum()]))
    assert path in error and category == "server"
    error, _ = client.failure(made.begin_step())
    assert path in error
    again = client.load_model(path, 1)
    again.forward_backward([datum()])
    assert again.step()["gradient_norm"] > 0


def test_a_server_that_dies_is_restarted_and_samples_continue(own_server: TinkerServer) -> None:
    client = Client(own_server)
    made, _ = trained(client)
    sampler = made.sampler(0, "inflight")
    expected = score(client, sampler, TOKENS)
    (pid,) = own_server.pids("server-")
    os.kill(pid, signal.SIGKILL)
    assert_close(score(client, sampler, TOKENS), expected, 1e-5)
    assert "was restarted" in own_server.log()


def test_checkpoints_survive_a_killed_server_and_futures_are_gone(own_server: TinkerServer) -> None:
    client = Client(own_server)
    made, path = trained(client)
    (expected,), _ = made.forward_backward([datum()], forward_only=True)
    future = made.begin_forward_backward([datum()])
    own_server.kill()
    wait_until(lambda: not own_server.pids("trainer") and not own_server.pids("server-"))
    restarted = TinkerServer(own_server.model, own_server.directory)
    try:
        client.http.base_url = f"{restarted.url}/api/v1"
        assert client.post("/retrieve_future", {"request_id": future["request_id"]}, 410)
        assert "after a restart" in client.post("/get_info", {"model_id": made.model_id}, 404)["detail"]
        runs = client.http.get("/training_runs").json()["training_runs"]
        assert [run["last_checkpoint"]["tinker_path"] for run in runs] == [path]
        other = Client(restarted)
        loaded = other.load_model(path, 0)
        (found,), _ = loaded.forward_backward([datum()], forward_only=True)
        np.testing.assert_array_equal(found, expected)
    finally:
        restarted.end()


def test_stored_weights_reach_samplers_by_the_transport_that_is_configured(model: Path, tmp_path: Path) -> None:
    shared = ("--updates.transport", "file", "--updates.directory", str(tmp_path / "weights"))
    server = TinkerServer(model, tmp_path / "served", *shared, "--samplers", "2")
    try:
        client = Client(server)
        made, _ = trained(client)
        (newest,), _ = made.forward_backward([datum()], forward_only=True)
        moving = made.sampler(0, "inflight")
        named = client.sampler(1, model_path=made.save("kept", "save_weights_for_sampler"))
        for sampler in (moving, named, moving):
            assert_close(score(client, sampler, TOKENS), newest.tolist(), 1e-4)
        paths = [made.save(f"kept-{i}", "save_weights_for_sampler") for i in range(4)]
        stored = [client.sampler(2 + i, model_path=path) for i, path in enumerate(paths)]
        asked = [client.begin_sample(sampler, TOKENS, params={"max_tokens": 1}) for sampler in stored]
        for future in asked:  # two servers switch at the same time
            assert len(response_of(client.retrieve(future)).sequences) == 1
    finally:
        server.end()


def test_a_directory_has_one_server(own_server: TinkerServer) -> None:
    with pytest.raises(AssertionError, match="another server uses the directory"):
        TinkerServer(own_server.model, own_server.directory)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_client_that_waits_costs_no_processor_time(client: Client, server: TinkerServer) -> None:
    made = client.create_model()
    waiting = made.begin_forward_backward([((1, 2), {"target_tokens": (2, 3), "weights": (1.0, 1.0)})], seq_id=2)
    before, started = cpu_seconds(server.pid), time.monotonic()
    with pytest.raises(httpx.ReadTimeout):  # the call before it never comes
        client.http.post("/retrieve_future", json={"request_id": waiting["request_id"]}, timeout=IDLE_S)
    spent, waited = cpu_seconds(server.pid) - before, time.monotonic() - started
    assert waited > 0.9 * IDLE_S
    assert spent < 0.02 * waited
