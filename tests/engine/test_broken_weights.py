"""Weights that give no numbers: an error that reports it, instead of tokens drawn from nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from inflight.errors import NonFiniteError
from inflight.wire import InFlightPolicy
from tests.engine.reference import make_request, serving


def test_generating_from_weights_that_are_nan_is_an_error_that_names_the_version(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            engine = endpoint._engine
            head = torch.full((258, 32), torch.nan)
            engine.call(
                lambda: engine.load(engine.weights.prepare([("lm_head.weight", head)]), 0, InFlightPolicy.KEEP)
            ).result(30)
            with pytest.raises(NonFiniteError, match=r"are not finite: the current weights \(version 0\)"):
                await endpoint.generate(make_request("whole", [1, 2, 3], max_tokens=4))
            with pytest.raises(NonFiniteError):
                async for _ in endpoint.generate_stream(make_request("streamed", [1, 2, 3], max_tokens=4)):
                    pass
            assert endpoint.stats().num_running == 0

    asyncio.run(run())
