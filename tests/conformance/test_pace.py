"""The pace of an endpoint: how it is measured, and what follows for limits, lengths and prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.conformance.checks import CheckFailed
from inflight.conformance.endpoint import pace as pace_module
from inflight.conformance.endpoint.kinds import supported_kinds
from inflight.conformance.endpoint.needs import ENCODINGS
from inflight.conformance.endpoint.pace import Pace, measure_pace
from inflight.conformance.endpoint.waiting import SLOWNESS, until, within
from inflight.errors import EndpointError


def prompt(length: int, seed: int) -> Sequence[int]:
    return [seed] * length


def test_a_fast_endpoint_gets_the_usual_limits_and_its_whole_context() -> None:
    pace = Pace(token_s=0.001, prompt_token_s=0.0001, update_bytes=1000)
    assert pace.slowness == 1.0
    assert pace.context_len(2048) == 2048
    assert pace.allows_prompt(2048)


def test_limits_follow_whatever_is_slowest() -> None:
    assert Pace(token_s=0.06).slowness == pytest.approx(3.0)
    assert Pace(token_s=0.001, prompt_token_s=0.02).slowness == pytest.approx(5.0)
    assert Pace(update_bytes=512 << 20).slowness == pytest.approx(8.0)


def test_a_slow_endpoint_samples_a_part_of_its_context() -> None:
    pace = Pace(token_s=0.03, prompt_token_s=0.0015)
    assert pace.context_len(8192) == 400
    assert pace.context_len(300) == 300
    assert not pace.allows_prompt(8192) and pace.allows_prompt(2048)
    assert pace.prompt_len(0.6) == 400 and pace.prompt_len(0.0) == 256
    assert pace.shortened(300) == 200 and pace.shortened(90) == 64 and pace.shortened(10) == 10
    assert Pace(token_s=0.01).shortened(300) == Pace().shortened(300) == 300


def test_a_slow_endpoint_is_asked_less_often() -> None:
    slow = Pace(update_bytes=512 << 20)
    assert [slow.fewer(num) for num in (1, 2, 3, 4, 32)] == [1, 2, 2, 2, 16]
    assert Pace().fewer(32) == 32


def test_turns_of_a_slow_endpoint_cover_every_kind_of_update() -> None:
    notes: dict[str, object] = {}
    can = SimpleNamespace(staging=True, partial_updates=True, encodings=ENCODINGS, lora=True, sharded=True)
    kinds = [
        supported_kinds(cast(Any, SimpleNamespace(capabilities=can, pace=pace, note=notes.update)), turn)
        for pace, turn in ((Pace(), 0), *((Pace(update_bytes=512 << 20), turn) for turn in range(3)))
    ]
    assert sorted(map(repr, kinds[0])) == sorted(map(repr, (kind for turn in kinds[1:] for kind in turn)))
    assert len(notes) == 3 and all(len(turn) <= 5 for turn in kinds[1:])
    can = SimpleNamespace(staging=False, partial_updates=False, encodings=(), lora=False, sharded=False)
    subject = cast(Any, SimpleNamespace(capabilities=can, pace=Pace(update_bytes=512 << 20), note=notes.update))
    assert all(len(supported_kinds(subject, turn)) == 1 for turn in range(3))


@pytest.mark.anyio
async def test_the_pace_is_what_tokens_and_prompts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def generate(ids: Sequence[int], num_tokens: int) -> None:
        nonlocal now
        now += 0.0002 * len(ids) + 0.01 * num_tokens

    monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: now))
    pace = await measure_pace(generate, prompt, 7)
    assert pace.token_s == pytest.approx(0.01)
    assert pace.prompt_token_s == pytest.approx(0.0002 + 0.01 / pace_module._NUM_PROMPT_TOKENS)
    assert pace.update_bytes == 7


@pytest.mark.anyio
async def test_an_endpoint_that_fails_or_hangs_has_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(ids: Sequence[int], num_tokens: int) -> None:
        raise EndpointError("broken")

    async def hang(ids: Sequence[int], num_tokens: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(pace_module, "_MEASURE_S", 0.05)

    async def die(ids: Sequence[int], num_tokens: int) -> None:
        raise ConnectionResetError("of an adapter")

    for generate in (fail, die, hang):
        pace = await measure_pace(generate, prompt, 7)
        assert pace == Pace(update_bytes=7) and pace.slowness == 1.0
        assert pace.context_len(8192) == 8192


@pytest.mark.anyio
async def test_waiting_is_extended_by_the_slowness() -> None:
    usual = SLOWNESS.set(4.0)
    try:
        with pytest.raises(CheckFailed, match=r"a call had not ended after 0\.2 s"):
            await within(0.05, asyncio.Event().wait(), "a call")
        started = time.monotonic()
        with pytest.raises(CheckFailed, match=r"nothing happened within 0\.2 s"):
            await until(lambda: False, 0.05, "nothing happened")
        assert time.monotonic() - started >= 0.2
    finally:
        SLOWNESS.reset(usual)
