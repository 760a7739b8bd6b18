"""The ports that a run's configuration names: that they are free is known before anything is written."""

from __future__ import annotations

from inflight.http.listening import bind
from inflight.launchers import Launcher
from inflight.run.config import RunConfig
from inflight.run.servers.joining import host_and_port


def check_ports(config: RunConfig, launcher: Launcher) -> None:
    """Raise `ConfigError` if an address at which the run is to listen is taken, or is none."""
    if (port := config.run.metrics_port) is not None:
        _check("127.0.0.1", port, "choose another run.metrics_port, or 0 for any")
    if (at := config.servers.attach.join) is not None:
        _check(*host_and_port(at), "choose another address for servers.attach.join")
    if port := launcher.port:
        _check(launcher.address, port, "choose another port in run.launcher_options")


def _check(host: str, port: int, remedy: str) -> None:
    bind(host, port, remedy, listens=False).close()  # who waits for the run must not connect yet
