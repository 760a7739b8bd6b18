"""Hosts of a trainer whose links are slow, or are cut while weights travel."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gates import wait_until
from tests.models import make_model
from tests.namespaces import Host, hosts_with_links, ip
from tests.servers import TOKEN

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
DEADLINE_S = 12.0


@pytest.mark.parametrize("transport", ["http", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_a_publish_ends_in_time_if_the_link_of_a_trainer_host_is_cut(tmp_path: Path, transport: str) -> None:
    """The server keeps the old weights, and the next incarnation of the trainer updates it."""
    model = make_model(tmp_path / "model", hidden_size=128)
    with hosts_with_links([4, 4, None]) as (first, second, third), contextlib.ExitStack() as stack:

        def start(host: Host, name: str, *words: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(host.start(tmp_path / f"{name}.log", *words, INFLIGHT_TOKEN=TOKEN))
            stack.callback(process.kill)
            return process

        serve = ("inflight", "serve", str(model), "--host", third.address, "--port", "8000", "--threads", "1")
        start(third, "server", *serve, "--ready-file", str(tmp_path / "ready"))
        wait_until(lambda: (tmp_path / "ready").exists(), "the server does not start", timeout_s=90)

        def publish(run: str) -> dict[str, Any]:
            for rank, host in enumerate((first, second)):
                rest = (host.address, f"http://{third.address}:8000", transport, str(DEADLINE_S))
                start(host, f"{run}-{rank}", "tests.weights.lost_host_program", str(tmp_path), run, str(rank), *rest)
            if run == "cut":
                wait_until(lambda: (tmp_path / f"{run}.sent").exists(), "nothing is sent", timeout_s=90)
                second.cut()
            wait_until(lambda: (tmp_path / f"{run}.json").exists(), "the publish does not end", timeout_s=90)
            seen: dict[str, Any] = json.loads((tmp_path / f"{run}.json").read_text())
            return seen

        cut = publish("cut")
        assert "rank 1" in cut["error"], cut
        assert (cut["state"], cut["version"]) == ("ready", 0)
        assert cut["took_s"] < DEADLINE_S + 5
        ip("-n", second.name, "link", "set", second.device, "up")
        ip("-n", second.name, "route", "replace", "default", "via", f"{second.address[:-1]}1")
        again = publish("again")
        assert (again["error"], again["state"], again["version"]) == (None, "ready", 7)
