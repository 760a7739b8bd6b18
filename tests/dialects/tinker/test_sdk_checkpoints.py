"""Saved states, sessions and the `RestClient` of the real SDK."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
from tinker import types  # noqa: E402

from tests.dialects.tinker.sdk import (  # noqa: E402
    DEPRECATED,
    forward,
    new_model,
    refused,
    train,
)

pytestmark = DEPRECATED


def continued(client: tinker.TrainingClient) -> np.ndarray[Any, Any]:
    """Logprobs after one more step, which depend on the state of the optimizer."""
    train(client)
    return forward(client)


def test_a_model_from_a_state_continues_with_its_optimizer_or_a_fresh_one(
    service: tinker.ServiceClient, sdk_server: TinkerServer, rest: tinker.RestClient
) -> None:
    client = new_model(service, sdk_server)
    train(client, 2)
    path = client.save_state("state", user_metadata={"step": "2"}).result(60).path
    saved, further = forward(client), continued(client)

    with_optimizer = [
        service.create_training_client_from_state_with_optimizer(path, user_metadata={"of": "state"}).result(60),
        asyncio.run(service.create_training_client_from_state_with_optimizer_async(path)),
    ]
    for loaded in with_optimizer:
        np.testing.assert_array_equal(forward(loaded), saved)
        np.testing.assert_array_equal(continued(loaded), further)
    assert with_optimizer[0].get_info().lora_rank == 8
    described = rest.get_training_run(with_optimizer[0].model_id).result()
    assert (described.lora_rank, described.user_metadata) == (8, {"of": "state"})
    sampling = client.save_weights_for_sampler("state").result(60).path
    for refuse, message in (
        (
            lambda: service.create_training_client_from_state(path, base_model="other"),
            "does not serve the base model 'other'",
        ),
        (
            lambda: service.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()),
            "optimizer 'dimuon' is not supported",
        ),
        (lambda: service.create_training_client_from_state_with_optimizer(sampling), "it has no optimizer state"),
    ):
        with refused(message):
            refuse().result(60)
    service.close("success").result(60)

    fresh = []
    with tinker.ServiceClient(base_url=sdk_server.url, api_key=KEY) as other:
        for loaded in (
            other.create_training_client_from_state(path).result(60),
            asyncio.run(other.create_training_client_from_state_async(path)),
        ):
            np.testing.assert_array_equal(forward(loaded), saved)
            fresh.append(continued(loaded))
    np.testing.assert_array_equal(*fresh)
    assert np.abs(fresh[0] - further).max() > 1e-4


def test_load_state_works_as_the_first_call_of_a_model(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    train(client, 2)
    path = client.save_state("state").result(60).path
    saved, further = forward(client), continued(client)
    for name in ("load_state", "load_state_with_optimizer"):
        loaded = [new_model(service, sdk_server, seed=5) for _ in range(2)]
        getattr(loaded[0], name)(path).result(60)
        asyncio.run(getattr(loaded[1], f"{name}_async")(path)).result(60)
        after = []
        for it in loaded:
            np.testing.assert_array_equal(forward(it), saved)
            after.append(continued(it))
        np.testing.assert_array_equal(*after)
        assert np.array_equal(after[0], further) == (name == "load_state_with_optimizer")
        with refused("LoadWeights is not permitted with seq_id 6: load_state must be the first call of a model"):
            loaded[0].load_state(path).result(60)
        service.close("success").result(60)
        service = tinker.ServiceClient(base_url=sdk_server.url, api_key=KEY)
    service.close("success").result(60)


def test_states_that_do_not_fit_a_model_are_refused(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    path = client.save_state("state").result(60).path
    sampling = client.save_weights_for_sampler("state").result(60).path
    for call, given, message in (
        ("load_state", path, "has the LoRA rank 8, but the model has 4"),
        ("load_state_with_optimizer", sampling, "it has no optimizer state"),
    ):
        other = new_model(service, sdk_server, rank=4)
        with refused(message):
            getattr(other, call)(given).result(60)
        assert train(other)
    assert train(client)


def test_checkpoints_are_listed_overwritten_and_deleted(
    service: tinker.ServiceClient, sdk_server: TinkerServer, rest: tinker.RestClient
) -> None:
    made = service.create_lora_training_client(str(sdk_server.model), rank=4, user_metadata={"run": "one"})
    client = made.result(60)
    train(client)
    path = client.save_state("one", user_metadata={"step": "1"}).result(60).path
    train(client)
    sampling = client.save_weights_for_sampler("one", user_metadata={"kind": "s"}).result(60).path

    for listed in (rest.list_checkpoints(client.model_id).result(), run(rest.list_checkpoints_async(client.model_id))):
        found = {it.tinker_path: it for it in listed.checkpoints}
        assert {key: it.checkpoint_type for key, it in found.items()} == {path: "training", sampling: "sampler"}
        assert found[path].user_metadata == {"step": "1"} and found[sampling].user_metadata == {"kind": "s"}
        assert all(it.size_bytes and not it.public and it.expires_at is None for it in found.values())
    for of_all in (rest.list_user_checkpoints(limit=2).result(), run(rest.list_user_checkpoints_async(limit=2))):
        assert [it.tinker_path for it in of_all.checkpoints] == [sampling, path]  # newest first
        assert of_all.cursor is not None and of_all.cursor.total_count >= 2
    for described in (
        rest.get_training_run(client.model_id).result(),
        run(rest.get_training_run_async(client.model_id)),
        rest.get_training_run_by_tinker_path(path).result(),
        run(rest.get_training_run_by_tinker_path_async(sampling)),
    ):
        assert (described.training_run_id, described.base_model) == (client.model_id, str(sdk_server.model))
        assert (described.is_lora, described.lora_rank, described.user_metadata) == (True, 4, {"run": "one"})
        assert described.last_checkpoint is not None and described.last_checkpoint.tinker_path == path
        assert described.last_sampler_checkpoint is not None
    for runs in (rest.list_training_runs(limit=1).result(), run(rest.list_training_runs_async(limit=1))):
        assert [it.training_run_id for it in runs.training_runs] == [client.model_id]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (str(sdk_server.model), True, 4)

    with refused("exists; choose another name, or overwrite it"):
        client.save_state("one").result(60)
    trained = forward(client)
    assert client.save_state("one", overwrite=True).result(60).path == path
    checkpoints = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [it.user_metadata for it in checkpoints if it.tinker_path == path] == [None]
    loaded = service.create_training_client_from_state(path).result(60)
    np.testing.assert_array_equal(forward(loaded), trained)

    two, three, four = (client.save_state(name).result(60).path for name in ("two", "three", "four"))
    rest.delete_checkpoint(client.model_id, "weights/one").result()
    run(rest.delete_checkpoint_async(client.model_id, "weights/two"))
    rest.delete_checkpoint_from_tinker_path(three).result()
    run(rest.delete_checkpoint_from_tinker_path_async(four))
    assert [it.tinker_path for it in rest.list_checkpoints(client.model_id).result().checkpoints] == [sampling]
    for gone in (path, two):
        with refused("there is no checkpoint"):
            service.create_training_client_from_state(gone).result(60)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="weights/NAME or sampler_weights/NAME"):
        rest.delete_checkpoint(client.model_id, "one").result()
    with refused("there is no training run"):
        rest.get_training_run("none").result()


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_checkpoints_expire(service: tinker.ServiceClient, sdk_server: TinkerServer, rest: tinker.RestClient) -> None:
    client = new_model(service, sdk_server)

    def expiries() -> dict[str, float | None]:
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        return {it.tinker_path: it.expires_at and it.expires_at.timestamp() - time.time() for it in listed}

    kept = client.save_state("kept", ttl_seconds=3600).result(60).path
    sampling = client.save_weights_for_sampler("kept", ttl_seconds=7200).result(60).path
    assert expiries() == pytest.approx({kept: 3600, sampling: 7200}, abs=60)
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    run(rest.set_checkpoint_ttl_from_tinker_path_async(sampling, 86400))
    assert expiries()[kept] is None and expiries()[sampling] == pytest.approx(86400, abs=60)
    rest.set_checkpoint_ttl_from_tinker_path(kept, 1).result()
    time.sleep(1.1)
    assert list(expiries()) == [sampling]
    with refused("there is no checkpoint"):
        service.create_training_client_from_state(kept).result(60)
    assert client.save_state("kept").result(60).path == kept  # its name is free


def test_sessions_and_samplers_are_described(
    service: tinker.ServiceClient, sdk_server: TinkerServer, rest: tinker.RestClient
) -> None:
    client = new_model(service, sdk_server)
    path = client.save_weights_for_sampler("kept").result(60).path
    client.create_sampling_client(path).result(60)
    session_id = service.holder.get_session_id()
    for found in (rest.get_session(session_id).result(), run(rest.get_session_async(session_id))):
        assert found.training_run_ids == [client.model_id] and len(found.sampler_ids) == 1
        assert (found.user_metadata, found.display_name) == ({"purpose": "tests"}, "A test")
    (sampler_id,) = found.sampler_ids
    for sampler in (rest.get_sampler(sampler_id).result(), run(rest.get_sampler_async(sampler_id))):
        assert (sampler.base_model, sampler.model_path) == (str(sdk_server.model), path)
    for listed in (rest.list_sessions(limit=1).result(), run(rest.list_sessions_async(limit=1))):
        assert listed.sessions == [session_id]
    with refused("there is no session 'none'"):
        rest.get_session("none").result()


def test_a_closed_session_ends_its_models(sdk_server: TinkerServer) -> None:
    service = tinker.ServiceClient(base_url=sdk_server.url, api_key=KEY)
    client = new_model(service, sdk_server)
    train(client)
    path = client.save_state("state").result(60).path
    service.close("interrupted", "by a test").result(60)
    with pytest.raises(RuntimeError, match="closed"):
        service.create_sampling_client(base_model=str(sdk_server.model))
    with tinker.ServiceClient(base_url=sdk_server.url, api_key=KEY) as other:
        models = [other.create_training_client_from_state(path) for _ in range(3)]  # as many as there is room for
        assert all(train(it.result(60)) for it in models)


def test_the_server_names_its_model(
    service: tinker.ServiceClient, sdk_server: TinkerServer, rest: tinker.RestClient
) -> None:
    made = service.create_rest_client()
    for found in (
        rest.get_server_capabilities().result(),
        made.get_server_capabilities().result(),
        service.get_server_capabilities(),
        run(service.get_server_capabilities_async()),
    ):
        (model,) = found.supported_models
        assert (model.model_name, model.max_context_length) == (str(sdk_server.model), 1024)
        assert model.trainable and model.sampleable
    assert made.get_telemetry() is None


DAY = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
PATH = "tinker://run/weights/name"
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("publish_checkpoint_from_tinker_path", (PATH,), "no accounts"),
    ("unpublish_checkpoint_from_tinker_path", (PATH,), "no accounts"),
    ("get_external_weights_urls", ("tinker://run/external_weights/name",), "stores no weights elsewhere"),
    ("copy_weights", (PATH, "project"), "no projects"),
    ("assign_session_project", ("session", "project"), "no projects"),
    ("export_session_trace", ("session",), "records no traces"),
    ("get_audit_log", (), "no audit log"),
    ("get_billing_usage", DAY, "no billing"),
    ("get_current_checkpoint_storage_usage", (), "checkpoints list their sizes"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED, ids=[it[0] for it in REFUSED])
def test_what_needs_accounts_or_projects_is_refused(
    rest: tinker.RestClient, name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with refused(message):
        getattr(rest, name)(*arguments).result(60)
    with refused(message):
        run(getattr(rest, f"{name}_async")(*arguments))


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_other_calls_of_accounts_are_refused(sdk_server: TinkerServer, rest: tinker.RestClient) -> None:
    with refused("list them instead"):
        rest.search_sessions(types.SessionSearchRequest(display_name="A test")).result(60)
    with refused("no projects"):
        tinker.ServiceClient(project_id="project", base_url=sdk_server.url, api_key=KEY).copy_weights(PATH).result(60)
    with pytest.raises(RuntimeError, match="requires JWT auth, but the server has it disabled"):
        rest.whoami().result(60)


def test_a_wrong_key_is_refused(sdk_server: TinkerServer) -> None:
    with refused("it must be tml- and the server's token"):
        tinker.RestClient(base_url=sdk_server.url, api_key="tml-wrong").get_server_capabilities().result(60)
