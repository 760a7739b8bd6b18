"""How an SGLang server must be started for inflight to attach, and checks of a running server."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from inflight.base.addresses import is_loopback
from inflight.base.shortened import shortened

MODULE = "sglang.launch_server"
NEEDED_ARGUMENTS = ("--disable-overlap-schedule",)
"""Arguments without which inflight refuses to attach."""
STREAM_ARGUMENT = "--incremental-streaming-output"
"""Without this argument, each event of a stream repeats all tokens so far."""
RELEASE_ARGUMENTS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""The arguments without which a server cannot release its memory, or would lose its weights when it does. They require
``torch_memory_saver``."""
NEEDED_ROUTES = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/model_info",
    "/server_info",
    "/ready",
    "/v1/loads",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
"""Every route of SGLang that the endpoint calls."""
Updates = Literal["staged", "native"]
"""``staged``: this process stages the weights, and SGLang loads them from files. ``native``: the engine itself receives
them."""
_CHAT_ROUTES = ("/v1/tokenize", "/v1/detokenize")


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting of a running server that inflight cannot work with, and the arguments that correct it."""

    text: str
    remedy: tuple[str, ...] = ()


def restart_command(url: str, info: Mapping[str, Any], remedy: Sequence[str]) -> str:
    """Return a shell command that restarts the server at ``url`` correctly.

    ``info`` is the response from ``/server_info``. If an argument occurs twice, SGLang uses the last occurrence.
    """
    words = ["python", "-m", MODULE]
    if isinstance(given := info.get("launch_command"), str):
        words += shlex.split(given)
    else:
        at = urlsplit(url)
        words += ["--model-path", str(info.get("model_path", "MODEL"))]
        words += ["--host", at.hostname or "127.0.0.1", "--port", str(at.port or 30000)]
        words += ["--dtype", str(info.get("dtype", "bfloat16"))]
    return shlex.join([*words, *(word for word in NEEDED_ARGUMENTS if word not in (*words, *remedy)), *remedy])


def missing_routes(paths: Mapping[str, Any]) -> Problem | None:
    """Return which required routes a server does not offer, or None if it offers all of them."""
    missing = [route for route in NEEDED_ROUTES if route not in paths]
    if not missing:
        return None
    return Problem(
        f"it does not offer {shortened(missing, 3)}: this release of SGLang has a different interface than 0.5.23"
    )


def offers_chat(paths: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Return whether the server renders chat messages to token ids, and token ids to text."""
    return all(route in paths for route in _CHAT_ROUTES) and not info.get("skip_tokenizer_init")


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_SETTINGS: tuple[tuple[str, Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (
        "disable_overlap_schedule",
        lambda value: value is not True,
        "with the overlap scheduler a forward pass is still running when weights change, so a step may be torn "
        "and its token may carry the wrong version",
        ("--disable-overlap-schedule",),
    ),
    (
        "dp_size",
        _is_above_one,
        "SGLang can receive weights over a group only with a single data-parallel replica; start one server per "
        "replica",
        ("--dp-size", "1"),
    ),
    (
        "pp_size",
        _is_above_one,
        "SGLang numbers its ranks in a weight group by tensor-parallel rank only, so pipeline stages would collide",
        ("--pp-size", "1"),
    ),
    (
        "tokenizer_worker_num",
        _is_above_one,
        "a pause reaches only one of several tokenizer processes, and the others keep running",
        ("--tokenizer-worker-num", "1"),
    ),
    (
        "weight_cache_mode",
        lambda value: value not in (None, "off"),
        "weights that are shared with other engines cannot be updated",
        ("--weight-cache-mode", "off"),
    ),
    (
        "speculative_algorithm",
        lambda value: value is not None,
        "the draft model would keep the old weights, and version spans may be wrong; omit it",
        (),
    ),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "a server must do both prefill and decoding, so that its weights change in one step",
        ("--disaggregation-mode", "null"),
    ),
    (
        "enable_watermark",
        bool,
        "a watermark changes the distribution that tokens are drawn from; omit it",
        (),
    ),
)


def wrong_setting(info: Mapping[str, Any]) -> Problem | None:
    """Return what is wrong with a server's settings (``/server_info``), or None if nothing is."""
    for name, is_wrong, reason, remedy in _SETTINGS:
        if is_wrong(info.get(name)):
            return Problem(f"{name} is {info.get(name)!r}: {reason}", remedy)
    return None


_UNSTAGED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tp_size", _is_above_one, "SGLang loads the files of an update on one rank only"),
    ("quantization", lambda value: value is not None, "SGLang does not reload quantized weights from files"),
    (
        "enable_lora",
        bool,
        "LoRAs are addressed by the model's name, which SGLang changes to that of the files last loaded",
    ),
    (
        "model_checksum",
        lambda value: value is not None,
        "only the files that the server started with match --model-checksum",
    ),
    (
        "load_format",
        lambda value: value not in (None, "auto", "safetensors", "dummy"),
        "from the first update on, SGLang would use another loader",
    ),
)


def why_not_staged(url: str, info: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return why updates cannot be staged for a server; None if they can.

    ``config`` is the model's ``config.json``, empty if unknown.
    """
    if not is_loopback(urlsplit(url).hostname or ""):
        return "its address is not this host's loopback, and the server must be able to see this process's files"
    if "quantization_config" in config:
        return "SGLang does not reload quantized weights from files"
    for name, is_wrong, reason in _UNSTAGED:
        if is_wrong(info.get(name)):
            return f"{name} is {info.get(name)!r}: {reason}"
    return None


_DTYPES = {"half": "float16", "float": "float32"}


def dtype_of(info: Mapping[str, Any], config: Mapping[str, Any]) -> str | Problem:
    """Return the dtype in which a model is served, or a problem if the dtype is unknown.

    ``config`` is the model's ``config.json``, empty if unknown.
    """
    asked = str(info.get("dtype"))
    if asked != "auto":
        return _DTYPES.get(asked, asked)
    found = config.get("dtype") or config.get("torch_dtype")
    if found in ("bfloat16", "float16"):  # SGLang would serve a float32 checkpoint in another dtype
        return str(found)
    return Problem("--dtype is auto, so the dtype of the served weights is unknown", ("--dtype", "bfloat16"))


def probe_of_logprobs(token_id: int) -> dict[str, Any]:
    """Return the body of a ``POST /generate`` whose answer `ignores_temperature` checks."""
    common = {"max_new_tokens": 1, "ignore_eos": True, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    return {
        "input_ids": [[token_id]] * 2,
        "sampling_params": [common | {"temperature": 1.0}, common | {"temperature": 100.0}],
        "return_logprob": True,
        "top_logprobs_num": 2,
    }


def probe_of_streams(token_id: int) -> dict[str, Any]:
    """Return a body of ``POST /generate`` for a stream whose first event shows whether streams carry version labels."""
    params = {"max_new_tokens": 64, "ignore_eos": True, "temperature": 0.0}
    return {"input_ids": [token_id], "sampling_params": params, "stream": True}


def ignores_temperature(answer: Any) -> Problem | None:
    """Return a problem if a server reports logprobs of the unscaled logits (``SGLANG_RETURN_ORIGINAL_LOGPROB``)."""
    first, second = (item["meta_info"]["output_top_logprobs"][0] for item in answer)
    apart, apart_when_hot = (two[0][0] - two[1][0] for two in (first, second))
    if apart > 0.01 and apart_when_hot > apart / 2:
        return Problem(
            "logprobs describe the unscaled logits, as with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, and "
            "not the distribution from which tokens are sampled; start it without that variable"
        )
    return None
