"""NVIDIA Dynamo with vLLM workers as an `InferenceEndpoint`. It is not certified, because it has never run on a real
deployment.

The code follows Dynamo's main branch of August 2026: ``components/src/dynamo/vllm/handlers.py`` for the routes of
workers, and the RL integration reference in its documentation for the frontend and discovery.

One endpoint is one frontend with all of its workers. Requests go to the frontend as completions of token ids. Updates
use the routes of every worker under ``/engine/``, because Dynamo cannot update the whole fleet: pause, load a
checkpoint directory that the workers can read, compare the versions that the workers then report, and resume. If any
step fails, no worker is resumed. Answers carry no version, so the endpoint is an `OwnedEndpoint`.

``update_weights_from_distributed`` is not used, because its body depends on the worker's extension.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from inflight.base.tasks import finish_all
from inflight.base.transport_registry import receivable_transports
from inflight.base.url_query import options_of_query
from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.dialects.completions import ROUTE, body_of, completion_of
from inflight.dialects.single_owner import OwnedEndpoint
from inflight.engines.requests import protocol_errors
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.engines.version_labels import ServedVersion, label_of, parse_label
from inflight.errors import ConfigError, ProtocolError, UpdateRefusedError
from inflight.model.checkpoint_specs import checkpoint_of, config_number, config_of
from inflight.wire import (
    Capabilities,
    Completion,
    GenerateRequest,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

WORKERS_ROUTE = "/v1/rl/workers"
DISCOVERY_PROTOCOL = 1
_PAUSE, _RESUME = "pause_generation", "resume_generation"
_LOAD, _VERSION = "update_weights_from_disk", "get_weight_version"
_NEEDED = (_PAUSE, _RESUME, _LOAD, _VERSION)
_INITIAL = "initial"
"""The version that a worker reports for the weights with which it was started."""


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """Facts that a deployment does not report itself, taken from the query of its URL."""

    discovery: str = ""
    """URL of the RL listener (DYN_RL_PORT), which lists the workers. If empty, this process does not send weights."""
    model_dir: str = ""
    """The checkpoint directory as seen by this process."""
    directory: str = ""
    """Where updates are written for the workers to load; they must see it under the same path."""
    dtype: str = ""
    """The dtype in which the workers compute (default: the dtype of the checkpoint)."""
    max_model_len: int = 0
    """Context length of the workers (default: from the checkpoint)."""
    max_concurrent: int = 256
    """Number of sequences that the deployment runs at a time."""
    logprobs: str = "raw"
    """``processed`` if every worker was started with --logprobs-mode processed_logprobs."""
    timeout_s: float = 600.0
    """How long, in seconds, a worker may take to pause and to load weights."""


class DynamoEndpoint(OwnedEndpoint):
    """The deployment whose frontend is at ``url``."""

    def __init__(
        self, url: str, options: DynamoOptions, *, control_timeout_s: float = 30.0, generate_timeout_s: float = 600.0
    ) -> None:
        super().__init__(EngineRoutes(url.rstrip("/"), api_key=None, control_timeout_s=control_timeout_s))
        self._options = options
        self._control_timeout_s = control_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._workers: dict[str, EngineRoutes] = {}

    async def _attach(self) -> tuple[Capabilities, Sequence[TensorSpec] | None]:
        options = self._options
        if not options.model_dir:
            raise ConfigError(f"{self.name}: Dynamo does not report its model; add ?model_dir=DIRECTORY to the URL")
        if bool(options.discovery) != bool(options.directory):
            raise ConfigError(f"{self.name}: updates require both discovery=URL and directory=DIRECTORY")
        if options.logprobs not in ("raw", "processed"):
            raise ConfigError(f"{self.name}: logprobs must be raw or processed, not {options.logprobs!r}")
        models = await self._routes.get("/v1/models")
        with protocol_errors("/v1/models"):
            model = str(models["data"][0]["id"])
        if options.discovery:
            self._workers = await self._discovered()
        directory = Path(options.model_dir)
        config = config_of(directory)
        dtype = options.dtype or str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        vocab_size, specs = checkpoint_of(self.name, directory, dtype)
        max_model_len = options.max_model_len or config_number(config, "max_position_embeddings")
        if max_model_len is None:
            raise ConfigError(
                f"{self.name}: the checkpoint does not specify its context length; add max_model_len=N to the URL"
            )
        can = Capabilities(
            engine="dynamo",
            engine_version="unknown",
            model=model,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            in_flight_policies=(InFlightPolicy.DRAIN,),
            transports=receivable_transports(on_gpu=False) if options.discovery else (),
            staging=True,
            version_binding="admission",
            logprob_kind=cast(Literal["raw", "processed"], options.logprobs),
            num_ranks=1,
            max_concurrent_sequences=options.max_concurrent,
            streaming=False,
            chat=False,
            seeds=False,
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )
        return can, specs

    async def _discovered(self) -> dict[str, EngineRoutes]:
        """Return the live workers by id, without changing anything. Raises `ConfigError`."""
        listener = EngineRoutes(self._options.discovery, api_key=None, control_timeout_s=self._control_timeout_s)
        try:
            answer = await listener.get(WORKERS_ROUTE)
        finally:
            await listener.aclose()
        if answer.get("protocol_version") != DISCOVERY_PROTOCOL:
            raise ConfigError(
                f"{self.name}: {WORKERS_ROUTE} has protocol version {answer.get('protocol_version')!r}, not 1"
            )
        found: dict[str, EngineRoutes] = {}
        with protocol_errors(WORKERS_ROUTE):
            for worker in answer["workers"]:
                name, url = str(worker["instance_id"]), str(worker.get("system_url", ""))
                missing = [route for route in _NEEDED if route not in worker.get("routes", ())]
                if worker.get("error") or missing or not url.startswith(("http://", "https://")):
                    raise ConfigError(
                        f"{self.name}: worker {name} cannot be updated: {worker.get('error') or ''} it lacks "
                        f"{', '.join(missing) or 'a system_url'}; start it with --enable-rl and DYN_SYSTEM_PORT"
                    )
                known = self._workers.get(name)
                found[name] = (
                    known
                    if known is not None and known.url == url
                    else EngineRoutes(url, api_key=None, control_timeout_s=self._control_timeout_s)
                )
        if not found:
            raise ConfigError(f"{self.name}: no worker is live; start them with --enable-rl")
        return found

    async def _served(self) -> ServedVersion:
        """Return the version that all workers serve. Raises `ConfigError` if they serve different weights."""
        if not self._workers:
            return ServedVersion(0, None)
        labels = {str(answer["version"]) for answer in await self._each(_VERSION, {})}
        if len(labels) > 1:
            raise ConfigError(
                f"{self.name}: the workers serve different weights: {', '.join(sorted(labels))}; load the same "
                "weights on all of them"
            )
        (label,) = labels
        return ServedVersion(0, None) if label == _INITIAL else parse_label(label)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Request an update. Raises `UpdateRefusedError` if workers have joined or left since the first call."""
        await self.capabilities()
        if self._options.discovery:
            live = {name: routes.url for name, routes in (await self._discovered()).items()}
            if live != {name: routes.url for name, routes in self._workers.items()}:
                raise UpdateRefusedError(
                    f"update to version {update.version} refused: the workers of {self.name} have changed since this "
                    "client connected; connect again"
                )
        await super().request_weight_update(update)

    async def _complete(self, request: GenerateRequest, index: int, version: int) -> Completion:
        can = await self.capabilities()
        body = body_of(request, model=can.model, room=can.max_model_len - len(request.prompt_token_ids))
        body["nvext"] = {"extra_fields": ["completion_token_ids"]}
        answer = await self._routes.request(ROUTE, body, self._generate_timeout_s)
        with protocol_errors(ROUTE):
            token_ids = [int(token_id) for token_id in answer["nvext"]["completion_token_ids"]]
            return completion_of(answer["choices"][0], token_ids, index, version)

    async def _replace(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of all workers. They resume only once all of them report the new version."""
        from safetensors.torch import save_file

        label = label_of(update.ref)
        with tempfile.TemporaryDirectory(dir=self._options.directory, prefix="inflight-") as written:
            file = Path(written) / "model.safetensors"
            held = {name: tensor.contiguous() for name, tensor in tensors.items()}
            await asyncio.to_thread(save_file, held, file, {"format": "pt"})
            await self._each(_PAUSE, {"mode": "wait", "clear_cache": True})
            await self._each(_LOAD, {"model_path": written, "weight_version": label})
        for answer in await self._each(_VERSION, {}):
            if answer.get("version") != label:
                raise ProtocolError(
                    f"a worker reports version {answer.get('version')!r} after the update to {label!r}: restart the "
                    "workers",
                    self.name,
                )
        await self._each(_RESUME, {})

    async def _each(self, route: str, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return every worker's answer. Raises `ProtocolError` unless the status in each body is ``ok``."""

        async def one(routes: EngineRoutes) -> Mapping[str, Any]:
            answer = await routes.post(f"/engine/{route}", body, self._options.timeout_s)
            if not isinstance(answer, dict) or answer.get("status") != "ok":
                raise ProtocolError(f"POST /engine/{route} failed: {error_text_of(answer)}", routes.url)
            return answer

        return await finish_all(*(one(routes) for routes in self._workers.values()))

    async def aclose(self) -> None:
        await super().aclose()
        for routes in self._workers.values():
            await routes.aclose()


class DynamoKind(EngineKind):
    """Only attaches to running deployments, because Dynamo's own tools start them."""

    name = "dynamo"

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        raise ConfigError("Dynamo starts its own deployments; attach with dynamo+http://FRONTEND:PORT?model_dir=...")

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for a URL whose query has the fields of `DynamoOptions`. Raises `ConfigError`."""
        address, _, query = url.partition("?")
        return DynamoEndpoint(
            address,
            options_of_query(DynamoOptions, query),
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


DYNAMO = DynamoKind()
