"""How a launcher is found by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.base.extensions import make
from inflight.launchers.launcher import Launcher
from inflight.launchers.local import LocalLauncher
from inflight.launchers.outside import OutsideLauncher


def load_launcher(name: str, options: Mapping[str, Any]) -> Launcher:
    """Return a launcher of ours, an entry point in the group ``inflight.launchers``, or ``module:attribute``.

    Raises `ConfigError` if there is none, or if it cannot reach the hosts that it launches on.
    """
    launcher: Launcher = make(
        Launcher, "launcher", "launchers", name, {}, options, {"local": LocalLauncher, "outside": OutsideLauncher}
    )
    return launcher
