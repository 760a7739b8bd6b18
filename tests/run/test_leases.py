"""Servers that outlive their run for a lease, and are taken over when it is resumed."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight.launchers import LocalLauncher
from inflight.run import run as runs_module
from inflight.run.config import load_config
from inflight.run.servers.leases import LeasedServer
from tests.gates import StepGate
from tests.run.runs import CONFIG, RunProcess, ends_within, is_alive
from tests.servers import TOKEN, ServerProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]


@pytest.fixture
def start_run(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., RunProcess]]:
    runs: list[RunProcess] = []

    def start(*overrides: str, **settings: Any) -> RunProcess:
        runs.append(RunProcess(tmp_path, model_dir, *overrides, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        for pid in run.servers():
            ends_within(pid)


def test_a_resumed_run_takes_over_the_servers_that_outlived_it(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    gate = StepGate(tmp_path / "steps", 3)
    settings = ("--servers.lease_s", "60", "--servers.count", "2", "--run.checkpoint_every_steps", "2", *gate.settings)
    run = start_run(*settings, "--run.num_steps", "100000")
    run.wait_for_steps(3)
    servers, trainer = run.servers(), run.processes()["trainer-0"]
    assert stat.S_IMODE((run.directory / "token").stat().st_mode) == 0o600
    run.kill()
    gate.open()  # it hears of the end between two steps
    assert ends_within(trainer)
    assert all(map(is_alive, servers))
    gate.allow(3)
    num_requests = len(run.events("request"))
    resumed = start_run(*settings, "--run.num_steps", "8", "--resume")
    resumed.wait_for_steps(3)
    gate.open()
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == list(range(1, 9))
    assert len({it["endpoint"] for it in resumed.events("request")[num_requests:]}) == 2
    assert resumed.servers() == servers
    assert all(map(ends_within, servers))


def test_servers_end_by_themselves_once_nobody_renews_their_lease(start_run: Callable[..., RunProcess]) -> None:
    run = start_run("--servers.lease_s", "6", "--run.num_steps", "100000")
    run.wait_for_steps(1)
    (server,), trainer = run.servers(), run.processes()["trainer-0"]
    run.kill()
    killed_at = time.monotonic()
    assert ends_within(trainer)
    assert ends_within(server)
    # It is renewed several times in a lease: what is left when the run is killed is most of it.
    assert time.monotonic() - killed_at > 2.0


def test_whoever_takes_a_server_over_renews_its_lease_as_long_as_it_lives(model_dir: Path, tmp_path: Path) -> None:
    server = ServerProcess(model_dir, tmp_path, "--lease", "4")

    async def take_over() -> None:
        taken_over = LeasedServer(server.url, server.pid, connect_endpoint(server.url, token=TOKEN))
        assert server.process.stdin is not None
        server.process.stdin.close()  # as if its run had been killed
        await asyncio.sleep(9)  # two leases, during which nothing but the watch calls it
        assert taken_over.ended is None
        assert server.process.poll() is None
        await taken_over.stop(patience_s=60)
        assert ends_within(server.pid)

    try:
        server.wait_until_ready()
        asyncio.run(take_over())
    finally:
        server.kill()


class WithoutOutliving(LocalLauncher):
    """A launcher whose processes end with the run."""

    @property
    def can_outlive(self) -> bool:
        return False


def test_a_lease_is_refused_where_nothing_can_outlive_the_run(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    launcher = ("--run.launcher", "tests.run.test_leases:WithoutOutliving")
    with pytest.raises(ConfigError, match=r"servers.lease_s lets servers outlive the run, but the servers of launcher"):
        runs_module.train(load_config(path, (*launcher, "--servers.lease_s", "5")))
    assert not (tmp_path / "run").exists()
