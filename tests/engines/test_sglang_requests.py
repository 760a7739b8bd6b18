"""What SGLang is asked and how its answers are read. No engine: `sglang_server` starts one for the kit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.contracts import EngineOptions
from inflight.engines.requests import SentRequest
from inflight.errors import ConfigError, InvalidRequestError, NonFiniteError, ProtocolError, UnsupportedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import GenerateRequest, Manifest, SamplingParams, TensorSpec, VersionSpan, WeightUpdate
from inflight_sglang import KIND, flags
from inflight_sglang.requests import (
    RequestLimits,
    body_of,
    check_request,
    items_of,
    misaligned,
    response_of,
    version_labels_of,
)

LIMITS = RequestLimits(vocab_size=100, max_model_len=50, largest_kept_set=4096, has_seeds=False)
SEEDED = RequestLimits(vocab_size=100, max_model_len=50, largest_kept_set=4096, has_seeds=True)
LARGE = RequestLimits(vocab_size=100_000, max_model_len=50, largest_kept_set=3, has_seeds=False)


def request(id: str = "a", num_prompt: int = 4, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=id, prompt_token_ids=tuple(range(num_prompt)), sampling=SamplingParams(**sampling)
    )


def asked(cache_keys: Mapping[int, str]) -> dict[int, SentRequest]:
    return {index: SentRequest(f"name/{index}.", key) for index, key in cache_keys.items()}


def item(token_ids: list[int], **meta: Any) -> dict[str, Any]:
    """One completion of SGLang's answer, as version 3 sampled it."""
    found = {
        "finish_reason": {"type": "length", "length": len(token_ids)},
        "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(token_ids)],
        "weight_versions": [{"version": "3@run", "start": 0, "end": len(token_ids)}],
    }
    return {"output_ids": token_ids, "meta_info": found | meta}


def test_a_request_for_n_completions_is_a_batch_of_n_with_ids_of_their_own() -> None:
    body = body_of(request(n=3, max_tokens=5), LIMITS, asked(dict.fromkeys(range(3), "key")))
    assert body["input_ids"] == [[0, 1, 2, 3]] * 3
    assert len(body["sampling_params"]) == 3
    assert body["rid"] == ["name/0.", "name/1.", "name/2."]
    assert body["extra_key"] == ["key"] * 3
    assert all(params["max_new_tokens"] == 5 for params in body["sampling_params"])


def test_without_max_tokens_the_rest_of_the_context_is_asked_for() -> None:
    (params,) = body_of(request(num_prompt=30), LIMITS, asked({0: ""}))["sampling_params"]
    assert params["max_new_tokens"] == 20


def test_seeds_are_sent_to_servers_that_honour_them_and_differ_by_completion() -> None:
    def seeds(limits: RequestLimits, **sampling: Any) -> list[int | None]:
        body = body_of(request(**sampling), limits, asked(dict.fromkeys(range(sampling.get("n", 1)), "")))
        return [params.get("sampling_seed") for params in body["sampling_params"]]

    assert seeds(LIMITS, n=2, seed=7) == [None, None]
    four = seeds(SEEDED, n=4, seed=7)
    assert len(set(four)) == 4
    assert seeds(SEEDED, n=2, seed=7) == four[:2]
    assert seeds(SEEDED, n=2, seed=8) != four[:2]
    assert seeds(SEEDED) != seeds(SEEDED), "a server that honours seeds takes the same one where none is given"


@pytest.mark.parametrize(
    ("sampling", "has_mask", "top_k"),
    [
        ({}, False, -1),
        ({"temperature": 0.7}, False, -1),
        ({"top_k": 100}, False, -1),
        ({"top_p": 0.5}, True, 100),
        ({"min_p": 0.1}, True, 100),
        ({"top_k": 5, "min_p": 0.1}, True, 5),
        ({"temperature": 0.0, "top_p": 0.5}, False, -1),
    ],
)
def test_logprobs_of_the_kept_set_are_asked_for_under_a_filter(
    sampling: dict[str, Any], has_mask: bool, top_k: int
) -> None:
    body = body_of(request(**sampling), LIMITS, asked({0: ""}))
    assert body.get("return_sampling_mask", False) is has_mask
    assert body["sampling_params"][0]["top_k"] == top_k


@pytest.mark.parametrize(
    ("num_prompt", "sampling"),
    [(50, {}), (4, {"max_tokens": 47})],
)
def test_what_does_not_fit_the_context_is_refused(num_prompt: int, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len 50"):
        check_request(request(num_prompt=num_prompt, **sampling), LIMITS)


def test_what_fills_the_context_is_accepted_and_a_token_beyond_the_vocabulary_is_not() -> None:
    check_request(request(max_tokens=46), LIMITS)
    outside = request().model_copy(update={"prompt_token_ids": (1, 100)})
    with pytest.raises(InvalidRequestError, match="token id 100"):
        check_request(outside, LIMITS)


@pytest.mark.parametrize(
    ("limits", "sampling"),
    [(LIMITS, {"top_k": 5, "top_p": 0.5}), (LARGE, {"top_k": 4}), (SEEDED, {"min_p": 0.1})],
)
def test_filters_that_sglang_applies_otherwise_are_refused(limits: RequestLimits, sampling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        check_request(request(**sampling), limits)
    check_request(request(temperature=0.0, **sampling), limits)  # greedy decoding filters nothing


def test_an_answer_becomes_completions_with_their_spans() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "1@run", "start": 1, "end": 3}]
    answer = [item([5, 6, 7], weight_versions=spans), item([8], finish_reason={"type": "stop", "matched": 8})]
    first, second = response_of(request(n=2), answer, LIMITS).completions
    assert first.token_ids == (5, 6, 7)
    assert first.logprobs == (-0.5, -1.5, -2.5)
    assert first.version_spans == (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=3))
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert (first.index, second.index) == (0, 1)


def test_under_a_filter_logprobs_are_those_of_the_kept_set() -> None:
    answer = [item([5, 6], output_token_sampling_logprobs=[-0.1, -0.2], output_token_sampling_mask=[[5], [6, 7]])]
    (completion,) = response_of(request(top_p=0.5), answer, LIMITS).completions
    assert completion.logprobs == (-0.1, -0.2)


def test_a_kept_set_that_sglang_cut_is_refused() -> None:
    answer = [item([5], output_token_sampling_logprobs=[-0.1], output_token_sampling_mask=[[5, 6, 7]])]
    with pytest.raises(UnsupportedError, match="sampling-mask-max-tokens"):
        response_of(request(top_p=0.5), answer, LARGE)


def test_stop_tokens_end_a_completion_that_ignores_the_end_of_sequence() -> None:
    answer = [item([5, 9, 6, 9, 7])]
    (completion,) = response_of(request(ignore_eos=True, stop_token_ids=(9,)), answer, LIMITS).completions
    assert (completion.token_ids, completion.finish_reason) == ((5, 9), "stop")
    assert completion.version_spans == (VersionSpan(version=3, start=0, end=2),)
    (free,) = response_of(request(ignore_eos=True, stop_token_ids=(8,)), answer, LIMITS).completions
    assert (len(free.token_ids), free.finish_reason) == (5, "length")


def test_a_request_that_was_aborted_in_the_queue_has_no_tokens() -> None:
    answer = [{"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in queue"}}}]
    (completion,) = response_of(request(), answer, LIMITS).completions
    assert (completion.token_ids, completion.version_spans, completion.finish_reason) == ((), (), "abort")


@pytest.mark.parametrize(("num_logprobs", "num_tokens"), [(4, 3), (3, 2), (0, 0)])
def test_the_last_token_before_an_abort_is_left_out_since_sglang_did_not_look_whether_it_ends_the_completion(
    num_logprobs: int, num_tokens: int
) -> None:
    reported = [[-0.5 - i, token, None] for i, token in enumerate([5, 6, 7, 8][:num_logprobs])]
    aborted = item([5, 6, 7, 8], finish_reason={"type": "abort", "message": "Aborted"}, output_token_logprobs=reported)
    (completion,) = response_of(request(), [aborted], LIMITS).completions
    assert completion.token_ids == (5, 6, 7)[:num_tokens]
    assert completion.finish_reason == "abort"
    assert sum(span.end - span.start for span in completion.version_spans) == num_tokens


def test_a_completion_that_sglang_was_not_asked_for_is_aborted_without_a_token() -> None:
    first, second = response_of(request(n=2), [None, item([5])], LIMITS).completions
    assert (first.index, first.token_ids, first.version_spans, first.finish_reason) == (0, (), (), "abort")
    assert (second.index, second.token_ids) == (1, (5,))


def test_logprobs_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(NonFiniteError):
        response_of(request(), [item([5], output_token_logprobs=[[None, 5, None]])], LIMITS)


@pytest.mark.parametrize("answer", [[], [{}], {"error": "?"}, [item([5], finish_reason={"type": "?"})]])
def test_an_answer_that_is_none_is_a_protocol_error(answer: Any) -> None:
    with pytest.raises(ProtocolError):
        response_of(request(), items_of(answer, 1), LIMITS)


def test_an_answer_that_was_ended_in_the_queue_has_no_labels() -> None:
    aborted = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in queue"}}}
    assert version_labels_of(aborted) is None
    assert version_labels_of(item([5], weight_versions=[{"version": "3@run", "start": 0, "end": 1}])) == [
        {"version": "3@run", "start": 0, "end": 1}
    ]


def test_completions_that_are_asked_for_again_have_keys_and_ids_of_their_own_and_the_seeds_that_they_had() -> None:
    wanted = request(n=4, seed=7)
    together = body_of(wanted, SEEDED, asked(dict.fromkeys(range(4), "3@run")))
    again = body_of(wanted, SEEDED, asked({1: "one", 3: "other"}))
    assert again["rid"] == ["name/1.", "name/3."]
    for key in ("sampling_params", "input_ids"):
        assert again[key] == [together[key][1], together[key][3]]
    assert again["extra_key"] == ["one", "other"]


def test_tensors_off_their_boundaries_are_named() -> None:
    def update(*dtypes: str) -> WeightUpdate:
        specs = [TensorSpec.model_validate({"name": f"t{i}", "dtype": d, "shape": (3,)}) for i, d in enumerate(dtypes)]
        return WeightUpdate(
            run_id="run",
            version=1,
            manifest=Manifest(tensors=tuple(specs)),
            buckets=plan_buckets(specs, 1000),
            in_flight="keep",
            deadline_s=1.0,
            lease_s=1.0,
        )

    assert misaligned(update("float32", "bfloat16", "bfloat16")) is None
    assert "'t1' (float32) begins at byte 6" in (misaligned(update("bfloat16", "float32")) or "")


SETTINGS = {
    "model_path": "/models/m",
    "dtype": "bfloat16",
    "launch_command": "--model-path /models/m --port 7000",
    "disable_overlap_schedule": True,
    "dp_size": 1,
    "pp_size": 1,
    "tokenizer_worker_num": 1,
    "weight_cache_mode": "off",
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_watermark": False,
}


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("disable_overlap_schedule", False, "--disable-overlap-schedule"),
        ("dp_size", 2, "--dp-size 1"),
        ("pp_size", 2, "--pp-size 1"),
        ("tokenizer_worker_num", 2, "--tokenizer-worker-num 1"),
        ("weight_cache_mode", "client", "--weight-cache-mode off"),
    ],
)
def test_a_wrong_setting_is_named_with_the_command_that_undoes_it(setting: str, value: Any, remedy: str) -> None:
    assert flags.wrong_setting(SETTINGS) is None
    info = SETTINGS | {setting: value}
    problem = flags.wrong_setting(info)
    assert problem is not None
    assert problem.text.startswith(f"{setting} is {value!r}: ")
    command = flags.restart_command("http://h:7000", info, problem.remedy)
    assert command.startswith("python -m sglang.launch_server --model-path /models/m --port 7000 ")
    assert remedy in command
    assert command.count("--disable-overlap-schedule") == 1


def test_missing_routes_are_named() -> None:
    paths = dict.fromkeys(flags.NEEDED_ROUTES)
    assert flags.missing_routes(paths) is None
    del paths["/begin_weight_update"]
    problem = flags.missing_routes(paths)
    assert problem is not None
    assert "/begin_weight_update" in problem.text


@pytest.mark.parametrize(
    ("asked", "config", "found"),
    [
        ("half", {}, "float16"),
        ("bfloat16", {}, "bfloat16"),
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "float16"}, "float16"),
        ("auto", {"dtype": "float32"}, None),
        ("auto", {}, None),
    ],
)
def test_the_dtype_is_that_of_the_flag_or_the_checkpoint(asked: str, config: dict[str, Any], found: str | None) -> None:
    dtype = flags.dtype_of({"dtype": asked}, config)
    assert dtype == found if found is not None else isinstance(dtype, flags.Problem)


def test_logprobs_that_do_not_follow_the_temperature_are_noticed() -> None:
    def answer(apart: float, apart_when_hot: float) -> list[dict[str, Any]]:
        pairs = [[[-1.0, 5, None], [-1.0 - gap, 6, None]] for gap in (apart, apart_when_hot)]
        return [{"meta_info": {"output_top_logprobs": [pair]}} for pair in pairs]

    assert flags.ignores_temperature(answer(3.0, 0.03)) is None
    assert flags.ignores_temperature(answer(0.0, 0.0)) is None
    assert flags.ignores_temperature(answer(3.0, 3.0)) is not None


def test_the_command_starts_a_server_that_inflight_attaches_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    options = EngineOptions(
        model=tmp_path, name="m", dtype="float32", device="cpu", max_model_len=200, max_concurrent=8, threads=2
    )
    command = shlex.join(KIND.command(options, "127.0.0.1", 7110))
    for words in (
        f"-m sglang.launch_server --model-path {tmp_path} --host 127.0.0.1 --port 7110 --device cpu",
        "--context-length 206 --max-running-requests 8",
        "--attention-backend torch_native --sampling-backend pytorch",
        f"--max-total-tokens {8 * 206}",
        "--disable-overlap-schedule",
    ):
        assert words in command
    # Memory that other processes allocate while it starts counts towards this share.
    assert float(command.partition("--mem-fraction-static ")[2].split()[0]) >= 0.5
    assert KIND.environment(options)["OMP_NUM_THREADS"] == "2"
    on_a_gpu = shlex.join(KIND.command(EngineOptions(model=tmp_path, device="cuda"), "0.0.0.0", 30000))
    assert "torch_native" not in on_a_gpu
    assert "--disable-overlap-schedule" in on_a_gpu


@pytest.mark.parametrize(
    ("length", "max_concurrent", "flags"),
    [
        (2048, None, f"--max-running-requests 64 --max-total-tokens {64 * 2048}"),
        (2048, 8, f"--max-running-requests 8 --max-total-tokens {8 * 2048}"),
        # 128 KiB a token, and 2 GiB: 16,384 tokens hold four sequences.
        (4096, None, "--max-running-requests 4 --max-total-tokens 16384"),
        (40960, None, "--max-running-requests 1 --max-total-tokens 40960"),
    ],
)
def test_the_cache_on_a_cpu_holds_every_sequence_that_is_declared(
    tmp_path: Path, length: int, max_concurrent: int | None, flags: str
) -> None:
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    large = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = {**(small if length == 2048 else large), "max_position_embeddings": length}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(model=tmp_path, device="cpu", dtype="float32", max_concurrent=max_concurrent)
    assert flags in shlex.join(KIND.command(options, "127.0.0.1", 7110))


@pytest.mark.parametrize(
    ("url", "info", "config", "says"),
    [
        ("http://10.0.0.7:30000", {}, {}, "loopback"),
        ("http://engine:30000", {}, {}, "loopback"),
        ("http://127.0.0.1:30000", {"tp_size": 2}, {}, "tp_size is 2"),
        ("http://127.0.0.1:30000", {"quantization": "fp8"}, {}, "quantized"),
        ("http://127.0.0.1:30000", {}, {"quantization_config": {"bits": 4}}, "quantized"),
        ("http://127.0.0.1:30000", {"enable_lora": True}, {}, "LoRAs"),
        ("http://127.0.0.1:30000", {"load_format": "gguf"}, {}, "loader"),
    ],
)
def test_updates_are_staged_only_where_the_server_can_load_files_of_this_process(
    url: str, info: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    reason = flags.why_not_staged(url, {"tp_size": 1, "load_format": "auto", **info}, config)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.3.2.1"])
def test_a_plain_server_on_loopback_takes_staged_updates(host: str) -> None:
    info = {"tp_size": 1, "quantization": None, "enable_lora": None, "load_format": "auto", "model_checksum": None}
    assert flags.why_not_staged(f"http://{host}:30000", info, {"vocab_size": 10}) is None


def test_the_query_of_the_url_chooses_how_updates_arrive_and_is_checked() -> None:
    def connect(query: str) -> object:
        return KIND.connect(f"http://127.0.0.1:1{query}", token=None, control_timeout_s=1.0, generate_timeout_s=1.0)

    assert repr(connect("?updates=native")) == repr(connect("?updates=staged")) == repr(connect(""))
    with pytest.raises(ConfigError, match=r"\?updates=native"):
        connect("?updates=other")
