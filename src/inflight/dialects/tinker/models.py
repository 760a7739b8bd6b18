"""Models in training on a server of Tinker's API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.dialects.tinker.backend import Training
from inflight.dialects.tinker.ordering import OrderedCalls
from inflight.errors import InvalidRequestError, WorkerDiedError


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
    """The model's ranks; None until they are ready, and after the model has ended."""
    last_saved: str = ""
    """The path of the model's last saved state."""
    end_reason: str = ""
    """Why the model has ended."""
    created: str = ""
    """The request id of the future that creates the model."""
    last_request_at: float = field(default_factory=time.time)

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

    async def end(self, why: str) -> None:
        """End the model's ranks. Later calls fail, and name the first reason."""
        training, self.training, self.end_reason = self.training, None, self.end_reason or why
        if training is not None:
            await training.aclose()

    def _ended_text(self, what: str) -> str:
        why = f" ({self.end_reason})" if self.end_reason and self.end_reason not in what else ""
        if not self.last_saved:
            return f"{what}{why}; its state was never saved"
        return f"{what}{why}; create a model from its last saved state, {self.last_saved}"
