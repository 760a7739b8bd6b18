"""Which calls on vLLM's server a commit makes, and what it reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.wire import InFlightPolicy
from tests.engines.labelled_servers import LabelledVllm
from tests.engines.test_others_updates import announced, run, served_model

CALLS = {"/pause", "/collective_rpc", "/finish_weight_update", "/resume"}


def committed(server: LabelledVllm, in_flight: InFlightPolicy, *, staged: bool = True) -> tuple[list[str], Any, float]:
    """Pause and apply; return the calls in order, what the commit was asked to do, and the reported pause."""
    calls: list[str] = []
    paused_s = 0.0

    async def call(client: Any) -> None:
        nonlocal paused_s
        await client.capabilities()
        engine, update = client._engine, announced(in_flight).model_copy(update={"staged": staged})
        engine._group = server.group  # as a join leaves it
        server.asked.clear()
        await engine.pause(update)
        await engine.apply(update)
        paused_s = engine.last.timings.paused_s
        calls.extend(path for path in server.asked if path in CALLS)

    run(server, call)
    (asked,) = server.commits
    return calls, asked, paused_s


def test_a_staged_update_that_keeps_requests_is_one_call(tmp_path: Path) -> None:
    calls, asked, paused_s = committed(LabelledVllm(served_model(tmp_path)), InFlightPolicy.KEEP)
    assert calls == ["/collective_rpc"]
    assert (asked["pauses"], asked["resumes"]) == (True, True)
    assert asked["label"].startswith("1/")
    assert paused_s == 1.0, "as the engine measured it"


@pytest.mark.parametrize(
    ("in_flight", "staged"), [(policy, True) for policy in InFlightPolicy if policy != "keep"] + [("keep", False)]
)
def test_other_updates_are_paused_by_vllms_own_route(tmp_path: Path, in_flight: Any, staged: bool) -> None:
    server = LabelledVllm(served_model(tmp_path))
    calls, asked, paused_s = committed(server, InFlightPolicy(in_flight), staged=staged)
    assert calls[0] == "/pause"
    assert "/resume" not in calls
    assert (asked["pauses"], asked["resumes"]) == (False, True)
    assert paused_s < 1.0, "from the answer to the pause until the weights are served"


def test_replicas_are_paused_and_resumed_together(tmp_path: Path) -> None:
    server = LabelledVllm(served_model(tmp_path))
    server.num_replicas = 2
    calls, asked, _ = committed(server, InFlightPolicy.KEEP)
    assert calls == ["/pause", "/collective_rpc", "/resume"]
    assert (asked["pauses"], asked["resumes"]) == (False, False)
