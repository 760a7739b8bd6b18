"""What the page shows beyond events: recorded tokens, and the page that a run serves itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from inflight.observe.trace.records import RECORD, RecordManifest, RecordWriter, WeightsFile
from inflight.observe.trace.steps import RecordedStep, StepOutcome
from inflight.observe.watch import views
from inflight.observe.watch.details import rollout_details
from inflight.run.record.page import serve_page
from inflight.types import Group, Rollout, Sample
from inflight.wire import VersionSpan
from tests.watch.test_model import a_run, folded


def record(directory: Path, model: Path | None, item: int, version: int) -> None:
    """Record one completion of two versions, whose second token an environment said."""
    rollout = Rollout(
        prompt_token_ids=[72, 105],
        completion_token_ids=[72, 33, 33],
        behaviour_logprobs=[-0.5, 0.0, -0.25],
        version_spans=(VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=2, end=3)),
        finish_reason="stop",
        reward=1.0,
        temperature=1.0,
    )
    sample = Sample(rollout=rollout, loss_mask=[True, False, True], advantages=[2.0, 0.0, 2.0])
    writer = RecordWriter(directory / RECORD)
    start = None if model is None else WeightsFile(path=str(model), sha256="", size_bytes=0)
    writer.begin(RecordManifest(start=start))
    outcome = StepOutcome(gradient_norm=1.0, learning_rate=0.1, metrics=())
    writer.write_step(
        RecordedStep(
            version=version - 1,
            groups=[Group(0, item, [rollout], "server")],
            samples=[sample],
            trainer_logprobs=[[-0.75, 0.0, -0.25]],
            outcome=outcome,
        )
    )


def test_recorded_tokens_are_shown_with_their_text(tmp_path: Path, model_dir: Path) -> None:
    a_run(tmp_path, 2)
    record(tmp_path, model_dir, item=1, version=2)
    run = folded(tmp_path)
    (found,) = views.rollout(run, 1)["tokens"]
    assert "".join(found["prompt"]["pieces"]) == "Hi"
    completion = found["completion"]
    assert completion["pieces"] == ["H", "!", "!"]
    assert completion["versions"] == [0, None, 1]
    assert completion["trainer_logprobs"] == pytest.approx([-0.75, None, -0.25])
    assert completion["advantages"] == [2.0, None, 2.0]
    assert views.rollout(run, 0)["tokens"] is None, "the step to version 1 was not recorded"


def test_a_record_without_its_model_is_shown_as_token_ids(tmp_path: Path) -> None:
    record(tmp_path, tmp_path / "gone", item=5, version=1)
    found = rollout_details(tmp_path, 1, 5)
    assert found is not None
    assert found[0]["completion"]["pieces"] is None
    assert rollout_details(tmp_path, None, 5) is None
    assert rollout_details(tmp_path, 1, 6) is None


def test_a_run_serves_its_page_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", "the-token-of-the-run")
    a_run(tmp_path)

    async def serve() -> tuple[str, str, int]:
        told: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.ensure_future(serve_page(tmp_path, tmp_path, told.put_nowait))
        async with asyncio.timeout(60):
            note = await told.get()
        url, _, token = note.removeprefix("watch at ").partition("/#token=")
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}) as http:
            status = (await http.get(f"{url}/api/runs")).status_code
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return url, token, status

    url, token, status = asyncio.run(serve())
    assert status == 200
    assert token != "the-token-of-the-run"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
