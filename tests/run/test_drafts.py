"""Finished groups reach the servers that draft from them, and no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.engines.embedded.loading import load_endpoint
from inflight.http.client import HttpEndpoint
from inflight.rollouts.drafts import split_history
from inflight.run.config import RunConfig
from inflight.run.sampling.drafts import FinishedGroups
from inflight.types import Group, Rollout
from inflight.wire import Completion, DraftHistory, GenerateRequest, PromptHistory, SamplingParams
from tests.gates import SOON_S
from tests.servers import TOKEN, ServerProcess

PROMPT = tuple(range(40, 52))
SAMPLING = SamplingParams(n=2, max_tokens=40, ignore_eos=True, seed=1)


def metrics_of(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def group_of(completions: tuple[Completion, ...]) -> Group:
    return Group(
        0,
        0,
        [Rollout(PROMPT, c.token_ids, c.logprobs, c.version_spans, c.finish_reason, 1.0, 1.0) for c in completions],
    )


def test_a_server_drafts_from_the_groups_that_a_run_has_finished(
    model_dir: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(model_dir, "--drafts", "history")

    async def run() -> tuple[list[Completion], list[Completion], float]:
        endpoint = HttpEndpoint(server.url, token=TOKEN)
        other = load_endpoint(model_dir, device="cpu")  # does not support drafts
        assert (await endpoint.capabilities()).drafts
        groups = FinishedGroups()
        endpoints = [other, endpoint]
        sending = asyncio.ensure_future(groups.send(endpoints))
        first = (
            await endpoint.generate(GenerateRequest(request_id="a", prompt_token_ids=PROMPT, sampling=SAMPLING))
        ).completions
        assert metrics_of(server)["inflight_verifications_total"] == 0
        groups.finished(group_of(first))
        accepted = 0.0
        async with asyncio.timeout(SOON_S):
            while accepted <= 50:  # the groups may arrive while one of these is sampled
                request = GenerateRequest(request_id=f"b{accepted}", prompt_token_ids=PROMPT, sampling=SAMPLING)
                again = (await endpoint.generate(request)).completions
                accepted = metrics_of(server)["inflight_accepted_tokens_total"]
        assert not sending.done()
        sending.cancel()
        await endpoint.aclose()
        await other.aclose()
        return list(first), list(again), accepted

    first, again, accepted = asyncio.run(run())
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    assert accepted > 50


def test_messages_are_divided_before_they_are_too_long() -> None:
    entries = [PromptHistory(prompt_token_ids=(i,), completions=((7,) * 400_000,), rewards=(0.0,)) for i in range(5)]
    messages = list(split_history(entries, 1_000_000))
    assert [[entry.prompt_token_ids[0] for entry in message.entries] for message in messages] == [[0, 1], [2, 3], [4]]
    assert list(split_history(entries[:2], 1)) == [DraftHistory(entries=(entry,)) for entry in entries[:2]]
    assert list(split_history([], 1)) == []


def config_of(**servers: Any) -> RunConfig:
    sections = {"model": {"path": "m"}, "task": {"name": "t"}, "run": {"directory": "r"}}
    return RunConfig.model_validate_json(json.dumps({**sections, "servers": servers}))


@pytest.mark.parametrize(("engine", "drafts"), [("embedded", "both"), ("vllm", "history"), ("sglang", "off")])
def test_a_run_takes_drafts_that_its_engines_can_make(engine: str, drafts: str) -> None:
    assert config_of(engine=engine, drafts=drafts).servers.drafts == drafts


@pytest.mark.parametrize(
    ("engine", "drafts", "words"),
    [("vllm", "both", "only from recorded completions"), ("sglang", "history", "from a single corpus")],
)
def test_a_run_refuses_drafts_that_an_engine_cannot_make(engine: str, drafts: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"a server has engine '{engine}': .*{words}"):
        config_of(engine=engine, drafts=drafts)
