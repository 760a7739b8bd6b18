"""The state of a Tinker API server: sessions, models in training and their calls, and saved models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from inflight.base.tasks import finish_all
from inflight.base.validation import describe_problems
from inflight.dialects.tinker.backend import Backend
from inflight.dialects.tinker.checkpoints import CheckpointFacts, CheckpointStore, Kind, StoredCheckpoint, iso_time
from inflight.dialects.tinker.data import datums_of, output_message
from inflight.dialects.tinker.futures import Futures, NotFoundError, Result
from inflight.dialects.tinker.losses import loss_named
from inflight.dialects.tinker.model_slots import ModelSlots
from inflight.dialects.tinker.ordering import OrderedCalls
from inflight.dialects.tinker.packing import check_inputs
from inflight.dialects.tinker.protobuf import parse
from inflight.dialects.tinker.requests import (
    MAX_TTL_S,
    AdamParams,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    LoadWeights,
    NumberedCall,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from inflight.dialects.tinker.samplers import SamplingSessions, check_base
from inflight.dialects.tinker.tinker_model import TinkerModel
from inflight.errors import InvalidRequestError, UnsupportedError

IDLE_S = 1800.0
"""Seconds without a heartbeat after which a session ends. Clients send a heartbeat every 10 s, unless suspended."""
_NUM_FINISHED = 1000
"""Number of finished sessions that can still be queried."""
SILENT_S = 60.0
"""Seconds for which a client must be silent before a new model may replace its model. The state of the replaced model
is kept for a week.
"""


@dataclass(eq=False, slots=True)
class _Session:
    last_heartbeat: float
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None
    is_finished: bool = False


class TinkerService:
    """The server's state. Belongs to one event loop. Methods raise `InflightError` and `NotFoundError`.

    Calls of a model that return a request id run in the order of their numbers, and their futures report failures.
    """

    def __init__(self, backend: Backend, directory: Path) -> None:
        self.backend = backend
        directory = directory.absolute()  # ranks may have another working directory
        self.store = CheckpointStore(directory / "checkpoints")
        self.futures = Futures()
        self.is_stopping = False
        """Whether the server refuses every further request."""
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, TinkerModel] = {}
        self._slots = ModelSlots(backend, self._models, directory / "parked", self._retire)
        self.sampling = SamplingSessions(backend, self.store, self.futures, directory / "snapshots")

    # --------------------------------------------------------------------------------------------------- sessions

    def create_session(self, asked: CreateSession) -> str:
        session_id = f"session-{uuid.uuid4().hex[:16]}"
        self._sessions[session_id] = _Session(time.monotonic(), asked.user_metadata, asked.display_name)
        return session_id

    def session_ids(self) -> list[str]:
        """Return the ids of the sessions since the server was started, newest first."""
        return list(reversed(self._sessions))

    def session_info(self, session_id: str) -> dict[str, Any]:
        """Return the entry of a session. Raises `NotFoundError`."""
        session = self._session(session_id)
        return {
            "training_run_ids": [it.model_id for it in self._models.values() if it.session_id == session_id],
            "sampler_ids": self.sampling.ids_of(session_id),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def heartbeat(self, session_id: str) -> bool:
        """Record that a client is alive; return False if its session has finished."""
        session = self._session(session_id)
        session.last_heartbeat = time.monotonic()
        return not session.is_finished

    async def finish_session(self, session_id: str) -> None:
        """End a session and its models; repeated calls do nothing."""
        session = self._session(session_id)
        if not session.is_finished:
            session.is_finished = True
            await self._end_models(session_id)

    async def end_idle_sessions(self, interval_s: float = 30.0) -> None:
        """Until cancelled, end sessions without a heartbeat for `IDLE_S`, and delete unused and expired files."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.store.delete_expired)
            for session_id, session in list(self._sessions.items()):
                if not session.is_finished and time.monotonic() - session.last_heartbeat > IDLE_S:
                    await self.finish_session(session_id)
            await self._delete_snapshots()
            self._forget_sessions()

    def _forget_sessions(self) -> None:
        """Discard all but the newest finished sessions, together with their models and sampling sessions."""
        finished = [key for key, it in self._sessions.items() if it.is_finished]
        for session_id in finished[: max(0, len(finished) - _NUM_FINISHED)]:
            del self._sessions[session_id]
            self.sampling.forget(session_id)
            for model in [it for it in self._models.values() if it.session_id == session_id]:
                del self._models[model.model_id]

    async def _delete_snapshots(self) -> None:
        def is_over(session_id: str) -> bool:
            return session_id not in self._sessions or self._sessions[session_id].is_finished

        await self.sampling.delete_snapshots(is_over)

    async def _end_models(self, session_id: str) -> None:
        for model in [it for it in self._models.values() if it.session_id == session_id]:
            await model.end("its session has finished")

    async def _retire(self, alive: Sequence[TinkerModel]) -> bool:
        """End the model of a client that has been silent for `SILENT_S`, and keep the model's state for a week."""
        model = min(alive, key=lambda it: self._sessions[it.session_id].last_heartbeat)
        silent_s = time.monotonic() - self._sessions[model.session_id].last_heartbeat
        if silent_s < SILENT_S:
            return False
        name = f"retired-{uuid.uuid4().hex[:8]}"
        asked = SaveWeights(model_id=model.model_id, seq_id=0, ttl_seconds=7 * 86_400)
        await self._save(model, "weights", name, asked)
        await model.end(f"its client was silent for {silent_s:.0f} s, and another model needed its slot")
        return True

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            raise NotFoundError(f"there is no session {session_id!r}; the server may have been restarted")
        return self._sessions[session_id]

    # ----------------------------------------------------------------------------------------------------- models

    def create_model(self, asked: CreateModel) -> str:
        """Return the request id of a future that creates a model. A wrong base model raises `InvalidRequestError`."""
        check_base(self.backend, asked.base_model)
        _check_optimizer(asked.optimizer_config)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        return self._begin_model(asked.session_id, model_id, asked.rank, asked.lora_config, asked.user_metadata, None)

    def load_model(self, asked: LoadWeights) -> str:
        """Return the request id of a future that creates a model from a checkpoint."""
        if asked.session_id is None or asked.model_seq_id is None:
            raise InvalidRequestError("load_weights needs a session_id and a model_seq_id, or a model_id and a seq_id")
        if asked.base_model is not None:
            check_base(self.backend, asked.base_model)
        _check_optimizer(asked.optimizer_config)
        checkpoint = self._checkpoint_to_load(asked)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        loaded = (checkpoint.path, asked.optimizer, asked.path)
        return self._begin_model(
            asked.session_id, model_id, checkpoint.facts.lora_rank, None, asked.user_metadata, loaded
        )

    def _begin_model(
        self,
        session_id: str,
        model_id: str,
        rank: int,
        lora: Any,
        user_metadata: Mapping[str, Any] | None,
        loaded: tuple[Path, bool, str] | None,
    ) -> str:
        session = self._session(session_id)
        if session.is_finished:
            raise InvalidRequestError(f"session {session_id!r} has finished")
        if model_id in self._models:
            return self._models[model_id].created
        if lora is not None and rank and not (lora.train_mlp and lora.train_attn):
            raise UnsupportedError(
                "a LoRA always covers all linear layers of the decoder: train_mlp and train_attn must be true"
            )
        model = self._models[model_id] = TinkerModel(
            model_id, session_id, rank, user_metadata, OrderedCalls(self.futures)
        )

        async def create() -> Result:
            try:
                await self._slots.start(model, None if lora is None else lora.seed)
                if loaded is not None:
                    async with self._slots.ranks(model) as training:
                        await training.load(loaded[0], optimizer=loaded[1])
                if session.is_finished or model.end_reason:
                    raise InvalidRequestError(f"model {model_id!r} has ended before it was ready")
            except BaseException:
                self._models.pop(model_id, None)
                await model.end("the model could not be created")
                raise
            if loaded is None:
                return {"model_id": model_id, "type": "create_model"}
            return {"path": loaded[2], "model_id": model_id, "type": "load_weights"}

        model.created = self.futures.start(create)
        return model.created

    def unload_model(self, model_id: str) -> str:
        """Return the request id of a future that ends a model; calls that have not been executed fail."""
        model = self._model(model_id)

        async def execute() -> Result:
            await model.end("it was unloaded")
            return {"model_id": model_id, "status": "unloaded", "type": "unload_model"}

        return self.futures.start(execute)

    def info(self, model_id: str) -> dict[str, Any]:
        """Return the information that clients request about a model."""
        model = self._model(model_id)
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self.backend.model_name,
            "model_data": {
                "model_name": self.backend.model_name,
                "tokenizer_id": str(self.backend.model_dir.absolute()),
            },
            "is_lora": model.rank > 0,
            "lora_rank": model.rank,
        }

    def _model(self, model_id: str) -> TinkerModel:
        model = self._models.get(model_id)
        if model is None:
            raise NotFoundError(
                f"there is no model {model_id!r}; after a restart of the server, create one from a checkpoint"
            )
        model.last_request_at = time.time()
        return model

    # --------------------------------------------------------------------------------------------------- training

    def forward_backward(self, content: bytes) -> tuple[str, str]:
        """Return the request id and the model id for a protobuf ``ForwardBackwardRequest``."""
        request = parse("ForwardBackwardRequest", content)
        model = self._model(request.model_id)
        loss_fn, forward_only = request.loss_fn, request.forward_only

        async def execute() -> Result:
            settings = dict(request.loss_fn_config)
            for name, value in request.loss_fn_config_v2.items():
                if value.WhichOneof("value") != "number":
                    raise InvalidRequestError(f"the setting {name!r} of loss_fn {loss_fn!r} must be a number")
                settings[name] = value.number
            loss, checked = loss_named(loss_fn, settings)
            data = datums_of(request, vocab_size=self.backend.vocab_size, max_tokens=self.backend.max_model_len)
            check_inputs(data, loss_fn, loss)
            async with self._slots.ranks(model) as training:
                if forward_only:
                    result = await training.forward_backward(data, loss_fn, checked, forward_only=True)
                else:
                    result = await model.forward_backward(training, data, loss_fn, checked)
            return output_message(result.logprobs, result.losses, {"loss:sum": result.loss})

        return model.calls.submit(request.seq_id, content, execute), model.model_id

    def optim_step(self, asked: OptimStep, content: bytes) -> str:
        model = self._model(asked.model_id)

        async def execute() -> Result:
            if asked.optimizer_params is not None or asked.adam_params is None:
                raise UnsupportedError("only adam_params are supported")
            try:
                settings = AdamParams.model_validate(asked.adam_params).settings()
            except pydantic.ValidationError as error:
                raise InvalidRequestError(f"adam_params: {describe_problems(error, AdamParams)}") from error
            async with self._slots.ranks(model) as training:
                try:
                    return {"metrics": dict(await training.step(settings)), "type": "optim_step"}
                finally:
                    model.forget_gradient()

        return model.calls.submit(asked.seq_id, content, execute)

    def save_weights(self, asked: SaveWeights, content: bytes) -> str:
        model = self._model(asked.model_id)

        async def execute() -> Result:
            if asked.path is None:
                raise InvalidRequestError("save_weights needs a path, the name of the checkpoint")
            return {"path": await self._save(model, "weights", asked.path, asked), "type": "save_weights"}

        return model.calls.submit(asked.seq_id, content, execute)

    def save_for_sampler(self, asked: SaveWeightsForSampler, content: bytes) -> str:
        model = self._model(asked.model_id)

        async def execute() -> Result:
            if asked.path is not None:
                path = await self._save(model, "sampler_weights", asked.path, asked)
                return {"path": path, "type": "save_weights_for_sampler"}
            sampler_id = f"{model.session_id}:sample:{asked.sampling_session_seq_id}"
            async with self._slots.ranks(model) as training:
                if asked.kind == "inflight":
                    await training.publish()
                    model.is_followed = True
                    self.sampling.follow(sampler_id, model.session_id, model.model_id)
                else:
                    await self.sampling.keep_snapshot(sampler_id, model.session_id, training)
                    await self._delete_snapshots()
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return model.calls.submit(asked.seq_id, content, execute)

    def save_external(self, asked: NumberedCall, content: bytes) -> str:
        async def execute() -> Result:
            raise UnsupportedError(
                "save_weights_external is not supported: save_state already writes the Hugging Face format, on the "
                "disk of the server"
            )

        return self._model(asked.model_id).calls.submit(asked.seq_id, content, execute)

    def load_weights(self, asked: LoadWeights, content: bytes) -> str:
        """Return the request id of a future that loads a checkpoint into a model that has received no other call."""
        if asked.model_id is None or asked.seq_id is None:
            return self.load_model(asked)
        model = self._model(asked.model_id)

        async def execute() -> Result:
            if asked.seq_id != 1:
                raise InvalidRequestError(
                    f"LoadWeights is not permitted with seq_id {asked.seq_id}: load_state must be the first call of a "
                    "model; use create_training_client_from_state instead"
                )
            checkpoint = self._checkpoint_to_load(asked)
            if checkpoint.facts.lora_rank != model.rank:
                raise InvalidRequestError(
                    f"{asked.path} has the LoRA rank {checkpoint.facts.lora_rank}, but the model has {model.rank} (0 "
                    "means that all weights are trained): use create_training_client_from_state instead"
                )
            async with self._slots.ranks(model) as training:
                await training.load(checkpoint.path, optimizer=asked.optimizer)
            return {"path": asked.path, "model_id": model.model_id, "type": "load_weights"}

        return model.calls.submit(asked.seq_id, content, execute)

    def _checkpoint_to_load(self, asked: LoadWeights) -> StoredCheckpoint:
        checkpoint = self.store.find(asked.path)
        if checkpoint.kind != "weights" and asked.optimizer:
            raise InvalidRequestError(f"{asked.path} is a checkpoint for sampling: it has no optimizer state")
        return checkpoint

    async def _save(self, model: TinkerModel, kind: Kind, name: str, asked: SaveWeights) -> str:
        if asked.ttl_seconds is not None and not 1 <= asked.ttl_seconds <= MAX_TTL_S:
            raise InvalidRequestError(f"ttl_seconds must be from 1 to {MAX_TTL_S}, not {asked.ttl_seconds}")
        path = self.store.place(model.model_id, kind, name, overwrite=asked.overwrite)
        async with self._slots.ranks(model) as training:
            await training.save(path)
        expires_at = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
        facts = CheckpointFacts(self.backend.model_name, model.rank, time.time(), asked.user_metadata, expires_at)
        await asyncio.to_thread(self.store.complete, path, facts)
        saved = f"tinker://{model.model_id}/{kind}/{name}"
        if kind == "weights":
            model.last_saved = saved
        return saved

    # --------------------------------------------------------------------------------------------------- sampling

    def create_sampler(self, asked: CreateSamplingSession) -> str:
        """Create a sampling session unless it exists, and return its id."""
        self._session(asked.session_id)
        return self.sampling.create(asked)

    # ------------------------------------------------------------------------------------------------------- lists

    def training_run(self, model_id: str) -> dict[str, Any]:
        """Return the entry of a model that is in training or has checkpoints. Raises `NotFoundError`."""
        saved, model = self.store.of_model(model_id), self._models.get(model_id)
        if not saved and model is None:
            raise NotFoundError(f"there is no training run {model_id!r}")
        rank = saved[-1].facts.lora_rank if model is None else model.rank
        last = saved[-1].facts.saved_at if model is None else model.last_request_at
        newest = {it.kind: it.as_json() for it in saved}
        return {
            "training_run_id": model_id,
            "base_model": self.backend.model_name,
            "model_owner": "inflight",
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "corrupted": False,
            "last_request_time": iso_time(last),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": None if model is None else model.user_metadata,
        }

    def training_runs(self) -> list[dict[str, Any]]:
        """Return the entries of all models, newest first."""
        ids = {*self._models, *(it for it in self.store.model_ids() if self.store.of_model(it))}
        return sorted((self.training_run(it) for it in ids), key=lambda it: str(it["last_request_time"]), reverse=True)

    async def aclose(self) -> None:
        """Refuse further requests, cancel running calls, and end all models."""
        self.is_stopping = True
        await self.futures.aclose()
        models = [model.training for model in self._models.values() if model.training is not None]
        await finish_all(*(training.aclose() for training in models))


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise UnsupportedError(f"optimizer {config['type']!r} is not supported: use adamw")
