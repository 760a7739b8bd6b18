"""How to start an SGLang server, and how to attach to one by its URL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from inflight.contracts import DraftProvider, EngineKind, EngineOptions, GpuUse, InferenceEndpoint
from inflight.engines.arguments import has_gpu, integer_in, number_in
from inflight.errors import ConfigError
from inflight.model.checkpoint_specs import config_number, config_of
from inflight.wire import DTYPE_SIZES
from inflight_sglang import flags
from inflight_sglang.endpoint import SglangEndpoint
from inflight_sglang.flags import Updates

RESERVED_TOKENS = 6
"""Number of tokens by which SGLang's longest prompts are shorter than its context length, because of
`TpModelWorker.get_worker_info`."""
_CPU_ARGUMENTS = (
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--mem-fraction-static",
    "0.8",
    "--sleep-on-idle",  # otherwise it keeps a core busy
)
"""``--max-total-tokens`` limits the cache, so the share of memory only has to be large: SGLang refuses to start if all
processes together allocate more than this share of the available memory while it loads the model."""
_CPU_SEQUENCES = 64
"""Number of sequences that run concurrently on a CPU, unless the options specify another number or the cache holds
fewer.
"""
_CPU_CACHE_BYTES = 2 << 30
"""Maximum size of the KV cache on a CPU, unless the options imply a larger one."""

_NO_DRAFTS = (
    "SGLang cannot draft from recorded completions of a request's prompt: it drafts every request from a single "
    "corpus, which must be text. On a CPU it also returns the likeliest token at any temperature while it verifies "
    "drafts. Omit drafts"
)

_MEMORY_SHARE = 0.95
"""Assumed share of GPU memory that SGLang fills by default: it computes ``--mem-fraction-static`` so that the rest
holds activations and CUDA graphs."""
_BESIDE_STATIC = 0.1
"""Assumed share of GPU memory that activations and CUDA graphs need in addition to ``--mem-fraction-static``."""


class SglangKind(EngineKind):
    """SGLang's own server. It needs no `liveness_path`, because it exits soon after one of its processes has died."""

    name = "sglang"
    health_path = "/ready"  # ``/health`` takes a second, and samples a token
    release_arguments = flags.RELEASE_ARGUMENTS

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        device = options.device or ("cuda" if has_gpu(None) else "cpu")
        words = ["-m", flags.MODULE, "--model-path", str(options.model), "--host", host, "--port", str(port)]
        words += ["--device", device, "--served-model-name", options.name or options.model.resolve().name]
        context = None if options.max_model_len is None else _context_length(options)
        num, tokens = _cpu_sizes(options, context) if device == "cpu" else (options.max_concurrent, None)
        for flag, value in (
            ("--dtype", options.dtype),
            ("--context-length", context),
            ("--max-running-requests", num),
            ("--max-total-tokens", tokens),
        ):
            if value is not None:
                words += [flag, str(value)]
        if device == "cpu":
            words += _CPU_ARGUMENTS
        # Makes /v1/loads report what is running now, not what was running up to fifteen steps ago.
        words += ["--load-snapshot-publish-interval", "1"]
        words.append(flags.STREAM_ARGUMENT)
        return [*words, *flags.NEEDED_ARGUMENTS, *options.arguments]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        # How long SGLang takes to notice that a request's caller has disconnected; the default is 4 s.
        words = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
        paths = (str(Path(__file__).with_name("plugin")), os.environ.get("PYTHONPATH"))
        words["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return words if options.threads is None else {**words, "OMP_NUM_THREADS": str(options.threads)}

    def drafts_problem(self, provider: DraftProvider) -> str | None:
        return _NO_DRAFTS

    def gpu_use(self, arguments: Sequence[str]) -> GpuUse:
        num = integer_in(arguments, "--tp-size", "--tp", "--tensor-parallel-size") or 1
        num *= integer_in(arguments, "--pp-size", "--pipeline-parallel-size") or 1
        copies = integer_in(arguments, "--dp-size", "--dp", "--data-parallel-size") or 1
        if "--enable-dp-attention" in arguments:  # then the data-parallel ranks are also the tensor-parallel ones
            copies = 1
        share = number_in(arguments, "--mem-fraction-static")
        return GpuUse(
            num_gpus=num * copies,
            num_copies=copies,
            context=integer_in(arguments, "--context-length"),
            memory_share=_MEMORY_SHARE if share is None else min(1.0, share + _BESIDE_STATIC),
        )

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint; ``token`` is the value of SGLang's ``--api-key``, and ``?updates=`` sets ``updates``.

        Raises `ConfigError` for any other query.
        """
        address, _, query = url.partition("?")
        return SglangEndpoint(
            address,
            api_key=token,
            updates=_updates_of(query),
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


KIND = SglangKind()
"""The engine kind `sglang`."""


def _updates_of(query: str) -> Updates | None:
    if query == "":
        return None
    for updates in get_args(Updates):
        if query == f"updates={updates}":
            return updates  # type: ignore[no-any-return]
    raise ConfigError(
        f"the query ?{query} of the endpoint's URL is not supported; write ?updates=staged or ?updates=native, or no "
        "query"
    )


def _cpu_sizes(options: EngineOptions, context: int | None) -> tuple[int, int]:
    """Return how many sequences run concurrently, and the size in tokens of a cache that holds all of them.

    SGLang starts a request only if its cache can hold the longest answer, so with a smaller cache it would run fewer
    sequences than it supports. If the options do not determine both sizes, `_CPU_CACHE_BYTES` limits the cache.
    """
    config = config_of(options.model)
    length = context or config_number(config, "max_position_embeddings") or 2048
    if options.max_concurrent is not None and context is not None:
        return options.max_concurrent, options.max_concurrent * length
    heads = config_number(config, "num_attention_heads") or 1
    head_dim = config_number(config, "head_dim") or (config_number(config, "hidden_size") or 1) // heads
    num_values = 2 * (config_number(config, "num_hidden_layers") or 1) * head_dim
    num_values *= config_number(config, "num_key_value_heads") or heads
    size_bytes = num_values * DTYPE_SIZES.get(options.dtype or "float32", 4)
    wanted = length * (options.max_concurrent or _CPU_SEQUENCES)
    tokens = max(length, min(wanted, _CPU_CACHE_BYTES // size_bytes))
    return options.max_concurrent or tokens // length, tokens


def _context_length(options: EngineOptions) -> int:
    """Return the context length for sequences of ``options.max_model_len`` tokens, or the model's if that is less."""
    assert options.max_model_len is not None
    wanted = options.max_model_len + RESERVED_TOKENS
    return min(wanted, config_number(config_of(options.model), "max_position_embeddings") or wanted)
