"""What every launcher does: it starts, indicates where and how it ended, and stops. Locally, and on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.launchers import Launched, Launcher, LocalLauncher, Program, load_launcher
from tests.gates import SOON_S
from tests.launchers.clusters import RayCluster, need_ray, ray_cluster

pytestmark = pytest.mark.timeout(600)
HERE, THERE = "host_a", "host_b"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster") / "log", **{HERE: 2, THERE: 2}) as running:
        yield running


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.exhaustive)])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if request.param == "local":
        yield LocalLauncher()
        return
    need_ray()
    running = load_launcher(
        "inflight.launchers.ray:RayLauncher", {"address": request.getfixturevalue("cluster").address}
    )
    yield running
    running.close()


def program(folder: Path, code: str, name: str = "it", **more: Any) -> Program:
    """A Python program that finds the path of its ready file as its first argument."""
    command = [sys.executable, "-IS", "-c", code, str(folder / name)]
    return Program(name, command, {"WORD": "hello"}, folder / f"{name}.log", folder / name, **more)


@contextlib.asynccontextmanager
async def started(launcher: Launcher, *programs: Program) -> AsyncIterator[Any]:
    """Start programs; stop them on leaving."""
    async with asyncio.timeout(300):
        launched = await launcher.start(programs, 240.0)
        try:
            yield launched
        finally:
            await asyncio.gather(*(it.stop(2.0) for it in launched))


async def ready(launched: Launched) -> str:
    while (text := await launched.ready()) is None:
        assert launched.ended is None, launched.ended
        await asyncio.sleep(0.05)
    return text


SAYS = """
import os, sys
open(sys.argv[1] + ".partial", "w").write(os.environ["WORD"] + " from " + os.environ["INFLIGHT_ADDRESS"])
os.rename(sys.argv[1] + ".partial", sys.argv[1])
"""
WAITS = (
    SAYS
    + """
sys.stdin.read()
print("the end of its input")
sys.exit(3)
"""
)
FAILS = """
import sys
for i in range(100):
    print("line", i, file=sys.stderr)
sys.exit("it could not continue")
"""
DEAF = (
    SAYS
    + """
import time
time.sleep(1000)
"""
)


def test_a_process_says_that_it_is_ready_and_ends_when_its_input_does(launcher: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        async with started(launcher, program(tmp_path, WAITS)) as (it,):
            assert await ready(it) == f"hello from {it.address}"
            assert it.ended is None
            await it.stop(SOON_S)
            assert (it.ended.status, it.ended.lines) == (3, ("the end of its input",))
            await it.stop(SOON_S)

    asyncio.run(run())


def test_how_a_process_ended_comes_with_its_last_lines(launcher: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        async with started(launcher, program(tmp_path, FAILS)) as (it,):
            ended = await it.wait()
            assert str(ended) == "ended with status 1"
            assert ended.lines[-2:] == ("line 99", "it could not continue")
            assert len(ended.lines) == 24
            assert it.ended == ended

    asyncio.run(run())


def test_a_process_that_does_not_end_with_its_input_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        async with started(launcher, program(tmp_path, DEAF)) as (it,):
            await ready(it)
            await it.stop(0.2)
            assert str(it.ended) == "was killed by signal 9"

    asyncio.run(run())


def test_a_signal_reaches_one_process_of_several_that_start_together(launcher: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        async with started(launcher, *(program(tmp_path, WAITS, name) for name in ("one", "two"))) as (one, two):
            assert {await ready(one), await ready(two)} <= {f"hello from {it.address}" for it in (one, two)}
            two.send_signal(signal.SIGKILL)
            assert str(await two.wait()) == "was killed by signal 9"
            assert one.ended is None

    asyncio.run(run())


def test_a_program_that_does_not_exist_is_named(launcher: Launcher, tmp_path: Path) -> None:
    missing = Program("it", ["/nowhere/python"], {}, tmp_path / "log")

    async def run() -> None:
        await launcher.start([missing], 240.0)

    with pytest.raises(ConfigError, match=r"it cannot be started.*/nowhere/python"):
        asyncio.run(run())


def test_a_place_that_the_launcher_does_not_know_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        await launcher.start([program(tmp_path, WAITS, place="nowhere")], 240.0)

    with pytest.raises(ConfigError, match=r"it must run on 'nowhere', but"):
        asyncio.run(run())


# --------------------------------------------------------------------------------------------------- of Ray only


@pytest.fixture
def on_ray(cluster: RayCluster) -> Iterator[Launcher]:
    need_ray()
    running = load_launcher("inflight.launchers.ray:RayLauncher", {"address": cluster.address})
    yield running
    running.close()


@pytest.mark.parametrize("named_by", ["resource", pytest.param("address", marks=pytest.mark.exhaustive)])
def test_a_process_runs_where_its_place_says(
    on_ray: Launcher, cluster: RayCluster, tmp_path: Path, named_by: str
) -> None:
    place = THERE if named_by == "resource" else cluster.hosts[THERE]

    async def run() -> None:
        async with started(on_ray, program(tmp_path, WAITS, place=place)) as (it,):
            assert it.address == cluster.hosts[THERE] != on_ray.address

    asyncio.run(run())


@pytest.mark.exhaustive
def test_what_the_cluster_has_no_room_for_is_refused_with_what_is_free(on_ray: Launcher, tmp_path: Path) -> None:
    async def run() -> None:
        await on_ray.start([program(tmp_path, WAITS, num_cpus=3)], 3.0)

    with pytest.raises(ConfigError, match=r"no room within 3 s: it needs 3 CPU. It has 4 CPU.*servers.count"):
        asyncio.run(run())


@pytest.mark.exhaustive
def test_a_cluster_that_does_not_answer_is_named() -> None:
    need_ray()
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127.0.0.1:1'"):
        load_launcher("inflight.launchers.ray:RayLauncher", {"address": "127.0.0.1:1"})


@pytest.mark.exhaustive
def test_processes_of_a_lost_host_are_told_as_lost(on_ray: Launcher, cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add("doomed", 1)

    async def run() -> None:
        both = (program(tmp_path, WAITS, "lost", place="doomed"), program(tmp_path, WAITS, "kept", place=HERE))
        async with started(on_ray, both[0]) as (lost,), started(on_ray, both[1]) as (kept,):
            await ready(lost)
            await asyncio.to_thread(cluster.kill, "doomed")
            ended = await lost.wait()
            assert ended.status is None
            assert str(ended).startswith(f"was lost: its host {lost.address}")
            assert kept.ended is None

    asyncio.run(run())
