"""Models in training on a Tinker API server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.dialects.tinker.backend import ForwardResult, Training
from inflight.dialects.tinker.data import Datum
from inflight.dialects.tinker.ordering import OrderedCalls
from inflight.errors import InvalidRequestError, WorkerDiedError

MAX_KEPT_TOKENS = 1 << 22
"""Maximum number of tokens whose gradients are computed again when a model is unparked. A model that has received more
tokens since its last step is not parked.
"""


@dataclass(eq=False, slots=True)
class TinkerModel:
    """A model from its creation until its session is forgotten. Belongs to one event loop."""

    model_id: str
    session_id: str
    rank: int
    """The rank of its LoRA; 0 means that all weights are trained."""
    user_metadata: Mapping[str, Any] | None
    calls: OrderedCalls
    training: Training | None = None
    """The model's ranks; None until they are ready, while the model is parked, and after it has ended."""
    parked: Path | None = None
    """The checkpoint from which the model will continue, if its ranks have ended to make room for another model."""
    is_parking: bool = False
    """Whether the model is about to be parked; calls must wait until it has been parked."""
    has_ranks_since: float = 0.0
    """When the model received its ranks."""
    is_followed: bool = False
    """Whether samplers follow the model's weights; such a model is not parked, because servers would lose them."""
    num_running: int = 0
    """Number of calls that use the ranks."""
    last_saved: str = ""
    """The path of the model's last saved state."""
    end_reason: str = ""
    """Why the model has ended."""
    created: str = ""
    """The request id of the future that creates the model."""
    last_request_at: float = field(default_factory=time.time)
    _since_step: list[tuple[Sequence[Datum], str, Mapping[str, float]]] = field(default_factory=list)
    """The arguments of each ``forward_backward`` since the last step, because a checkpoint contains no gradients."""
    _num_tokens_since_step: int = 0

    @property
    def can_be_parked(self) -> bool:
        return not self.is_followed and self._num_tokens_since_step <= MAX_KEPT_TOKENS

    @contextlib.contextmanager
    def ranks(self) -> Iterator[Training]:
        """Yield the model's ranks. If they have ended, raises an error that names the model's last saved state."""
        training = self.training
        if training is None:
            raise InvalidRequestError(self._ended_text(f"model {self.model_id!r} has ended"))
        try:
            yield training
        except WorkerDiedError as error:
            if self.training is training:
                self.training, self.end_reason = None, "a trainer rank died"
            raise WorkerDiedError(self._ended_text(str(error))) from error

    async def forward_backward(
        self, training: Training, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float]
    ) -> ForwardResult:
        """Compute a loss, and accumulate its gradient."""
        result = await training.forward_backward(data, loss_fn, settings, forward_only=False)
        self._num_tokens_since_step += sum(len(datum.token_ids) for datum in data)
        if self._num_tokens_since_step <= MAX_KEPT_TOKENS:
            self._since_step.append((data, loss_fn, settings))
        else:
            self._since_step.clear()
        return result

    def forget_gradient(self) -> None:
        """Record that the ranks have no gradient, after a step or a failed step."""
        self._since_step.clear()
        self._num_tokens_since_step = 0

    async def park(self, path: Path) -> None:
        """Save the model's state to ``path``, and end its ranks. If the state cannot be saved, nothing changes."""
        with self.ranks() as training:
            await training.save(path)
        if self.training is training:  # otherwise the model has ended meanwhile
            self.training, self.parked = None, path
            await training.aclose()

    async def unpark(self, training: Training) -> None:
        """Continue with new ranks, which receive the state and the gradient that the model had when it was parked."""
        if self.parked is not None:
            await training.load(self.parked, optimizer=True)
            for data, loss_fn, settings in self._since_step:
                await training.forward_backward(data, loss_fn, settings, forward_only=False)
        if self.end_reason:
            raise InvalidRequestError(self._ended_text(f"model {self.model_id!r} has ended"))
        self.training, self.has_ranks_since = training, time.monotonic()
        await self._remove_parked()

    async def _remove_parked(self) -> None:
        parked, self.parked = self.parked, None
        if parked is not None:
            await asyncio.to_thread(shutil.rmtree, parked, ignore_errors=True)

    async def end(self, why: str) -> None:
        """End the model's ranks. Later calls fail with an error that states the first reason."""
        training, self.training, self.end_reason = self.training, None, self.end_reason or why
        await self._remove_parked()
        if training is not None:
            await training.aclose()

    def _ended_text(self, what: str) -> str:
        why = f" ({self.end_reason})" if self.end_reason and self.end_reason not in what else ""
        if not self.last_saved:
            return f"{what}{why}; its state was never saved"
        return f"{what}{why}; create a model from its last saved state, {self.last_saved}"
