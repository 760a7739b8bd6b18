"""A model in training on its own ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from inflight.base.tasks import TaskOwner
from inflight.dialects.tinker.backend import ForwardResult, Training
from inflight.dialects.tinker.data import TARGETS, Array, Datum
from inflight.dialects.tinker.losses import LOSSES, WEIGHTS
from inflight.dialects.tinker.packing import PackedData, loss_of_rows, micro_batch_of, rows_of_data, segment_of
from inflight.errors import WorkerDiedError
from inflight.run.ranks.channel import encode
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import Accumulate, tensors_of
from inflight.types import AdamSettings

_NO_LOSS = (Datum((0,), {TARGETS: np.zeros(1, np.int64), WEIGHTS: np.zeros(1, np.float32)}),)
"""Data with a gradient of 0, with which a step is taken if a client has sent no data. Workers refuse a step without a
gradient, but Tinker's clients may skip the data of a step.
"""


class HostedTraining(Training):
    """The ranks of one model, which have loaded it; ``publish`` updates the servers that serve the model."""

    def __init__(
        self,
        trainers: TrainerGroup,
        *,
        publish: Callable[[HostedTraining], Awaitable[int]],
        on_end: Callable[[HostedTraining], None],
        is_lora: bool,
    ) -> None:
        self.trainers = trainers
        self.is_lora = is_lora
        self.sending = asyncio.Lock()
        """Held while servers receive weights, so that a publish does not miss a server that is about to receive older
        weights.
        """
        self._has_gradient = False
        self._failure: WorkerDiedError | None = None
        self._owner = TaskOwner()
        self._publish = publish
        self._on_end = on_end

    async def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], *, forward_only: bool
    ) -> ForwardResult:
        loss, texts = LOSSES[loss_fn], [segment_of(datum) for datum in data]
        packing = self.trainers.packing
        # A longer datum gets its own micro-batch.
        packing = replace(packing, max_tokens=max([packing.max_tokens, *map(len, texts)]))
        packed = packing.pack_texts(texts)
        frames, batches = [], []
        for parts in packed:
            of_share = [
                micro_batch_of([data[i] for i in part], loss, share_prefixes=packing.share_prefixes) for part in parts
            ]
            batches.append(of_share)
            request = Accumulate(
                segment_lengths=tuple(it.batch.segment_lengths for it in of_share),
                loss_fn=loss_fn,
                settings=dict(settings),
                forward_only=forward_only,
            )
            frames.append(encode(request, _tensors(of_share)))
        with self._calling():
            answers = await self.trainers.accumulate(frames)
        self._has_gradient |= not forward_only
        logprobs: dict[int, Array] = {}
        losses: dict[int, Array] = {}
        for answer, of_share, parts in zip(answers, batches, packed, strict=True):
            for flat, it, part in zip(answer.logprobs, of_share, parts, strict=True):
                assert it.batch.target_ids_TK is not None
                logprobs_TK, of_part = flat.reshape(it.batch.target_ids_TK.shape), [data[i] for i in part]
                losses_TK = loss_of_rows(it, logprobs_TK, loss, settings)
                logprobs.update(zip(part, rows_of_data(of_part, logprobs_TK), strict=True))
                losses.update(zip(part, rows_of_data(of_part, losses_TK), strict=True))
        logprobs_of_data, losses_of_data = ([of[i] for i in range(len(data))] for of in (logprobs, losses))
        return ForwardResult(logprobs_of_data, losses_of_data, sum(answer.loss for answer in answers))

    async def step(self, settings: AdamSettings) -> Mapping[str, float]:
        if not self._has_gradient:
            await self.forward_backward(_NO_LOSS, "cross_entropy", {}, forward_only=False)
        self._has_gradient = False  # a step that fails discards the gradient too
        with self._calling():
            stepped = await self.trainers.step(settings)
        return {"gradient_norm": stepped.gradient_norm, "learning_rate": stepped.learning_rate}

    async def save(self, path: Path) -> None:
        with self._calling():
            await self.trainers.save(path)

    async def load(self, path: Path, *, optimizer: bool) -> None:
        with self._calling():
            await self.trainers.load(path, optimizer=optimizer)

    async def publish(self) -> int:
        with self._calling():
            return await self._publish(self)

    async def watch(self) -> None:
        """Return once a rank has ended; every later call then fails."""
        with contextlib.suppress(WorkerDiedError), self._calling():
            await self.trainers.watch()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Make every later call fail once a rank has died."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except WorkerDiedError as error:
            if self._failure is None:
                self._failure = error
                self._owner.start(self.aclose())
            raise

    async def aclose(self) -> None:
        self._on_end(self)
        await self.trainers.stop()


def _tensors(batches: Sequence[PackedData]) -> dict[str, torch.Tensor]:
    inputs = {f"inputs.{i}.{name}": it for i, batch in enumerate(batches) for name, it in batch.inputs.items()}
    return tensors_of(batch.batch for batch in batches) | inputs
