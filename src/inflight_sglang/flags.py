"""How an SGLang server must be started so that inflight can attach, and whether a running one was started so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import EngineOptions, has_gpu
from inflight.errors import ConfigError

MODULE = "sglang.launch_server"
NEEDED_ARGUMENTS = ("--disable-overlap-schedule",)
"""Without these inflight refuses to attach."""
RESERVED_TOKENS = 6
"""Of its context length, SGLang serves so many tokens less to the longest prompts (`TpModelWorker.get_worker_info`)."""
_CPU_ARGUMENTS = (
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--mem-fraction-static",
    "0.1",
    "--sleep-on-idle",  # it would keep a core busy otherwise
)
_CPU_TOKENS = 20_000
"""Tokens in the cache of a server on a CPU, unless the options say what it has to hold."""

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
)
"""Every route of SGLang that the endpoint calls."""
Updates = Literal["staged", "native"]
"""Whether weights are staged beside the server and loaded from files, or received by the engine itself in a group."""
_CHAT_ROUTES = ("/v1/tokenize", "/v1/detokenize")


class SglangKind:
    """Satisfies `EngineKind`."""

    @property
    def name(self) -> str:
        """See `EngineKind.name`."""
        return "sglang"

    @property
    def health_path(self) -> str:
        """See `EngineKind.health_path`. ``/health`` takes a second, and samples a token."""
        return "/ready"

    @property
    def liveness_path(self) -> None:
        """See `EngineKind.liveness_path`. SGLang's server ends by itself a few seconds after a part of it has died."""
        return None

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        """See `EngineKind.command`."""
        device = options.device or ("cuda" if has_gpu(None) else "cpu")
        words = ["-m", MODULE, "--model-path", str(options.model), "--host", host, "--port", str(port)]
        words += ["--device", device, "--served-model-name", options.name or options.model.resolve().name]
        context = None if options.max_model_len is None else _context_length(options)
        for flag, value in (
            ("--dtype", options.dtype),
            ("--context-length", context),
            ("--max-running-requests", options.max_concurrent),
        ):
            if value is not None:
                words += [flag, str(value)]
        if device == "cpu":
            sizes = (options.max_concurrent, context)
            tokens = _CPU_TOKENS if sizes[0] is None or sizes[1] is None else sizes[0] * sizes[1]
            words += [*_CPU_ARGUMENTS, "--max-total-tokens", str(tokens)]
        # So that /v1/loads says what runs now, and not what ran up to fifteen steps ago.
        words += ["--load-snapshot-publish-interval", "1"]
        return [*words, *NEEDED_ARGUMENTS, *options.arguments]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        """See `EngineKind.environment`."""
        # How long SGLang takes to see that the caller of a request has left; it is 4 s otherwise.
        words = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
        return words if options.threads is None else {**words, "OMP_NUM_THREADS": str(options.threads)}

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """See `EngineKind.connect`. The token is SGLang's ``--api-key``; ``?updates=`` chooses as the endpoint's does.

        Raises `ConfigError` for another query.
        """
        from inflight_sglang.endpoint import SglangEndpoint

        address, _, query = url.partition("?")
        return SglangEndpoint(
            address,
            api_key=token,
            updates=_updates_of(query),
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


KIND = SglangKind()


def _updates_of(query: str) -> Updates | None:
    if query == "":
        return None
    for updates in get_args(Updates):
        if query == f"updates={updates}":
            return updates  # type: ignore[no-any-return]
    raise ConfigError(f"?{query} is not understood; write ?updates=staged or ?updates=native, or nothing")


def _context_length(options: EngineOptions) -> int:
    """Return the context length that serves ``options.max_model_len`` tokens, if the model allows it."""
    assert options.max_model_len is not None
    wanted = options.max_model_len + RESERVED_TOKENS
    try:
        config = json.loads((options.model / "config.json").read_text())
        longest = int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return wanted
    return min(wanted, longest)


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting of a running server that inflight cannot work with, and the arguments that would undo it."""

    text: str
    remedy: tuple[str, ...] = ()


def restart_command(url: str, info: Mapping[str, Any], remedy: Sequence[str]) -> str:
    """Return a line for the shell that starts the server at ``url`` again as it must be.

    ``info`` is what ``/server_info`` says. Of an argument that is given twice SGLang takes the last.
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
    """Return what is wrong with the routes that a server offers, None if all that are needed are there."""
    missing = [route for route in NEEDED_ROUTES if route not in paths]
    if not missing:
        return None
    return Problem(f"it does not offer {', '.join(missing)}: this release of SGLang has another interface than 0.5.23")


def offers_chat(paths: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Return True if the server renders chat messages to token ids, and token ids to text."""
    return all(route in paths for route in _CHAT_ROUTES) and not info.get("skip_tokenizer_init")


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_SETTINGS: tuple[tuple[str, Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (
        "disable_overlap_schedule",
        lambda value: value is not True,
        "with the overlap scheduler a forward pass is still under way when weights change, so that a step may be torn "
        "and its token carry the wrong version",
        ("--disable-overlap-schedule",),
    ),
    (
        "dp_size",
        _is_above_one,
        "SGLang takes weights over a group with one data-parallel replica only; start one server for each replica",
        ("--dp-size", "1"),
    ),
    (
        "pp_size",
        _is_above_one,
        "SGLang's ranks in a weight group are counted by tensor-parallel rank only, so that pipeline stages collide",
        ("--pp-size", "1"),
    ),
    (
        "tokenizer_worker_num",
        _is_above_one,
        "a pause reaches one of several tokenizer processes only, and the others go on",
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
        "the draft model would keep the old weights, and version spans are not known to be true; leave it out",
        (),
    ),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "one server must do prefill and decoding, so that its weights change at once",
        ("--disaggregation-mode", "null"),
    ),
    (
        "enable_watermark",
        bool,
        "a watermark changes the distribution that tokens are drawn from; leave it out",
        (),
    ),
)


def wrong_setting(info: Mapping[str, Any]) -> Problem | None:
    """Return what is wrong with the settings of a server (``/server_info``), None if nothing is."""
    for name, is_wrong, reason, remedy in _SETTINGS:
        if is_wrong(info.get(name)):
            return Problem(f"{name} is {info.get(name)!r}: {reason}", remedy)
    return None


_UNSTAGED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tp_size", _is_above_one, "files are handed to one rank only"),
    ("quantization", lambda value: value is not None, "quantized weights are not loaded from files again"),
    ("enable_lora", bool, "adapters are named after the model, which SGLang names after its last files"),
    ("model_checksum", lambda value: value is not None, "only the files of the start would pass --model-checksum"),
    (
        "load_format",
        lambda value: value not in (None, "auto", "safetensors", "dummy"),
        "another loader would be used from the first update on",
    ),
)


def why_not_staged(url: str, info: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return why updates cannot be staged beside a server, None if they can. ``config`` as for `dtype_of`."""
    if not _is_loopback(urlsplit(url).hostname or ""):
        return "its address is not this host's loopback, and files of this process have to be seen there"
    if "quantization_config" in config:
        return "quantized weights are not loaded from files again"
    for name, is_wrong, reason in _UNSTAGED:
        if is_wrong(info.get(name)):
            return f"{name} is {info.get(name)!r}: {reason}"
    return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


_DTYPES = {"half": "float16", "float": "float32"}


def dtype_of(info: Mapping[str, Any], config: Mapping[str, Any]) -> str | Problem:
    """Return the dtype that a model is served in. ``config`` is its ``config.json``, empty if it is not known."""
    asked = str(info.get("dtype"))
    if asked != "auto":
        return _DTYPES.get(asked, asked)
    found = config.get("dtype") or config.get("torch_dtype")
    if found in ("bfloat16", "float16"):  # SGLang serves float32 checkpoints in another dtype then
        return str(found)
    return Problem("--dtype is auto: it is not known what the weights are served in", ("--dtype", "bfloat16"))


def probe_of_logprobs(token_id: int) -> dict[str, Any]:
    """Return a body of ``POST /generate`` whose answer tells what `ignores_temperature` asks."""
    common = {"max_new_tokens": 1, "ignore_eos": True, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    return {
        "input_ids": [[token_id]] * 2,
        "sampling_params": [common | {"temperature": 1.0}, common | {"temperature": 100.0}],
        "return_logprob": True,
        "top_logprobs_num": 2,
    }


def ignores_temperature(answer: Any) -> Problem | None:
    """Return a problem if a server reports logprobs of the unscaled logits (``SGLANG_RETURN_ORIGINAL_LOGPROB``)."""
    first, second = (item["meta_info"]["output_top_logprobs"][0] for item in answer)
    apart, apart_when_hot = (two[0][0] - two[1][0] for two in (first, second))
    if apart > 0.01 and apart_when_hot > apart / 2:
        return Problem(
            "logprobs are of the unscaled logits, as with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, and not "
            "of the distribution that tokens are sampled from; start it without"
        )
    return None
