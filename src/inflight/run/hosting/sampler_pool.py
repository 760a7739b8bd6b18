"""Servers that serve the weights that requests ask for. Each server serves one set of weights at a time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from inflight.contracts import InferenceEndpoint
from inflight.dialects.tinker.backend import BaseWeights, StoredWeights, TrainingWeights, Weights
from inflight.errors import BusyError, UnsupportedError, transfer_error
from inflight.run.hosting.training import HostedTraining
from inflight.run.updates_config import UpdatesSection
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.stored import CheckpointWeights
from inflight.weights.transports.groups import local_address_for

_WAIT_S = 600.0
"""How long a request waits for a server that may switch to its weights."""


@dataclass(eq=False, slots=True)
class _Sampler:
    url: str
    endpoint: InferenceEndpoint
    weights: Weights | None = field(default_factory=BaseWeights)
    """The weights that the server serves; None while it switches, and after a failed switch."""
    base_is: Weights | None = field(default_factory=BaseWeights)
    """The full weights to which the server adds a LoRA; None while others are sent, and if that failed."""
    last_publisher: object = None
    num_readers: int = 0
    is_switching: bool = False
    is_lost: bool = False
    """Whether the server's process has ended."""
    used_at: float = 0.0
    publisher: WeightPublisher | None = None


class SamplerPool:
    """The servers of one base model. Use it in one event loop only.

    A request uses a server that has the weights that it asks for. If there is none, an idle server switches to these
    weights: it receives a checkpoint, or the weights of the model in training. If there are fewer servers than sets of
    weights, requests therefore wait for one another.
    """

    def __init__(
        self, model_dir: Path, token: str, updates: UpdatesSection, trainings: Callable[[str], HostedTraining | None]
    ) -> None:
        self._model_dir = model_dir
        self._token = token
        self._updates = updates
        self._trainings = trainings
        self._samplers: list[_Sampler] = []
        self._changed = asyncio.Condition()
        self._version = 0
        self._dtype = "float32"

    async def add(self, servers: Sequence[tuple[str, InferenceEndpoint]]) -> None:
        """Add servers that serve the base model."""
        for url, endpoint in servers:
            self._dtype = (await endpoint.capabilities()).dtype
            self._samplers.append(_Sampler(url, endpoint))

    @asynccontextmanager
    async def serving(self, weights: Weights) -> AsyncIterator[InferenceEndpoint]:
        """Yield an endpoint that serves these weights as long as the context is open."""
        if weights == StoredWeights(self._model_dir):
            weights = BaseWeights()
        sampler = await self._acquire(weights)
        try:
            yield sampler.endpoint
        finally:
            await self._release(sampler)

    async def _release(self, sampler: _Sampler) -> None:
        sampler.num_readers -= 1
        async with self._changed:
            self._changed.notify_all()

    async def publish(self, model_id: str, training: HostedTraining) -> int:
        """Send the weights of a model in training to the servers that serve it, or to a server that switches to it.

        Completions that are running there continue. Returns the version.
        """
        weights = TrainingWeights(model_id)
        async with training.sending:
            having = [it for it in self._samplers if it.weights == weights and not it.is_lost]
            if having:
                self._version += 1
                version = self._version
                for sampler in having:
                    sampler.num_readers += 1  # so that it does not switch to other weights meanwhile
                try:
                    for sampler in having:
                        await self._send_from(training, sampler, version)
                finally:
                    for sampler in having:
                        await self._release(sampler)
                return version
        async with self.serving(weights):  # entering the context sends the weights
            return self._version

    def forget(self, model_id: str) -> None:
        """Remove a model whose training has ended; its servers no longer have anything to serve."""
        for sampler in self._samplers:
            if sampler.weights == TrainingWeights(model_id):
                sampler.weights = None

    def lose(self, url: str) -> None:
        """Stop sending to a server, because its process has ended."""
        for sampler in self._samplers:
            if sampler.url == url:
                sampler.is_lost, sampler.weights = True, None

    async def replace(self, url: str, new_url: str, endpoint: InferenceEndpoint) -> None:
        """Replace a lost server with its restarted process, which serves the base model."""
        for i, sampler in enumerate(self._samplers):
            if sampler.url == url and sampler.is_lost:
                await self._close(sampler)
                self._samplers[i] = _Sampler(new_url, endpoint)
                break
        async with self._changed:
            self._changed.notify_all()

    async def aclose(self) -> None:
        for sampler in self._samplers:
            await self._close(sampler)

    async def _close(self, sampler: _Sampler) -> None:
        if sampler.publisher is not None:
            await asyncio.to_thread(sampler.publisher.close)
        await sampler.endpoint.aclose()

    async def _acquire(self, weights: Weights) -> _Sampler:
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    async with self._changed:
                        sampler = self._find(weights)
                        while sampler is None:
                            await self._changed.wait()
                            sampler = self._find(weights)
                        sampler.num_readers += 1
                        sampler.used_at = time.monotonic()
                        if sampler.weights == weights:
                            return sampler
                        sampler.is_switching, sampler.weights = True, None
                    try:
                        await self._switch(sampler, weights)
                        return sampler
                    except BaseException:
                        sampler.num_readers -= 1
                        raise
                    finally:
                        async with self._changed:
                            sampler.is_switching = False
                            self._changed.notify_all()
        except TimeoutError as error:
            raise BusyError(
                f"all {len(self._samplers)} servers were busy with other weights for {_WAIT_S:g} s; start more "
                "servers with --samplers"
            ) from error

    def _find(self, weights: Weights) -> _Sampler | None:
        """Return the least loaded server with these weights, or else the least recently used idle server, if any."""
        ready = [it for it in self._samplers if not it.is_switching and not it.is_lost]
        if having := [it for it in ready if it.weights == weights]:
            return min(having, key=lambda it: it.num_readers)
        idle = [it for it in ready if it.num_readers == 0]
        return min(idle, key=lambda it: (it.weights is not None, it.used_at), default=None)

    async def _switch(self, sampler: _Sampler, weights: Weights) -> None:
        if isinstance(weights, TrainingWeights):
            training = self._trainings(weights.model_id)
            if training is None:
                raise UnsupportedError(f"model {weights.model_id!r} is no longer in training: sample from a checkpoint")
            if not training.is_lora:
                sampler.base_is = None  # a send that fails may have replaced them
            elif sampler.base_is != BaseWeights():
                await self._send_stored(sampler, self._model_dir, BaseWeights())
            async with training.sending:
                self._version += 1
                await self._send_from(training, sampler, self._version)
                if not training.is_lora:
                    sampler.base_is = weights
                sampler.weights = weights
        else:
            path = weights.path if isinstance(weights, StoredWeights) else self._model_dir
            await self._send_stored(sampler, path, weights)
            sampler.weights = weights

    async def _send_from(self, training: HostedTraining, sampler: _Sampler, version: int) -> None:
        regroup = sampler.last_publisher is not training
        sampler.last_publisher = training
        await training.trainers.publish_as([sampler.url], version, regroup=regroup)

    async def _send_stored(self, sampler: _Sampler, path: Path, weights: Weights) -> None:
        self._version += 1
        version = self._version
        regroup = sampler.last_publisher is not self
        sampler.last_publisher, sampler.base_is = self, None

        def send() -> None:
            source = CheckpointWeights(path, self._dtype)
            if sampler.publisher is None:
                sampler.publisher = self._connect(sampler.url)
            if regroup:
                sampler.publisher.group.lose()
            publish_weights(source, sampler.publisher, version=version)

        await asyncio.to_thread(send)
        sampler.base_is = weights

    def _connect(self, url: str) -> WeightPublisher:
        """Return a publisher of stored weights to one server. Unlike a rank, it publishes from this host."""
        updates = self._updates
        server, address = httpx.URL(url), updates.address
        if "address" not in updates.model_fields_set:
            try:
                address = local_address_for(server.host, server.port or 80)
            except OSError as error:
                raise transfer_error(error, f"finding a route to {server.host}") from error
        return WeightPublisher.connect(
            [url],
            # A name of its own, because several servers are updated at the same time.
            run_id=f"tinker-checkpoints-{secrets.token_hex(4)}",
            token=self._token,
            transport=updates.transport,
            address=address,
            directory=None if updates.directory is None else updates.directory.absolute() / "checkpoints",
        )
