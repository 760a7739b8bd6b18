"""A run over two hosts with addresses of their own: network namespaces that only a virtual cable joins."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.namespaces import Host, hosts_with_links
from tests.run.runs import CONFIG
from tests.servers import TOKEN

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with hosts_with_links([None, None]) as made:
        yield made


@pytest.mark.parametrize("updates", [(), ("--updates.sharded", "true", "--updates.transport", "http")], ids=str)
def test_ranks_and_servers_on_two_hosts_meet_and_train(
    hosts: list[Host], tmp_path: Path, model_dir: Path, updates: Sequence[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    here = hosts[0].address
    logs = {name: tmp_path / f"{name}.log" for name in ("run", "rank-0", "rank-1", "server-0", "server-1")}
    with contextlib.ExitStack() as stack:

        def start(host: Host, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(host.start(logs[name], *command, INFLIGHT_TOKEN=TOKEN, **environment))
            stack.callback(process.kill)
            return process

        run = start(
            hosts[0],
            "run",
            *("inflight", "train", str(config), "--launcher", "outside", "--run.launcher_options"),
            *(f'{{ port = 8101, address = "{here}" }}', "--servers.attach.join", f"{here}:8100"),
            *("--train.num_ranks", "2", "--run.num_steps", "3", *updates),
        )
        ranks = []
        for rank, host in enumerate(hosts):
            where = {"INFLIGHT_RUN": f"{here}:8101", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            ranks.append(start(host, f"rank-{rank}", "inflight.run.ranks.rank", **where))
            words = ("inflight", "serve", str(model_dir), "--port", "0", "--join", f"http://{here}:8100")
            start(host, f"server-{rank}", *words, "--threads", "1")
        assert run.wait(700) == 0, "\n".join(log.read_text(errors="replace") for log in logs.values())
        rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["version"] for row in rows] == [1, 2, 3]
        reached = {url.rpartition(":")[0] for url in json.loads(rows[-1])["publish"]["outcomes"]}
        assert reached == {f"http://{host.address}" for host in hosts}
        for process in ranks:
            assert process.wait(30) == 0  # ranks end with the run
