"""The interface that a Tinker API server needs from trainers and inference servers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inflight.contracts import InferenceEndpoint
from inflight.dialects.tinker.data import Array, Datum
from inflight.types import AdamSettings


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of a forward pass, with or without a backward pass."""

    logprobs: list[Array]
    """The logprobs of each datum, float32 [N] or [N, K]."""
    losses: list[Array]
    """The weighted loss of each row of each datum, in arrays of the same shapes."""
    loss: float
    """The sum of the loss over all data."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The weights with which the server was started."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a checkpoint."""

    path: Path


@dataclass(frozen=True, slots=True)
class TrainingWeights:
    """The newest published weights of a model in training."""

    model_id: str


Weights = BaseWeights | StoredWeights | TrainingWeights
"""The weights that a sampling session requests."""


class Training(Protocol):
    """One model in training. Calls are made one at a time; each may raise an `InflightError`.

    After a `WorkerDiedError`, the model has ended, and every further call raises that error.
    """

    @abstractmethod
    async def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], *, forward_only: bool
    ) -> ForwardResult:
        """Compute a loss, and unless ``forward_only``, accumulate its gradient."""

    @abstractmethod
    async def step(self, settings: AdamSettings) -> Mapping[str, float]:
        """Take an optimizer step, and return its metrics."""

    @abstractmethod
    async def save(self, path: Path) -> None:
        """Write a checkpoint with the weights and the optimizer's state."""

    @abstractmethod
    async def load(self, path: Path, *, optimizer: bool) -> None:
        """Load a checkpoint, with or without the optimizer's state."""

    @abstractmethod
    async def publish(self) -> int:
        """Update the servers that serve this model; running generations continue. Return the version.

        All models of the server share one sequence of versions, so that a version identifies one model's weights.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End the ranks."""


class Backend(Protocol):
    """Trainers and inference servers of one base model."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Return the name by which clients request the base model."""

    @property
    @abstractmethod
    def model_dir(self) -> Path:
        """Return the directory of the base model."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the number of token ids."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Return the servers' context length in tokens."""

    @property
    @abstractmethod
    def max_models(self) -> int:
        """Return how many models can be in training at a time."""

    @abstractmethod
    async def create(self, model_id: str, rank: int, seed: int | None) -> Training:
        """Start the ranks of a new model: a LoRA of this rank, or all weights at rank 0.

        Raises an `InflightError` if the trainer cannot train it.
        """

    @abstractmethod
    def sampling_from(self, weights: Weights) -> AbstractAsyncContextManager[InferenceEndpoint]:
        """Return a context that waits for an endpoint to serve these weights, and yields that endpoint.

        Raises an `InflightError` if no endpoint can serve them.
        """
