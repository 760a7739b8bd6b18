"""The real SDK where answers are lost, and where the parts of a call arrive in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.dialects.tinker.lossy import lossy_proxy
from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
from tinker.proto import tinker_public_pb2  # noqa: E402
from tinker.types import SamplingParams  # noqa: E402

from tests.dialects.tinker.sdk import (  # noqa: E402
    ADAM,
    DEPRECATED,
    PROMPT,
    datum,
    forward,
    logprobs_of,
    new_model,
    prompt_of,
    scores,
    train,
)

ROUTES = (
    "/create_session",
    "/create_model",
    "/get_info",
    "/forward_backward",
    "/optim_step",
    "/save_weights",
    "/save_weights_for_sampler",
    "/load_weights",
    "/create_sampling_session",
    "/asample",
    "/retrieve_future",
    "/finish",
)
"""All that the SDK calls in `session`, but for its settings and for heartbeats, which it does not repeat at once."""


def session(service: tinker.ServiceClient, server: TinkerServer) -> dict[str, Any]:
    """Call every route that changes something; return what came of it."""
    client = new_model(service, server)
    losses = train(client, 3)
    path = client.save_state("state").result(60).path
    saved = client.save_weights_for_sampler("state").result(60).path
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result(60)
    named = service.create_sampling_client(saved).result(60)
    loaded = service.create_training_client_from_state_with_optimizer(path).result(60)
    further = train(loaded, 2)
    samples = [
        it.sample(prompt_of(PROMPT), 2, SamplingParams(max_tokens=8, seed=i, stop=[])).result(60).sequences
        for i, it in enumerate((inflight, named, inflight))
    ]
    return {
        "losses": losses + further,
        "logprobs": [forward(client), forward(loaded), scores(inflight), scores(named)],
        "samples": [it.tokens for of_call in samples for it in of_call],
    }


def test_calls_whose_answers_are_lost_are_executed_once(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    expected = session(service, sdk_server)
    service.close("success").result(60)
    with lossy_proxy(sdk_server.url, loses=lambda path: path.endswith(ROUTES)) as (url, proxy):
        with tinker.ServiceClient(base_url=url, api_key=KEY) as other:
            found = session(other, sdk_server)
        assert {path.rpartition("/")[2] for path in proxy.lost} == {it.removeprefix("/") for it in ROUTES}
        for path in proxy.lost:
            assert sum(asked == path for asked, _ in proxy.requests) > 1, path
    assert found["losses"] == expected["losses"]
    assert found["samples"] == expected["samples"]
    for one, other_one in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_array_equal(one, other_one)


@DEPRECATED
def test_parts_of_a_call_are_executed_in_order_though_the_first_arrives_last(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    data = [datum(tuple(range(first, first + 8 + first % 5))) for first in range(0, 220, 10)]
    client = new_model(service, sdk_server, seed=4)
    whole = client.forward_backward(data, "cross_entropy").result(60)
    client.optim_step(ADAM).result(60)
    trained = forward(client, data)
    settings = {"parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 5}
    with (
        lossy_proxy(sdk_server.url, settings=settings) as (url, proxy),
        tinker.ServiceClient(base_url=url, api_key=KEY) as other,
    ):
        client = new_model(other, sdk_server, seed=4)
        backward = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(ADAM)
        parts = backward.result(60)
        assert step.result(60).metrics["gradient_norm"] > 0
        numbers = []
        for path, body in proxy.requests:
            if path.endswith("/forward_backward"):
                request = tinker_public_pb2.ForwardBackwardRequest.FromString(body)
                numbers.append((request.seq_id, len(request.data)))
        assert sorted(numbers) == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 2)]
        assert numbers[-1] == (1, 5)
        assert parts.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
        for found, expected in zip(logprobs_of(parts), logprobs_of(whole), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_allclose(forward(client, data), trained, atol=2e-4)
