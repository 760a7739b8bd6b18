"""Servers that join a run by themselves, and leave it with notice or without."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from inflight.errors import ConfigError
from inflight.http.joining import RENEW_S
from inflight.run.servers.joining import JoinServer
from tests.gates import StepGate, reserved_port
from tests.run.runs import RunProcess
from tests.servers import TOKEN, ServerProcess

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("forks")]


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess]) -> Callable[..., RunProcess]:
    return functools.partial(start_run, environment={"INFLIGHT_TOKEN": TOKEN})


def test_servers_join_a_run_and_leave_it_with_notice_and_without(
    start_run: Callable[..., RunProcess],
    start_server: Callable[..., ServerProcess],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    (gate := StepGate(tmp_path / "steps", 0)).open()
    at = f"127.0.0.1:{reserved_port()}"
    settings = ("--run.num_steps", "100000", "--servers.max_concurrent", "16", *gate.settings)
    run = start_run("--servers.attach.join", at, *settings)
    run.wait_for_output(f"servers may join at http://{at}")
    joining = ("--join", f"http://{at}", "--dtype", "float32", "--threads", "1")
    first, second, third = (start_server(model_dir, *joining) for _ in range(3))
    for server in (first, second, third):
        run.wait_for_events("group", lambda event, url=server.url: event["endpoint"] == url)
    first.process.send_signal(signal.SIGTERM)
    run.wait_for_output(f"{first.url} is no longer listed: it is handing on its partial completions and leaving")
    assert first.process.wait(60) is not None
    second.kill()
    gate.allow(len(run.rows()) + 1)  # the run stands still until the silence is noticed
    run.wait_for_output(f"{second.url} is no longer listed: it will leave once its groups have ended")
    steps = len(run.rows())
    gate.open()
    run.wait_for_steps(steps + 2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    ledger = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = ledger["num_trained"] + sum(ledger["num_dropped"].values())
    assert ledger["next_new"] == settled + len(ledger["unsettled"])
    assert "failed" not in ledger["num_dropped"]


# ------------------------------------------------------------------------------------------------------- the desk


def asked(method: str, content: bytes, token: str = "right") -> tuple[int, str, dict[str, str]]:
    """Ask a desk; return the status, the body, and who is listed then."""

    async def ask() -> tuple[int, str, dict[str, str]]:
        desk = JoinServer("127.0.0.1:0", "right", "run")
        url = await desk.open()
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                headers = {"authorization": f"Bearer {token}"}
                answer = await client.request(method, "/v1/servers", content=content, headers=headers)
                return answer.status_code, answer.text, desk.listed()
        finally:
            await desk.close()

    return asyncio.run(ask())


def test_who_joins_is_listed_and_told_the_run() -> None:
    status, text, listed = asked("POST", b'{"url": "http://10.0.0.7:8000"}')
    assert (status, json.loads(text), listed) == (
        200,
        {"run_id": "run"},
        {"http://10.0.0.7:8000": "http://10.0.0.7:8000"},
    )


@pytest.mark.parametrize(
    ("content", "token", "status", "says"),
    [
        (b'{"url": "http://10.0.0.7:8000"}', "wrong", 401, "the token is missing or wrong"),
        (b'{"url": "10.0.0.7"}', "right", 400, "url: it is neither an IP address nor a host name"),
        (b'{"url": "http://a\\nb"}', "right", 400, "url: it contains characters that are not allowed"),
        (b'{"url": "http://10.0.0.7:99999"}', "right", 400, "url: Port out of range"),
        (b'{"url": "ftp://10.0.0.7:8000"}', "right", 400, "is not an endpoint"),
        (b'{"url": 7}', "right", 400, "url: Input should be a valid string (got 7)"),
        (b" " * 5000, "right", 413, "larger than 4096 bytes"),
    ],
)
def test_what_cannot_join_is_refused_and_not_listed(content: bytes, token: str, status: int, says: str) -> None:
    answered, text, listed = asked("POST", content, token)
    assert (answered, listed) == (status, {})
    assert says in text


def test_guests_that_have_left_are_forgotten() -> None:
    now = [0.0]
    desk = JoinServer("127.0.0.1:0", "right", "run", clock=lambda: now[0])

    async def join() -> None:
        url = await desk.open()
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer right"}) as client:
            for port in range(8000, 8020):
                await client.post("/v1/servers", json={"url": f"http://10.0.0.7:{port}"})
                now[0] += 100.0
        await desk.close()

    asyncio.run(join())
    assert len(desk._joined) == 6


def test_a_server_that_falls_silent_is_listed_no_more() -> None:
    now = [0.0]
    desk = JoinServer("127.0.0.1:0", "right", "run", clock=lambda: now[0])

    async def join() -> None:
        url = await desk.open()
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer right"}) as client:
            await client.post("/v1/servers", json={"url": "http://a:1"})
        await desk.close()

    asyncio.run(join())
    now[0] = 3 * RENEW_S
    assert desk.listed() == {"http://a:1": "http://a:1"}
    now[0] = 5 * RENEW_S
    assert desk.listed() == {}
    assert not desk.hands_on("http://a:1")


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"servers.attach.join '8100' is not HOST:PORT"):
        asyncio.run(JoinServer("8100", "t", "run").open())
