"""A server that has vLLM's routes, but not inflight's plug-in, as an `InferenceEndpoint`.

inflight can attach to any server that implements the four phases of a weight update (pause, start, update, finish) and
can then resume. Weights are staged in this process and written to a directory that the server reads. The protocol
cannot guarantee that a pause ends when its client dies, that only one client updates, or that the loaded weights are
those that were sent; docs/dialect.md lists the consequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.base.transport_registry import receivable_transports
from inflight.base.url_query import options_of_query
from inflight.contracts import AbortingEndpoint, EngineKind, EngineOptions, InferenceEndpoint, ReleasingEndpoint
from inflight.engines.detached_calls import ignore_engine_errors
from inflight.engines.requests import protocol_errors
from inflight.engines.routes import EngineRoutes
from inflight.engines.version_labels import label_of
from inflight.errors import ConfigError, UnsupportedError
from inflight.model.checkpoint_specs import checkpoint_of
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.wire import (
    Capabilities,
    ChatCompletionRequest,
    EndpointState,
    InFlightPolicy,
    Manifest,
    PromptImage,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)
from inflight_vllm.generating import LABEL, GeneratingEndpoint
from inflight_vllm.requests import ids_of
from inflight_vllm.updates import PAUSES

_LOAD = "/load"
"""The optional route that reports how many requests a server has."""
_NEEDED = ("/pause", "/resume", "/is_paused", "/start_weight_update", "/update_weights", "/finish_weight_update", LABEL)


@dataclass(frozen=True, slots=True)
class FourPhaseOptions:
    """Properties of a server, which the query of its URL specifies."""

    model_dir: str = ""
    """The path at which this process finds the checkpoint directory with which the server was started."""
    directory: str = ""
    """The directory to which updates are written for the server, which must see it under the same path."""
    max_concurrent: int = 64
    """Largest number of sequences that the server runs at a time."""
    seeds: bool = False
    """Whether the server honours seeds as the contract specifies (1) or not (0)."""
    timeout_s: float = 600.0
    """How long the server may take, in seconds, to pause and to load weights."""


class FourPhaseEndpoint(GeneratingEndpoint, ReceivingEndpoint, AbortingEndpoint, ReleasingEndpoint, PausableEngine):
    """The server at ``url``. ``api_key`` is sent to all of its routes."""

    _release_arguments = ()

    def __init__(
        self,
        url: str,
        options: FourPhaseOptions,
        *,
        api_key: str | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
    ) -> None:
        routes, requests = (
            EngineRoutes(url.rstrip("/"), api_key=api_key, control_timeout_s=control_timeout_s) for _ in range(2)
        )
        super().__init__(routes, requests, close_s=30.0, generate_timeout_s=generate_timeout_s)
        self._options = options
        self._paused_since = 0.0
        self._reports_load = False  # set by `_attach`
        self._ref: UpdateRef | None = None
        """The update for which sampling was most recently paused."""

    async def _attach(self) -> Capabilities:
        from inflight.weights.receive.staged_sink import StagedSink
        from inflight.weights.transports import make_receiver

        options = self._options
        models, info = await asyncio.gather(
            self._routes.get("/v1/models"), self._routes.get("/server_info?config_format=json")
        )
        for path in _NEEDED:
            method = "GET" if path in (LABEL, "/is_paused") else "OPTIONS"
            status, _ = await self._routes.ask(method, path)
            if status == 404:
                raise ConfigError(f"{self.name}: the server has no route {path}; vLLM needs VLLM_SERVER_DEV_MODE=1")
        with protocol_errors("/v1/models or /server_info"):
            card, settings = models["data"][0], info["vllm_config"]
            dtype = str(settings["model_config"]["dtype"]).removeprefix("torch.")
            model, max_model_len = str(card["id"]), int(card["max_model_len"])
        self._reports_load = (await self._routes.ask("GET", _LOAD))[0] == 200
        vocab_size, specs = checkpoint_of(self.name, Path(options.model_dir), dtype)
        can = Capabilities(
            engine="fourphase",
            engine_version="unknown",
            model=model,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            in_flight_policies=tuple(InFlightPolicy),
            transports=receivable_transports(on_gpu=False),
            staging=True,
            partial_rollouts=True,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=options.max_concurrent,
            streaming=False,
            chat=False,
            seeds=options.seeds,
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )
        self._sink = StagedSink(make_receiver)
        self._updates = UpdateReceiver(self, self._sink, specs, can)
        await self._refresh_label()
        return can

    # --------------------------------------------------------------------------------------------------- weights

    async def request_weight_update(self, update: WeightUpdate) -> None:
        receiver = await self.receiver()
        if receiver.session.update is None:
            await self._refresh_label()
        await receiver.request(update)

    async def weight_version(self) -> WeightVersion:
        """Return the served version. The state is PAUSED even if another client paused the server.

        ``num_running`` counts this client's sequences.
        """
        can = await self.capabilities()
        session = self._updates.session
        state = session.state
        if session.update is None:
            answer, _ = await asyncio.gather(self._routes.get("/is_paused"), self._refresh_label())
            state = session.state
            if answer.get("is_paused") and state is EndpointState.READY and session.update is None:
                state = EndpointState.PAUSED
        running = min(self._gate.num_sent, can.max_concurrent_sequences)
        if running and self._reports_load:  # a request that was sent may not have arrived yet
            running = min(running, int((await self._routes.get(_LOAD)).get("server_load", running)))
        answer = self._updates.weight_version(num_running=running, last_update=self._last.timings)
        return answer.model_copy(update={"state": state})

    async def num_running(self) -> int:
        return self._gate.num_sent

    async def pause(self, update: WeightUpdate) -> None:
        self._gate.is_open.clear()
        self._ref = update.ref
        try:
            await self._routes.post(f"/pause?{PAUSES[update.in_flight]}", timeout_s=self._options.timeout_s)
        except BaseException:
            await asyncio.shield(self._background.start(self._resume()))
            raise
        self._paused_since = time.monotonic()

    async def apply(self, update: WeightUpdate) -> None:
        """Load the update. Until the server has loaded all of it, the label marks the weights as torn."""
        started, timeout_s = time.monotonic(), self._options.timeout_s
        async with self._written() as directory:
            await self._routes.post("/update_weight_version", {"new_version": label_of(update.ref, torn=True)})
            await self._routes.post("/start_weight_update", timeout_s=timeout_s)
            await self._routes.post("/update_weights", {"update_info": {"weight_dir": directory}}, timeout_s)
            body = {"weight_version": label_of(update.ref)}
            await self._routes.post("/finish_weight_update", body, timeout_s)
        load_s = time.monotonic() - started
        await self._routes.post("/resume")
        self._gate.is_open.set()
        self._last.timings = UpdateTimings(paused_s=time.monotonic() - self._paused_since, load_s=load_s)

    async def resume(self) -> None:
        await self._resume()

    async def fail_requests(self) -> None:
        self._gate.is_open.set()
        if self._ref is not None:
            await self._routes.post("/update_weight_version", {"new_version": label_of(self._ref, torn=True)})
        await self._routes.post(f"/pause?{PAUSES[InFlightPolicy.ABORT]}")

    async def _resume(self) -> None:
        await ignore_engine_errors(self._routes.post("/resume"))
        self._gate.is_open.set()

    @contextlib.asynccontextmanager
    async def _written(self) -> AsyncIterator[str]:
        """Write the received weights to a checkpoint directory, which is deleted when the context ends."""
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in self._sink.take()}
        with tempfile.TemporaryDirectory(dir=self._options.directory, prefix="inflight-") as written:
            await asyncio.to_thread(save_file, tensors, Path(written) / "model.safetensors", {"format": "pt"})
            shutil.copy(Path(self._options.model_dir) / "config.json", written)
            yield written

    # ------------------------------------------------------------------------------------------------ generation

    async def _end(self, names: Sequence[str]) -> None:
        await self._routes.post("/abort_requests", {"request_ids": ids_of(names)})

    async def _render(self, request: ChatCompletionRequest) -> tuple[Sequence[int], Sequence[PromptImage]]:
        raise UnsupportedError(f"{self.name} does not support chat")

    async def _decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        raise UnsupportedError(f"{self.name} does not support chat")


class FourPhaseKind(EngineKind):
    """Servers that inflight does not start; it only attaches to them."""

    name = "fourphase"

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        raise ConfigError(
            "servers of the kind fourphase cannot be started by inflight: start the server with its own command, "
            "and attach with fourphase+http://HOST:PORT?model_dir=..."
        )

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for a URL whose query has the fields of `FourPhaseOptions`.

        Raises `ConfigError` if the query is invalid or if one of its directories does not exist.
        """
        address, _, query = url.partition("?")
        options = options_of_query(FourPhaseOptions, query)
        for name in ("model_dir", "directory"):
            if not Path(given := getattr(options, name)).is_dir() or not given:
                is_not = f"{given!r}, which is not a directory" if given else "missing"
                raise ConfigError(
                    f"{address}: {name} is {is_not}; add ?model_dir=DIRECTORY&directory=DIRECTORY to the URL"
                )
        return FourPhaseEndpoint(
            address,
            options,
            api_key=token,
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


FOUR_PHASES = FourPhaseKind()
"""The engine kind `fourphase`: servers with vLLM's own four phases of an update."""
