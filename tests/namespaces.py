"""Hosts on this machine: network namespaces with links of limited bandwidth to a router. Only root may make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tests.zygote import python

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Host:
    """One host: its namespace, its address, and the device of its link."""

    name: str
    address: str
    device: str

    def start(self, output: BinaryIO | Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start ``python -m`` with these words on the host; its output goes to a file."""
        path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        variables = {**os.environ, "INFLIGHT_ADDRESS": self.address, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with output.open("wb") if isinstance(output, Path) else contextlib.nullcontext(output) as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, python(), "-m", *command],
                env={**variables, **environment},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def cut(self) -> None:
        """Cut its link, without notice to either side."""
        ip("-n", self.name, "link", "set", self.device, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@contextlib.contextmanager
def hosts_with_links(limits_mbit: Sequence[int | None]) -> Iterator[list[Host]]:
    """Make a host for each limit of a link, in both directions (None: unlimited). They end with the block."""
    word = uuid.uuid4().hex[:5]
    router = f"inflight-{word}-r"
    with contextlib.ExitStack() as stack:
        ip("netns", "add", router)
        stack.callback(ip, "netns", "del", router)
        ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        hosts = []
        for number, limit in enumerate(limits_mbit):
            name, subnet = f"inflight-{word}-{number}", f"10.214.{number}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            inner, outer = f"e{word}{number}", f"r{word}{number}"
            ip("link", "add", inner, "netns", name, "type", "veth", "peer", "name", outer, "netns", router)
            for space, device, address in ((name, inner, f"{subnet}.2/24"), (router, outer, f"{subnet}.1/24")):
                ip("-n", space, "addr", "add", address, "dev", device)
                for up in ("lo", device):
                    ip("-n", space, "link", "set", up, "up")
                if limit is not None:
                    rate = ("rate", f"{limit}mbit", "burst", "256kb", "latency", "100ms")
                    command = ["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *rate]
                    subprocess.run(command, check=True, timeout=20)
            ip("-n", name, "route", "add", "default", "via", f"{subnet}.1")
            hosts.append(Host(name, f"{subnet}.2", inner))
        yield hosts
