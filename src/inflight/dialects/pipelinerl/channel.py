"""How weights reach a PipelineRL server: by a POST and broadcasts, or by the protocol of Fast-LLM's trainer."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from inflight.base.tasks import cancel_and_wait, start
from inflight.base.threads import run_abandonable
from inflight.dialects.pipelinerl.messages import UPDATE_ROUTE, update_request
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.errors import ProtocolError
from inflight.wire import WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight.dialects.broadcast_group import BroadcastGroup

_PARTING_S = 1.0
"""Seconds allowed for the last broadcast to end after the server has answered."""


class WeightChannel(Protocol):
    """The trainer's end of the connection over which one server receives weights."""

    @property
    @abstractmethod
    def update_route(self) -> str | None:
        """Return the route for updates that the server must have, or None if it needs none."""

    @property
    @abstractmethod
    def is_formed(self) -> bool:
        """Return whether the server has joined, and no update has failed since."""

    @abstractmethod
    def join(self) -> None:
        """Block until the server has joined. Raises `TransferError`."""

    @abstractmethod
    async def send(self, routes: EngineRoutes, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of the server at ``routes``.

        If this raises, the server's weights are torn and the channel is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the server permanently. May block briefly. Idempotent."""


class PostedBroadcasts(WeightChannel):
    """Posts each update to the server, and broadcasts its tensors to it, as PipelineRL's trainer does."""

    def __init__(self, group: BroadcastGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s

    @property
    def update_route(self) -> str:
        return UPDATE_ROUTE

    @property
    def is_formed(self) -> bool:
        return self._group.is_formed

    def join(self) -> None:
        self._group.join()

    async def send(self, routes: EngineRoutes, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Post the update and broadcast its tensors. Raises an error unless the server answers ``ok``."""
        message = update_request(update.version, update.manifest.tensors)

        def broadcast() -> None:
            for name, tensor in tensors.items():
                self._group.broadcast(tensor.contiguous(), self._timeout_s, f"sending {name}")

        asking = start(routes.ask("POST", UPDATE_ROUTE, message.model_dump(mode="json"), self._timeout_s))
        sending = start(run_abandonable(broadcast, "inflight-broadcast"))
        try:
            await asyncio.wait({asking, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            status, answer = await asking
            if status != 200 or not isinstance(answer, dict) or answer.get("status") != "ok":
                raise ProtocolError(
                    f"POST {UPDATE_ROUTE} answered status {status}: {error_text_of(answer)}", routes.url
                )
            await asyncio.wait({sending}, timeout=_PARTING_S)
            if not sending.done():
                raise ProtocolError(f"POST {UPDATE_ROUTE} answered ok before every tensor was sent", routes.url)
            sending.result()
        except BaseException:
            self.close()  # the ranks are out of step
            raise
        finally:
            await cancel_and_wait(asking)
            await asyncio.wait({sending})

    def close(self) -> None:
        self._group.abort()
