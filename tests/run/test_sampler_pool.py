"""Servers that switch between the weights of several models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.dialects.tinker.backend import BaseWeights, TrainingWeights, Weights
from inflight.errors import TransferError
from inflight.run.hosting.sampler_pool import SamplerPool
from inflight.run.updates_config import UpdatesSection


class _Model:
    """A model in training whose ranks send nothing; with ``fails``, the first send raises `TransferError`."""

    def __init__(self, *, is_lora: bool, fails: bool = False) -> None:
        self.is_lora = is_lora
        self.sending = asyncio.Lock()
        self.trainers = SimpleNamespace(publish_as=self._publish_as)
        self._fails = fails

    async def _publish_as(self, urls: list[str], version: int, *, regroup: bool) -> None:
        if self._fails:
            self._fails = False
            raise TransferError("the link was cut after the last byte")


def test_a_lora_is_added_to_the_base_model_after_a_send_of_full_weights_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Weights] = []

    async def send_stored(_: SamplerPool, sampler: Any, path: Path, weights: Weights) -> None:
        sent.append(weights)
        sampler.base_is = weights

    monkeypatch.setattr(SamplerPool, "_send_stored", send_stored)
    models = {"full": _Model(is_lora=False, fails=True), "lora": _Model(is_lora=True)}

    async def scene() -> None:
        pool = SamplerPool(tmp_path, "token", UpdatesSection(), cast(Any, models.get))
        endpoint = SimpleNamespace(capabilities=lambda: asyncio.sleep(0, SimpleNamespace(dtype="float32")))
        await pool.add([("http://server", cast(Any, endpoint))])
        with pytest.raises(TransferError, match="was cut"):
            async with pool.serving(TrainingWeights("full")):
                pass
        async with pool.serving(TrainingWeights("lora")):
            pass

    asyncio.run(scene())
    assert sent == [BaseWeights()]
