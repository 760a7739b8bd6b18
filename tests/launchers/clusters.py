"""A Ray cluster of several hosts on this machine, in a process of its own.

    python -m tests.launchers.clusters NAME=CPUS [NAME=CPUS ...]

Each host has an address and a custom resource of its own name. The process indicates where the cluster is, as one line
of JSON, and then takes commands, one a line, and answers each: ``kill NAME``, ``add NAME=CPUS``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "ray"
"""Where ``make`` installs Ray, apart from everything else."""
ROOT = Path(__file__).parents[2]


def need_ray() -> None:
    """Make Ray importable, after everything else that is."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    assert importlib.util.find_spec("ray") is not None, f"run make: {FOLDER} lacks ray"


def python_path() -> str:
    """Return a PYTHONPATH with which a process finds this project, its tests, and Ray."""
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)])


@dataclass
class RayCluster:
    """A running cluster."""

    process: subprocess.Popen[str]
    address: str
    hosts: dict[str, str]
    """Addresses by name."""

    def tell(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self, name: str) -> None:
        """Kill a host: Ray's processes on it, and those that they started."""
        self.tell(f"kill {name}")

    def add(self, name: str, num_cpus: int) -> None:
        self.hosts |= self.tell(f"add {name}={num_cpus}")


@contextlib.contextmanager
def ray_cluster(log: Path, **num_cpus: int) -> Iterator[RayCluster]:
    """Start a cluster of hosts with these names and CPUs; the first is the head. It ends on leaving."""
    words = [f"{name}={num}" for name, num in num_cpus.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.launchers.clusters", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=ROOT,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path(), "RAY_worker_niceness": "0"},
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text(errors="replace")
        said = json.loads(line)
        yield RayCluster(process, said["address"], said["hosts"])
    finally:
        process.stdin.close()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    need_ray()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    hosts: dict[str, Any] = {}
    numbers = itertools.count(1)

    def add(word: str) -> str:
        name, _, num_cpus = word.partition("=")
        number = next(numbers)  # a host that comes again has another address
        address = ray.util.get_node_ip_address() if number == 1 else f"127.0.0.{number}"
        hosts[name] = cluster.add_node(
            num_cpus=int(num_cpus), resources={name: 1}, node_ip_address=address, include_dashboard=False
        )
        return address

    addresses = {word.partition("=")[0]: add(word) for word in sys.argv[1:]}
    print(json.dumps({"address": cluster.address, "hosts": addresses}), file=answers, flush=True)
    for line in sys.stdin:
        verb, word = line.split()
        if verb == "kill":
            below = _descendants([info.process.pid for all_of in hosts[word].all_processes.values() for info in all_of])
            cluster.remove_node(hosts.pop(word), allow_graceful=False)
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            answer = {}
        else:
            answer = {word.partition("=")[0]: add(word)}
        print(json.dumps(answer), file=answers, flush=True)
    cluster.shutdown()


def _descendants(pids: list[int]) -> list[int]:
    """Return all processes that descend from these, as long as they live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - set(pids))


if __name__ == "__main__":
    main()
