"""OpenEnv's own package: it takes our traces, and its capture proxy reads tokens and logprobs from ours."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx

from inflight.environments.adapters.openenv_trace import training_trace
from inflight.environments.proxy.run_server import ProxyServer
from tests.environments.apart import need
from tests.environments.scripted import scripted_episode
from tests.environments.test_openenv_trace import played

need("openenv")

from openenv.core.harness.capture.contract import to_training_trace  # noqa: E402
from openenv.core.harness.capture.export import export_session  # noqa: E402
from openenv.core.harness.capture.runner import CaptureServer  # noqa: E402
from openenv.core.harness.training import TrainingTrace  # noqa: E402


def test_openenv_takes_the_trace() -> None:
    trace = TrainingTrace.model_validate(json.loads(json.dumps(training_trace(played(), "e7"))))
    assert trace.to_trace_entries()[0]["metadata"]["version_spans"][1]["version"] == 4


def test_what_openenvs_capture_proxy_sees_of_ours_is_what_is_recorded_here() -> None:
    turns = iter(["one", "two"])

    async def talk(url: str, key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers={"authorization": f"Bearer {key}"}) as agent:
            for _ in range(2):
                body = {"model": "scripted", "messages": messages}
                answer = (await agent.post(f"{url}/v1/chat/completions", json=body)).json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]

    async def run() -> tuple[TrainingTrace, dict[str, Any]]:
        async with ProxyServer("scripted") as proxy:
            episode = scripted_episode(lambda prompt: next(turns))
            episode.proxy = proxy.serve
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            capture = CaptureServer(llm_url=await episode.openai_url(), model="scripted", port=port)
            await asyncio.to_thread(capture.start, 120.0)
            try:
                session = capture.registry.create(purpose="train")
                await talk(f"http://127.0.0.1:{port}", session.session_id)
                document = export_session(session, include_messages=True)
                captured = to_training_trace(session.graph, document)
            finally:
                await asyncio.to_thread(capture.stop)
                await episode.aclose()
            assert document["trainable"], document["validation"]
            return captured, training_trace(episode.played(1.0), "own")

    captured, own = asyncio.run(asyncio.wait_for(run(), 200))
    arrays = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
    assert [[getattr(turn, name) for name in arrays] for turn in captured.turns] == [
        [turn[name] for name in arrays] for turn in own["turns"]
    ]
    assert len(captured.turns) == 2
