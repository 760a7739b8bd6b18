"""Servers that a file lists, and that are too busy to answer at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inflight.http.client import HttpEndpoint
from inflight.run.config import load_config
from inflight.run.servers import listed
from inflight.run.servers.listed import ListedServers
from tests.run.runs import CONFIG

URL = "http://127.0.0.1:1"


class BusyServer:
    """A membership whose only server takes ``answer_s`` to be checked, however often it is asked."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self.taking_part: dict[Any, str] = {}

    def connect(self, url: str) -> HttpEndpoint:
        return HttpEndpoint(url)

    async def check(self, endpoint: HttpEndpoint) -> None:
        await asyncio.sleep(self.answer_s)

    def add(self, endpoint: HttpEndpoint, url: str, num_slots: int, can: None) -> None:
        self.taking_part[endpoint] = url


def test_a_listed_server_that_is_busy_gets_more_time_whenever_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed, "_ASK_S", 0.1)
    monkeypatch.setattr(listed, "_LOOK_AGAIN_S", 0.01)
    (tmp_path / "servers.txt").write_text(f"{URL}\n")
    (tmp_path / "run.toml").write_text(CONFIG.format(directory=tmp_path / "run", model=tmp_path))
    config = load_config(tmp_path / "run.toml", ["--servers.attach.urls_file", str(tmp_path / "servers.txt")])
    server, notes = BusyServer(answer_s=0.3), list[str]()
    asyncio.run(ListedServers(config, server, notes.append).wait_for_the_first())  # type: ignore[arg-type]
    assert [*server.taking_part.values()] == [URL]
    assert [note.rpartition("within ")[2] for note in notes] == ["0.1 s", "0.2 s"]
