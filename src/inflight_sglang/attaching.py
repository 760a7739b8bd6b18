"""The capabilities of a running SGLang server, and the reasons why inflight cannot attach to it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.base.transport_registry import receivable_transports
from inflight.engines.requests import protocol_errors
from inflight.engines.routes import EngineRoutes
from inflight.errors import ConfigError, ProtocolError
from inflight.model.checkpoint_specs import checkpoint_of, config_of
from inflight.wire import MAX_ALTERNATIVES, Capabilities, InFlightPolicy, Manifest, TensorSpec
from inflight_sglang import flags
from inflight_sglang.flags import Problem, Updates
from inflight_sglang.requests import RequestLimits, version_labels_of


@dataclass(frozen=True, slots=True)
class Attached:
    """The properties of a server. ``specs`` are the tensors that it loads, or None if they cannot be read."""

    capabilities: Capabilities
    limits: RequestLimits
    specs: tuple[TensorSpec, ...] | None
    directory: Path


async def attach(routes: EngineRoutes, model_dir: Path | None, updates: Updates | None) -> Attached:
    """Return the server's properties. If inflight cannot attach, raises `ConfigError` with the correct start command.

    If ``updates`` is None, updates are staged where possible, but not for servers on CUDA, whose own groups use NCCL.
    """
    paths = await routes.fetch_paths()
    if problem := flags.missing_routes(paths):
        raise _refusal(routes, {}, problem)
    info = await routes.get("/server_info")  # as it was started: /v1/models and /model_info name the last files loaded
    if problem := flags.wrong_setting(info):
        raise _refusal(routes, info, problem)
    directory = model_dir or Path(str(info.get("model_path")))
    config = config_of(directory)
    dtype = flags.dtype_of(info, config)
    if isinstance(dtype, Problem):
        raise _refusal(routes, info, dtype)
    vocab_size, specs = checkpoint_of(routes.url, directory, dtype)
    problem, streams = await _probed(routes, info)
    if problem:
        raise _refusal(routes, info, problem)
    why_not = flags.why_not_staged(routes.url, info, config)
    if specs is None and why_not is None:  # wrong shapes crash SGLang: it recovers by reading the same files again
        why_not = f"its checkpoint {str(directory)!r} cannot be read by this process; pass model_dir"
    if updates == "staged" and why_not is not None:
        raise ConfigError(f"{routes.url}: updates cannot be staged for this SGLang server: {why_not}")
    try:
        on_cuda = info["device"] == "cuda"
        staged = why_not is None and (updates == "staged" or (updates is None and not on_cuda))
        native = ("gloo", "nccl") if on_cuda else ("gloo",)
        limits = RequestLimits(
            vocab_size=vocab_size,
            max_model_len=int(info["max_req_input_len"]),
            largest_kept_set=int(info["sampling_mask_max_tokens"]),
            has_seeds=bool(info["enable_deterministic_inference"]),
        )
        capabilities = Capabilities(
            engine="sglang",
            engine_version=str(info["version"]),
            model=str(info["served_model_name"]),
            vocab_size=vocab_size,
            max_model_len=limits.max_model_len,
            dtype=dtype,
            in_flight_policies=tuple(InFlightPolicy),
            transports=receivable_transports(on_gpu=False) if staged else native,
            staging=staged,
            encodings=("bfloat16", "float8", "delta") if staged else (),
            partial_updates=staged,
            sharded=staged,
            partial_rollouts=True,
            lora=staged,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=int(info["tp_size"]),
            max_concurrent_sequences=int(info["internal_states"][0]["effective_max_running_requests_per_dp"]),
            streaming=streams,
            chat=flags.offers_chat(paths, info),
            seeds=limits.has_seeds,
            releases_memory=bool(info.get("enable_memory_saver") and info.get("enable_weights_cpu_backup")),
            scoring=True,
            max_top_k=min(MAX_ALTERNATIVES, vocab_size),
            candidates=True,
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ProtocolError(
            f"the answer of /server_info lacks {error}: this release of SGLang has a different interface than 0.5.23",
            routes.url,
        ) from error
    return Attached(capabilities, limits, specs, directory)


def _refusal(routes: EngineRoutes, info: Mapping[str, Any], problem: Problem) -> ConfigError:
    return ConfigError(
        f"{routes.url}: cannot attach to this SGLang server: {problem.text}. Restart it with\n"
        f"    {flags.restart_command(routes.url, info, problem.remedy)}"
    )


async def _probed(routes: EngineRoutes, info: Mapping[str, Any]) -> tuple[Problem | None, bool]:
    """Return a problem if logprobs are not those of the scaled logits, and whether streams carry version labels.

    A paused server is not probed; its streams count as unlabelled.
    """
    status, _ = await routes.ask("GET", "/ready")
    if status != 200:
        return None, False
    problem = flags.ignores_temperature(await routes.post("/generate", flags.probe_of_logprobs(0)))
    return problem, bool(info.get("incremental_streaming_output")) and await _labels_streams(routes)


async def _labels_streams(routes: EngineRoutes) -> bool:
    events = routes.events("/generate", flags.probe_of_streams(0))
    async with contextlib.aclosing(events):
        with protocol_errors("/generate"):
            first = await anext(events, None)
            return first is not None and first["meta_info"]["finish_reason"] is None and bool(version_labels_of(first))
