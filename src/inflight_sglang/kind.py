"""How an SGLang server is started, and attached to by its URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from inflight.contracts import InferenceEndpoint
from inflight.engines.checkpoint_specs import config_number, config_of
from inflight.engines.kinds import EngineKind, EngineOptions, has_gpu
from inflight.errors import ConfigError
from inflight_sglang import flags
from inflight_sglang.endpoint import SglangEndpoint
from inflight_sglang.flags import Updates

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


class SglangKind(EngineKind):
    """SGLang's own server."""

    name = "sglang"
    health_path = "/ready"  # ``/health`` takes a second, and samples a token
    liveness_path = None  # SGLang's server ends by itself a few seconds after a part of it has died

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        device = options.device or ("cuda" if has_gpu(None) else "cpu")
        words = ["-m", flags.MODULE, "--model-path", str(options.model), "--host", host, "--port", str(port)]
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
        return [*words, *flags.NEEDED_ARGUMENTS, *options.arguments]

    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        # How long SGLang takes to see that the caller of a request has left; it is 4 s otherwise.
        words = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
        return words if options.threads is None else {**words, "OMP_NUM_THREADS": str(options.threads)}

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """The token is SGLang's ``--api-key``; ``?updates=`` chooses as the endpoint's does.

        Raises `ConfigError` for another query.
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
    return min(wanted, config_number(config_of(options.model), "max_position_embeddings") or wanted)
