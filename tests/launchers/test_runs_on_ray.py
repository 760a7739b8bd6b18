"""A whole run on the hosts of a Ray cluster: it trains, and continues when a host is lost."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator

import pytest

from tests.launchers.clusters import RayCluster, python_path, ray_cluster
from tests.run.runs import RunProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster") / "log", host_a=4, host_b=4) as running:
        yield running


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess], cluster: RayCluster) -> Callable[..., RunProcess]:
    environment = {"PYTHONPATH": python_path(), "RAY_ADDRESS": cluster.address}
    return functools.partial(start_run, "--run.launcher", "inflight.launchers.ray:RayLauncher", environment=environment)


def test_a_run_trains_on_two_hosts_which_meet_at_their_own_addresses(
    start_run: Callable[..., RunProcess], cluster: RayCluster
) -> None:
    fleet = '[{ place = "host_a" }, { place = "host_b" }]'
    run = start_run("--servers.fleet", fleet, "--train.num_ranks", "2", "--train.place", "host_b")
    assert run.wait(700) == 0, run.output()
    assert [row["publish"]["version"] for row in run.rows()] == [1, 2, 3, 4, 5, 6]
    hosts = {url.rpartition(":")[0] for url in run.server_urls()}
    assert hosts == {f"http://{cluster.hosts[name]}" for name in ("host_a", "host_b")}
    assert len({group["endpoint"] for group in run.events("group")}) == 2
    assert run.summary()["failure"] is None


def test_a_server_whose_host_is_lost_starts_again_elsewhere_and_the_run_goes_on(
    start_run: Callable[..., RunProcess], cluster: RayCluster
) -> None:
    cluster.add("doomed", 2)
    fleet = '[{ place = "host_a" }, { place = "doomed" }]'
    run = start_run("--servers.fleet", fleet, "--train.place", "host_b", "--run.num_steps", "100000")
    run.wait_for_steps(3, 400)
    cluster.kill("doomed")
    run.wait_for_output("server-1 was lost: its host", 200)
    assert cluster.hosts["doomed"] in run.output()
    cluster.add("doomed", 2)  # another host of that name, at another address
    run.wait_for_output("server-1 was restarted", 600)
    run.wait_until(lambda: len({group["endpoint"] for group in run.events("group")}) == 3, 300)  # the new host's
    run.interrupt()
    assert run.wait(700) == 130, run.output()
    ledger_adds_up(run)


def test_ranks_whose_host_is_lost_start_again_elsewhere_from_the_last_checkpoint(
    start_run: Callable[..., RunProcess], cluster: RayCluster
) -> None:
    cluster.add("brief", 2)
    settings = ("--run.restarts", "1", "--run.checkpoint_every_steps", "2", "--run.num_steps", "8")
    run = start_run("--servers.place", "host_a", "--train.place", "brief", *settings)
    run.wait_for_steps(3, 400)
    (server,) = run.servers()
    cluster.kill("brief")
    cluster.add("brief", 2)
    run.wait_for_output("all trainer ranks restart from the last checkpoint", 400)
    assert run.wait(700) == 0, run.output()
    assert "trainer-0 was lost: its host" in run.output()
    assert [row["version"] for row in run.rows()] == list(range(1, 9))
    assert run.servers() == [server]
    ledger_adds_up(run)


def test_a_run_whose_ranks_all_send_continues_when_the_host_of_one_is_lost_and_comes_back(
    start_run: Callable[..., RunProcess], cluster: RayCluster
) -> None:
    for _ in range(2):  # a host for each rank
        cluster.add("sender", 1)
    fleet = '[{ place = "host_a" }, { place = "host_b" }]'
    ranks = ("--train.place", "sender", "--train.num_ranks", "2")
    updates = ("--updates.sharded", "true", "--updates.transport", "http")
    settings = ("--run.restarts", "1", "--run.checkpoint_every_steps", "2", "--run.num_steps", "8")
    run = start_run("--servers.fleet", fleet, *ranks, *updates, *settings)
    run.wait_for_steps(3, 400)
    cluster.kill("sender")
    cluster.add("sender", 1)
    run.wait_for_output("all trainer ranks restart from the last checkpoint", 400)
    assert run.wait(700) == 0, run.output()
    assert [row["version"] for row in run.rows()] == list(range(1, 9))
    assert {outcome for row in run.rows() for outcome in row["publish"]["outcomes"].values()} == {"applied"}
    ledger_adds_up(run)


def ledger_adds_up(run: RunProcess) -> None:
    """Every item that was issued is trained on, dropped with a reason, or waits; none is lost or counted twice."""
    last = json.loads(max((run.directory / "checkpoints").glob("version-*.json")).read_text())["ledger"]
    settled = last["num_trained"] + sum(last["num_dropped"].values())
    assert last["next_new"] == settled + len(last["unsettled"])
    rows = run.rows()
    assert len({row["version"] for row in rows}) == len(rows)
