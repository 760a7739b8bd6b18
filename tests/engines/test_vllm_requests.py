"""What vLLM is asked and how its answers are read. No engine: tests/real_engines has that."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.contracts import EngineOptions
from inflight.engines.requests import SentRequest
from inflight.errors import InvalidRequestError, NonFiniteError, ProtocolError, UnsupportedError
from inflight.wire import Capabilities, GenerateRequest, InFlightPolicy, SamplingParams, VersionSpan
from inflight_vllm import KIND, flags
from inflight_vllm.requests import bodies_of, check_request, choices_of, ids_of, response_of, version_labels_of

CAN = Capabilities(
    engine="vllm",
    engine_version="0",
    model="m",
    vocab_size=100,
    max_model_len=50,
    dtype="float32",
    in_flight_policies=tuple(InFlightPolicy),
    transports=("gloo",),
    version_binding="spans",
    logprob_kind="processed",
    num_ranks=1,
    max_concurrent_sequences=4,
    streaming=False,
    chat=False,
    manifest_digest=None,
)
SETTINGS: dict[str, Any] = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "weight_transfer_config": {"backend": "inflight"},
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
}


def request(num_prompt: int = 4, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="a", prompt_token_ids=tuple(range(num_prompt)), sampling=SamplingParams(**sampling)
    )


def asked(cache_keys: Mapping[int, str]) -> dict[int, SentRequest]:
    return {index: SentRequest(f"name/{index}.", key) for index, key in cache_keys.items()}


def choice(token_ids: list[int], index: int = 0, **changes: Any) -> dict[str, Any]:
    """One completion of vLLM's answer, as version 3 sampled it."""
    found = {
        "index": index,
        "token_ids": token_ids,
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5 - i} for i in range(len(token_ids))]},
        "weight_versions": [{"version": "3@run", "start": 0, "end": len(token_ids)}],
    }
    return found | changes


def test_more_completions_than_run_at_a_time_are_asked_for_in_several_requests_with_seeds_that_go_on() -> None:
    bodies = bodies_of(request(n=10, max_tokens=5, seed=7), CAN, asked(dict.fromkeys(range(10), "key")))
    params = [body["sampling_params"] for body in bodies]
    assert [p["n"] for p in params] == [4, 4, 2]
    assert [p["seed"] - params[0]["seed"] for p in params] == [0, 4, 8]
    assert [body["request_id"] for body in bodies] == ["name/0.", "name/4.", "name/8."]
    assert set(ids_of(["name/4.", "name/5."])) == {"generate-tokens-name/4.", "generate-tokens-name/5."}


def test_neighbouring_seeds_share_no_completion() -> None:
    (one,), (other,) = (bodies_of(request(n=4, seed=seed), CAN, asked(dict.fromkeys(range(4), ""))) for seed in (1, 2))
    assert abs(one["sampling_params"]["seed"] - other["sampling_params"]["seed"]) > 4


def test_without_max_tokens_the_rest_of_the_context_is_asked_for() -> None:
    (body,) = bodies_of(request(num_prompt=30), CAN, asked({0: ""}))
    assert body["sampling_params"]["max_tokens"] == 20


@pytest.mark.parametrize(
    ("num_prompt", "sampling", "says"),
    [
        (50, {}, "exceed max_model_len 50"),
        (4, {"max_tokens": 47}, "4 prompt tokens and max_tokens 47 exceed max_model_len 50"),
    ],
)
def test_what_does_not_fit_is_refused(num_prompt: int, sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        check_request(request(num_prompt, **sampling), CAN)


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token id 3 is outside the vocabulary of 3 tokens"):
        check_request(request(), CAN.model_copy(update={"vocab_size": 3}))


def test_filters_in_an_order_that_is_not_the_contracts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"min_p 0\.1 together with top_p 0\.9"):
        check_request(request(min_p=0.1, top_p=0.9), CAN)


def test_a_seed_is_refused_where_it_would_end_the_server() -> None:
    check_request(request(seed=1), CAN)
    with pytest.raises(UnsupportedError, match=r"seed 1: .*--no-enable-chunked-prefill"):
        check_request(request(seed=1), CAN.model_copy(update={"seeds": False}))


@pytest.mark.parametrize(("device", "chunked", "honours"), [("cpu", True, False), ("cpu", False, True)])
def test_seeds_are_declared_on_a_cpu_where_prompts_are_not_split(device: str, chunked: bool, honours: bool) -> None:
    config = {"device_config": {"device": device}, "scheduler_config": {"enable_chunked_prefill": chunked}}
    assert flags.honours_seeds(config) is honours
    assert flags.honours_seeds(config | {"device_config": {"device": "cuda"}})


def test_answers_of_several_requests_become_one_in_the_order_of_their_completions() -> None:
    answers = [{"choices": [choice([2], 1), choice([1], 0)]}, {"choices": [choice([3, 4], 0)]}]
    response = response_of(request(n=3), choices_of(answers))
    assert [completion.token_ids for completion in response.completions] == [(1,), (2,), (3, 4)]
    assert [completion.index for completion in response.completions] == [0, 1, 2]
    assert response.completions[2].version_spans == (VersionSpan(version=3, start=0, end=2),)


def test_a_completion_that_vllm_was_not_asked_for_is_aborted_without_a_token() -> None:
    first, second = response_of(request(n=2), [choice([1]), None]).completions
    assert (first.index, first.token_ids) == (0, (1,))
    assert (second.index, second.token_ids, second.version_spans, second.finish_reason) == (1, (), (), "abort")


def test_logprobs_that_are_not_finite_are_told_as_broken_weights() -> None:
    broken = choice([1], logprobs={"content": [{"logprob": -9999.0}]})
    with pytest.raises(NonFiniteError, match="served weights are broken"):
        response_of(request(), [broken])


@pytest.mark.parametrize("missing", ["token_ids", "weight_versions", "finish_reason"])
def test_an_answer_that_lacks_something_is_a_protocol_error(missing: str) -> None:
    answer = {key: value for key, value in choice([1]).items() if key != missing}
    with pytest.raises(ProtocolError, match=missing):
        response_of(request(), [answer])


@pytest.mark.parametrize("answer", [{}, {"choices": None}, {"choices": [{}]}, None])
def test_an_answer_without_completions_is_a_protocol_error(answer: Any) -> None:
    with pytest.raises(ProtocolError):
        choices_of([answer])


def test_completions_that_are_asked_for_again_have_keys_of_their_own_and_the_seeds_that_they_had() -> None:
    wanted = request(n=10, seed=7, max_tokens=5)
    together = bodies_of(wanted, CAN, asked(dict.fromkeys(range(10), "3@run")))
    one, other = bodies_of(wanted, CAN, asked({6: "one", 7: "other"}))
    assert one["sampling_params"]["seed"] == together[1]["sampling_params"]["seed"] + 2
    assert one["sampling_params"]["n"] == other["sampling_params"]["n"] == 1
    salts = {body["cache_salt"] for body in (*together, one, other)}
    assert len(salts) == 3
    assert not any(set(salt) & {"@", "/"} for salt in salts)
    assert version_labels_of(choice([1])) == [{"version": "3@run", "start": 0, "end": 1}]


def test_a_server_is_started_as_it_must_be_and_on_a_cpu_without_a_process_that_spins() -> None:
    command = KIND.command(EngineOptions(model=Path("M"), device="cpu", max_concurrent=8), "127.0.0.1", 7000)
    assert {"--enable-scale-out", "processed_logprobs", "--enforce-eager", "--no-enable-chunked-prefill"} < set(command)
    assert command[command.index("--distributed-executor-backend") + 1] == "uni"
    several = EngineOptions(model=Path("M"), device="cpu", arguments=("--tensor-parallel-size=2",))
    assert "--distributed-executor-backend" not in KIND.command(several, "127.0.0.1", 7000)
    environment = KIND.environment(EngineOptions(model=Path("M"), device="cpu", threads=1))
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_missing_route_is_told_from_a_missing_mode() -> None:
    every = dict.fromkeys(flags.NEEDED_ROUTES)
    older = {route: None for route in every if route != "/shutdown_weight_transfer_engine"}
    assert flags.missing_routes(every) is None
    assert not flags.is_without_dev_mode(older)
    assert "/shutdown_weight_transfer_engine': this release" in str(flags.missing_routes(older))
    without = {"/inference/v1/generate": None, "/v1/models": None}
    assert flags.is_without_dev_mode(without)
    assert "VLLM_SERVER_DEV_MODE=1" in str(flags.missing_routes(without))
    assert not flags.can_abort(every), "it is not needed for attaching"
    assert flags.can_abort({**every, "/abort_requests": None})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode is raw_logprobs"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "names the backend 'nccl'"),
        ({"weight_transfer_config": None}, "names the backend None"),
    ],
)
def test_a_server_with_another_setting_is_refused_with_the_command_that_starts_it(
    change: dict[str, Any], says: str
) -> None:
    assert flags.wrong_settings(SETTINGS) is None
    assert says in str(flags.wrong_settings(SETTINGS | change))
    command = shlex.split(flags.restart_command("http://h:7000", "M"))
    assert command[0] == "VLLM_SERVER_DEV_MODE=1"
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "inflight"}
