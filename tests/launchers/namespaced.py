"""A Ray cluster whose hosts are network namespaces with addresses of their own. Only root may make it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.launchers.clusters import need_ray, python_path
from tests.namespaces import Host, hosts_with_links

_PORT = 6379
_START_S = 120.0


class NamespacedCluster:
    """A running cluster. The first host is the head and has no resources; runs are started there."""

    def __init__(self, hosts: Mapping[str, Host], directory: Path) -> None:
        self._hosts = hosts
        self._directory = directory
        self._num_started = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self.head = next(iter(hosts.values()))
        self.address = f"{self.head.address}:{_PORT}"

    def start(self, name: str) -> None:
        """Start Ray on a host, and wait until it is a part of the cluster."""
        host, is_head = self._hosts[name], self._hosts[name] is self.head
        head = ("--head", "--port", str(_PORT), "--include-dashboard", "false")
        where = head if is_head else ("--address", self.address)
        offered = ("--num-cpus", "0") if is_head else ("--num-cpus", "1", "--resources", json.dumps({name[:-2]: 1}))
        log = self._directory / f"{name}-{self._num_started}.log"
        self._num_started += 1
        command = ("ray.scripts.scripts", "start", "--block", *where, "--node-ip-address", host.address, *offered)
        environment = {"PYTHONPATH": python_path(), "RAY_worker_niceness": "0"}
        self._processes.append(host.start(log, *command, "--disable-usage-stats", **environment))
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on {name}: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kill every process of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._hosts[name].name], capture_output=True, text=True, check=True, timeout=20
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def stop(self) -> None:
        for name in self._hosts:
            self.kill(name)
        for process in self._processes:
            process.wait(30)


@contextlib.contextmanager
def namespaced_cluster(directory: Path, *names: str) -> Iterator[NamespacedCluster]:
    """Make a cluster of a head and hosts with these names, each with one CPU and the resource ``x`` for ``x_1``."""
    need_ray()
    with hosts_with_links([None] * (1 + len(names))) as made:
        cluster = NamespacedCluster(dict(zip(("head", *names), made, strict=True)), directory)
        try:
            for name in ("head", *names):
                cluster.start(name)
            yield cluster
        finally:
            cluster.stop()
