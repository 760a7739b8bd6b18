"""What a server forgets: old finished sessions, and models of silent clients, whose state it saves first."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.dialects.tinker import service as service_module
from inflight.dialects.tinker.futures import FailedCall, NotFoundError
from inflight.dialects.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    OptimStep,
    SaveWeightsForSampler,
)
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


class _Model:
    """Ranks that write nothing but a directory."""

    def __init__(self) -> None:
        self.is_closed = False

    async def save(self, path: Path) -> None:
        await asyncio.to_thread(path.mkdir, parents=True)

    async def publish(self) -> int:
        return 1

    async def aclose(self) -> None:
        self.is_closed = True


def test_the_model_of_a_silent_client_makes_room_and_its_state_is_kept_for_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: list[_Model] = []

    async def create(*_: Any) -> _Model:
        ranks.append(_Model())
        return ranks[-1]

    backend = SimpleNamespace(model_name="tiny", model_dir=tmp_path, max_models=1, create=create)

    async def main() -> None:
        service = TinkerService(cast(Any, backend), tmp_path)
        asked = CreateSession.model_validate({"tags": [], "sdk_version": "0.38.0"})

        async def created() -> tuple[str, Any]:
            session = service.create_session(asked)
            model = CreateModel(session_id=session, model_seq_id=0, base_model="tiny")
            return session, await service.futures.retrieve(service.create_model(model))

        _, first = await created()
        assert first["type"] == "create_model"
        inflight = {"sampling_session_seq_id": 0, "kind": "inflight"}  # so that it is not parked instead
        followed = SaveWeightsForSampler(model_id=first["model_id"], seq_id=1, **cast(Any, inflight))
        assert await service.futures.retrieve(service.save_for_sampler(followed, b""))
        _, refused = await created()
        assert isinstance(refused, FailedCall) and "this server trains at most 1 at a time" in refused.error
        monkeypatch.setattr(service_module, "SILENT_S", 0.0)
        _, second = await created()
        assert second["type"] == "create_model"
        assert [it.is_closed for it in ranks] == [True, False]
        (kept,) = service.store.of_model(first["model_id"])
        assert kept.facts.expires_at is not None
        assert kept.facts.expires_at - time.time() == pytest.approx(7 * 86_400, abs=60)
        step = OptimStep(model_id=first["model_id"], seq_id=2, adam_params={})
        ended = await service.futures.retrieve(service.optim_step(step, b""))
        assert isinstance(ended, FailedCall)
        assert f"create a model from its last saved state, {kept.tinker_path}" in ended.error
        await service.aclose()

    asyncio.run(asyncio.wait_for(main(), 30))
