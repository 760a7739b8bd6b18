"""Sampling sessions of a Tinker API server: the weights from which each one samples, and its calls."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.dialects.tinker.backend import Backend, BaseWeights, StoredWeights, Training, TrainingWeights, Weights
from inflight.dialects.tinker.checkpoints import CheckpointStore
from inflight.dialects.tinker.futures import Futures, NotFoundError, Result
from inflight.dialects.tinker.requests import CreateSamplingSession, Sample
from inflight.dialects.tinker.sampling import sample_from
from inflight.errors import InvalidRequestError, UnreachableError
from inflight.wire import Completion, VersionSpan

_SNAPSHOT_S = 3600.0
"""How long after its last use a snapshot is deleted, in seconds."""
_NUM_SNAPSHOTS = 16
"""Maximum number of snapshots. Beyond it, the least recently used one is deleted: each is as large as the model, and
the SDK does not report when a program no longer needs one.
"""
_NUM_TRIES = 3
"""Maximum number of attempts to sample if the server ends during each of them."""
_NUM_SEQUENCES = 65536
"""Number of sampled sequences whose version spans are kept."""


@dataclass(eq=False, slots=True)
class _Sampler:
    session_id: str
    weights: Weights
    model_path: str | None = None
    snapshot: Path | None = None
    """The directory of the session's snapshot, a checkpoint to which nothing else refers."""
    used_at: float = field(default_factory=time.monotonic)
    num_joined: int = 0
    """Number of clients that have joined after the first."""


class SamplingSessions:
    """The sampling sessions since the server was started. Belongs to one event loop.

    Methods raise `InflightError` and `NotFoundError`.
    """

    def __init__(self, backend: Backend, store: CheckpointStore, futures: Futures, snapshots: Path) -> None:
        self._backend = backend
        self._store = store
        self._futures = futures
        self._snapshots = snapshots
        shutil.rmtree(snapshots, ignore_errors=True)  # sampling sessions end with their server
        self._samplers: dict[str, _Sampler] = {}
        self._sampled: dict[tuple[str, int], tuple[str, list[str]]] = {}
        """Request id and sequence ids of each numbered sample, so that a repeated request is recognized."""
        self._spans: OrderedDict[str, tuple[VersionSpan, ...]] = OrderedDict()
        """The version spans of each sequence that has been sampled, by the sequence's id."""

    def ids_of(self, session_id: str) -> list[str]:
        """Return the ids of a session's sampling sessions."""
        return [key for key, it in self._samplers.items() if it.session_id == session_id]

    def follow(self, sampler_id: str, session_id: str, model_id: str) -> None:
        """Let a sampling session sample from a model in training, with the most recently published weights."""
        self._samplers[sampler_id] = _Sampler(session_id, TrainingWeights(model_id))

    async def keep_snapshot(self, sampler_id: str, session_id: str, training: Training) -> None:
        """Let a sampling session sample from a copy of the current weights of a model in training."""
        snapshot = self._snapshots / uuid.uuid4().hex
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        await training.save(snapshot)
        self._samplers[sampler_id] = _Sampler(session_id, StoredWeights(snapshot), snapshot=snapshot)
        for unused in ("trainer", "adapter"):
            await asyncio.to_thread(shutil.rmtree, snapshot / unused, ignore_errors=True)

    async def delete_snapshots(self, is_finished: Callable[[str], bool]) -> None:
        """Delete snapshots that belong to finished sessions, have long been unused, or exceed the maximum number."""
        of_use = sorted(
            ((key, it) for key, it in self._samplers.items() if it.snapshot is not None), key=lambda it: it[1].used_at
        )
        for i, (sampler_id, sampler) in enumerate(of_use):
            is_over = is_finished(sampler.session_id)
            is_unused = time.monotonic() - sampler.used_at > _SNAPSHOT_S
            if sampler.snapshot is not None and (is_over or is_unused or i < len(of_use) - _NUM_SNAPSHOTS):
                self._samplers.pop(sampler_id, None)
                await asyncio.to_thread(shutil.rmtree, sampler.snapshot, ignore_errors=True)

    def forget(self, session_id: str) -> None:
        """Discard the sampling sessions of a finished session. Their snapshots have already been deleted."""
        for sampler_id in self.ids_of(session_id):
            del self._samplers[sampler_id]

    def create(self, asked: CreateSamplingSession) -> str:
        """Create a sampling session unless it exists, and return its id."""
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._samplers.setdefault(
            sampler_id, _Sampler(asked.session_id, *self._weights(asked.base_model, asked.model_path))
        )
        return sampler_id

    def join(self, sampler_id: str) -> int:
        """Return the number of another client of a sampling session; the first client has number 0."""
        sampler = self._sampler(sampler_id)
        sampler.num_joined += 1
        return sampler.num_joined

    def info(self, sampler_id: str) -> dict[str, Any]:
        sampler = self._sampler(sampler_id)
        found = {"sampler_id": sampler_id, "base_model": self._backend.model_name}
        return found if sampler.model_path is None else {**found, "model_path": sampler.model_path}

    def sample(self, asked: Sample) -> tuple[str, list[str]]:
        """Begin to sample, and return the future's request id and an id for each sequence."""
        weights: Weights
        key = None
        if asked.sampling_session_id is not None:
            sampler = self._sampler(asked.sampling_session_id)
            weights, sampler.used_at = sampler.weights, time.monotonic()
            key = None if asked.seq_id is None else (asked.sampling_session_id, asked.seq_id)
            if key in self._sampled and self._sampled[key][0] in self._futures:
                return self._sampled[key]
        else:
            weights, _ = self._weights(asked.base_model, asked.model_path)
        sequence_ids = [f"sequence-{uuid.uuid4().hex}" for _ in range(asked.num_samples)]

        async def execute() -> Result:
            try:
                asked.token_ids()
            except ValueError as error:
                raise InvalidRequestError(f"the prompt is invalid: {error}") from error
            content, completions = await self._sampled_from(weights, asked)
            for sequence_id, completion in zip(sequence_ids, completions, strict=True):
                self._spans[sequence_id] = tuple(completion.version_spans)
            while len(self._spans) > _NUM_SEQUENCES:
                self._spans.popitem(last=False)
            return content

        found = self._futures.start(execute, is_repeatable=True), sequence_ids
        if key is not None:
            self._sampled[key] = found
            while len(self._sampled) > _NUM_SEQUENCES:
                del self._sampled[next(iter(self._sampled))]
        return found

    async def _sampled_from(self, weights: Weights, asked: Sample) -> tuple[bytes, Sequence[Completion]]:
        """Sample, and try again if the server ends before it has answered."""
        for is_last in (*[False] * (_NUM_TRIES - 1), True):
            try:
                async with self._backend.sampling_from(weights) as endpoint:
                    return await sample_from(endpoint, asked, self._backend.max_model_len)
            except UnreachableError:
                if is_last:
                    raise
                await asyncio.sleep(1.0)
        raise AssertionError

    def spans(self, sequence_id: str) -> list[dict[str, int]]:
        """Return the version spans of a sampled sequence. Raises `NotFoundError`."""
        if sequence_id not in self._spans:
            raise NotFoundError(f"no sampled sequence {sequence_id!r} is known")
        return [span.model_dump() for span in self._spans[sequence_id]]

    def _sampler(self, sampler_id: str) -> _Sampler:
        if sampler_id not in self._samplers:
            raise NotFoundError(
                f"sampling session {sampler_id!r} does not exist: the server has been restarted, or the snapshot was "
                f"deleted (the {_NUM_SNAPSHOTS} used most recently are kept for {_SNAPSHOT_S:g} s)"
            )
        return self._samplers[sampler_id]

    def _weights(self, base_model: str | None, model_path: str | None) -> tuple[Weights, str | None]:
        if model_path is not None:
            return StoredWeights(self._store.find(model_path).path), model_path
        if base_model is None:
            raise InvalidRequestError("the request must name a base_model or a model_path")
        check_base(self._backend, base_model)
        return BaseWeights(), None


def check_base(backend: Backend, name: str | None) -> None:
    """Raise `InvalidRequestError` unless a request names the base model of the server."""
    known = {backend.model_name, str(backend.model_dir)}
    if name not in known:
        raise InvalidRequestError(f"this server does not serve the base model {name!r}: request {backend.model_name!r}")
