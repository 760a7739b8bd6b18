"""Decides which models of a Tinker API server have ranks: at most as many as the backend can train at a time.

Any other model is parked: its state is on disk, and it receives ranks again when a client calls it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from inflight.dialects.tinker.backend import Backend, Training
from inflight.dialects.tinker.tinker_model import MAX_KEPT_TOKENS, TinkerModel
from inflight.errors import InflightError, UnsupportedError

_TURN_S = 30.0
"""How long, in seconds, a model that is called again and again keeps its ranks while another model waits for them."""


class ModelSlots:
    """The ranks of a server's models. Belongs to one event loop. Methods raise `InflightError`."""

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, TinkerModel],
        directory: Path,
        retire: Callable[[Sequence[TinkerModel]], Awaitable[bool]],
    ) -> None:
        self._backend = backend
        self._models = models
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)  # parked models end with their server
        self._retire = retire
        """Ends a model whose client no longer needs it, and returns whether there was one."""
        self._moving = asyncio.Lock()
        """Held while a model receives ranks."""
        self._released = asyncio.Event()

    async def start(self, model: TinkerModel, seed: int | None) -> None:
        """Start the ranks of a new model."""
        async with self._moving:
            await self._make_room()
            model.training = await self._backend.create(model.model_id, model.rank, seed)
            model.has_ranks_since = time.monotonic()

    @asynccontextmanager
    async def ranks(self, model: TinkerModel) -> AsyncIterator[Training]:
        """Yield the ranks of a model, which keeps them until the context is closed."""
        if model.is_parking or model.parked is not None:
            async with self._moving:
                if model.parked is not None:
                    await self._unpark(model)
        model.num_running += 1
        try:
            with model.ranks() as training:
                yield training
        finally:
            model.num_running -= 1
            asyncio.get_running_loop().call_soon(self._released.set)  # once the call has ended

    async def _unpark(self, model: TinkerModel) -> None:
        await self._make_room()
        training = await self._backend.create(model.model_id, model.rank, None)
        try:
            await model.unpark(training)
        except BaseException:
            await training.aclose()
            raise

    async def _make_room(self) -> None:
        """End or park a model if no slot is free. Raises `UnsupportedError` if no model can be parked."""
        while True:
            alive = [model for model in self._models.values() if model.training is not None]
            if len(alive) < self._backend.max_models or await self._retire(alive):
                return
            candidates = [model for model in alive if model.can_be_parked]
            if not candidates:
                raise UnsupportedError(
                    f"these models are in training: {', '.join(it.model_id for it in alive)}; this server trains at "
                    f"most {len(alive)} at a time (--models), and none of these can be parked, because samplers of the "
                    f"kind 'inflight' follow them or they have a gradient of more than {MAX_KEPT_TOKENS} tokens: close "
                    "a client, or wait until a client that ended without closing has been silent for a minute"
                )
            if unused := [model for model in candidates if not (model.num_running or model.calls.num_open)]:
                await self._park(min(unused, key=lambda it: it.last_request_at))
                continue
            model = min(candidates, key=lambda it: it.has_ranks_since)
            remaining_s = model.has_ranks_since + _TURN_S - time.monotonic()
            if remaining_s > 0:
                await self._wait_for_release(remaining_s)
            else:
                await self._park(model)

    async def _park(self, model: TinkerModel) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        model.is_parking = True
        try:
            while model.num_running:
                await self._wait_for_release()
            await model.park(self._directory / uuid.uuid4().hex)
        except InflightError:
            if model.training is not None:  # otherwise the model has ended, and its slot is free
                raise
        finally:
            model.is_parking = False

    async def _wait_for_release(self, timeout_s: float | None = None) -> None:
        self._released.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._released.wait()
