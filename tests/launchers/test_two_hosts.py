"""A run over two hosts with addresses of their own: network namespaces that only a virtual cable joins."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.run.runs import CONFIG, ROOT
from tests.servers import TOKEN

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
]
ADDRESSES = ("10.213.0.1", "10.213.0.2")


@dataclass
class Hosts:
    """Two hosts, by number; processes on them end with the context."""

    names: Sequence[str]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: int, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        own = {"INFLIGHT_ADDRESS": ADDRESSES[host], "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, "-m", *command],
                env={**os.environ, **own, **path, **environment},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    word = uuid.uuid4().hex[:6]
    names = (f"inflight-{word}-a", f"inflight-{word}-b")
    made = Hosts(names, tmp_path)
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ends = [f"v{word}{end}" for end in "ab"]
        peer = ("type", "veth", "peer", "name", ends[1], "netns", names[1])
        ip("link", "add", ends[0], "netns", names[0], *peer)
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
        yield made
        for process in made.processes:
            process.kill()
            process.wait()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@pytest.mark.parametrize("updates", [(), ("--updates.sharded", "true", "--updates.transport", "http")], ids=str)
def test_ranks_and_servers_on_two_hosts_meet_and_train(
    hosts: Hosts, tmp_path: Path, model_dir: Path, updates: Sequence[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    here = f"{ADDRESSES[0]}"
    run = hosts.start(
        0,
        "run",
        *("inflight", "train", str(config), "--launcher", "outside", "--run.launcher_options"),
        *(f'{{ port = 8101, address = "{here}" }}', "--servers.attach.join", f"{here}:8100", "--train.num_ranks", "2"),
        *("--run.num_steps", "3", *updates),
    )
    for rank in (0, 1):
        where = {"INFLIGHT_RUN": f"{here}:8101", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        hosts.start(rank, f"rank-{rank}", "inflight.run.ranks.rank", **where)
    for host in (0, 1):
        words = ("inflight", "serve", str(model_dir), "--port", "0", "--join", f"http://{here}:8100", "--threads", "1")
        hosts.start(host, f"server-{host}", *words)
    assert run.wait(700) == 0, "\n".join(map(hosts.log, ("run", "rank-0", "rank-1", "server-0", "server-1")))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["version"] for row in rows] == [1, 2, 3]
    reached = {url.rpartition(":")[0] for url in json.loads(rows[-1])["publish"]["outcomes"]}
    assert reached == {f"http://{address}" for address in ADDRESSES}
    for process in hosts.processes[1:3]:
        assert process.wait(30) == 0  # ranks end with the run
