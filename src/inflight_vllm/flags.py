"""How a vLLM server must be started for inflight to attach, and checks of a running server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from inflight.base.shortened import shortened
from inflight.rollouts.drafts import LARGEST_WINDOW
from inflight.wire import MAX_ALTERNATIVES

BACKEND = "inflight"
"""The weight transfer backend that `inflight_vllm.transfer_engine` registers."""
RELEASE_ARGUMENTS = ("--enable-sleep-mode",)
"""The arguments without which a server cannot release its memory. vLLM refuses them on a CPU."""
PROPOSER = "inflight_vllm.drafting.HistoryProposer"
"""The class that vLLM imports in each worker to draft from recorded completions."""
MODULE = "vllm.entrypoints.openai.api_server"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Enables the routes for pausing, resuming and updating; vLLM has no narrower setting for them."""

NEEDED_ROUTES = (
    "/inference/v1/generate",
    "/v1/models",
    "/version",
    "/pause",
    "/resume",
    "/is_paused",
    "/server_info",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/update_weight_version",
    "/weight_info",
    "/get_world_size",
    "/sleep",
    "/wake_up",
)
"""Every route of vLLM that the endpoint calls."""
_ABORT_ROUTE = "/abort_requests"
_CHAT_ROUTE = "/v1/chat/completions/render"
_DEV_ROUTES = frozenset({"/pause", "/weight_info", "/collective_rpc"})


def needed_arguments() -> list[str]:
    """Return the arguments without which inflight refuses to attach."""
    transfer = json.dumps({"backend": BACKEND}, separators=(",", ":"))
    return ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", transfer]


def drafting_arguments() -> list[str]:
    """Return the arguments that make a server draft from recorded completions."""
    config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": LARGEST_WINDOW}
    words = ["--speculative-config", json.dumps(config, separators=(",", ":"))]
    return [*words, "--per-request-spec-decode-metrics", "summary"]


def speculates(config: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings verifies drafts, from whatever source."""
    return bool(config.get("speculative_config"))


def drafts_from_history(config: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings drafts from recorded completions."""
    return (config.get("speculative_config") or {}).get("model") == PROPOSER


def counts_drafts(config: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings reports for each request how many drafts were verified."""
    level = (config.get("observability_config") or {}).get("per_request_spec_decode_metrics", "none")
    return speculates(config) and level != "none"


def restart_command(url: str, model: str, further: Sequence[str] = ()) -> str:
    """Return a shell command that starts the server at ``url`` correctly."""
    at = urlsplit(url)
    words = ["python", "-m", MODULE, "--model", model, "--host", at.hostname or "127.0.0.1"]
    words += ["--port", str(at.port or 8000), *needed_arguments(), *further]
    return f"{DEV_MODE}=1 {shlex.join(words)}"


def missing_routes(paths: Mapping[str, Any]) -> str | None:
    """Return which required routes a server does not offer, or None if it offers all of them."""
    missing = [route for route in NEEDED_ROUTES if route not in paths]
    if not missing:
        return None
    if is_without_dev_mode(paths):
        return f"it was started without {DEV_MODE}=1, so it does not offer {', '.join(sorted(_DEV_ROUTES))}"
    return f"it does not offer {shortened(missing, 3)}: this release of vLLM has a different interface"


def is_without_dev_mode(paths: Mapping[str, Any]) -> bool:
    """Return whether a server lacks the routes that vLLM offers only in development mode."""
    return not _DEV_ROUTES & set(paths)


def can_abort(paths: Mapping[str, Any]) -> bool:
    """Return whether the server can end requests by their ids."""
    return _ABORT_ROUTE in paths


def offers_chat(paths: Mapping[str, Any]) -> bool:
    """Return whether the server renders chat messages to token ids."""
    return _CHAT_ROUTE in paths


def wrong_settings(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a server's settings (``/server_info``), or None if nothing is."""
    mode = config["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        return (
            f"--logprobs-mode is {mode}: logprobs do not describe the distribution from which tokens are sampled "
            "(temperature and filters are ignored); processed_logprobs is required"
        )
    transfer = config.get("weight_transfer_config") or {}
    if transfer.get("backend") != BACKEND:
        return f"--weight-transfer-config names the backend {transfer.get('backend')!r}; {BACKEND!r} is required"
    return None


def takes_images(config: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings encodes images for its model."""
    settings = config["model_config"].get("multimodal_config")
    return bool(settings) and not settings.get("language_model_only")


def max_top_k(config: Mapping[str, Any], vocab_size: int) -> int:
    """Return how many of the likeliest tokens a server with these settings returns for each prompt token."""
    limit = int(config["model_config"].get("max_logprobs", 0))
    return min(MAX_ALTERNATIVES, vocab_size if limit < 0 else limit)


def honours_seeds(config: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings accepts requests with seeds.

    A server that verifies drafts does not, because the tokens for a seed would depend on the drafts. On a CPU, a seed
    crashes vLLM 0.32 if the prompt does not fit into one step: vLLM then rewinds the seed's generator, which CPU
    generators do not support.
    """
    if speculates(config):
        return False
    on_cpu = str(config.get("device_config", {}).get("device", "")).startswith("cpu")
    return not (on_cpu and config["scheduler_config"].get("enable_chunked_prefill", True))
