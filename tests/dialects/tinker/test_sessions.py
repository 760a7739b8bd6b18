"""Sessions that have finished are forgotten in the end, and what belongs to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.dialects.tinker import service as service_module
from inflight.dialects.tinker.requests import CreateSamplingSession, CreateSession
from inflight.dialects.tinker.samplers import NotFoundError
from inflight.dialects.tinker.service import TinkerService
from tests.gates import until


def test_only_the_newest_finished_sessions_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_NUM_FINISHED", 2)
    asked = CreateSession.model_validate({"tags": [], "sdk_version": "0.38.0"})

    async def main() -> None:
        service = TinkerService(cast(Any, SimpleNamespace(model_name="tiny", model_dir=tmp_path)), tmp_path)
        sessions = [service.create_session(asked) for _ in range(5)]
        samplers = [
            service.create_sampler(CreateSamplingSession(session_id=it, sampling_session_seq_id=0, base_model="tiny"))
            for it in sessions
        ]
        for it in sessions[:4]:
            await service.finish_session(it)
        idle = asyncio.create_task(service.end_idle_sessions(0.01))
        await until(lambda: len(service.session_ids()) == 3)
        idle.cancel()
        await asyncio.gather(idle, return_exceptions=True)
        assert service.session_ids() == [sessions[4], sessions[3], sessions[2]]
        assert service.sampling.info(samplers[2])["base_model"] == "tiny"
        for sampler in samplers[:2]:
            with pytest.raises(NotFoundError, match=r"sampling session .* does not exist"):
                service.sampling.info(sampler)
        assert service.heartbeat(sessions[4])

    asyncio.run(asyncio.wait_for(main(), 30))
