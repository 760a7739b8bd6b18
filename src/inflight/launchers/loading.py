"""Loads a launcher by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.base.extensions import find_factory, make
from inflight.launchers.launcher import Launcher
from inflight.launchers.local import LocalLauncher
from inflight.launchers.outside import OutsideLauncher

_BUILT_IN = {"local": LocalLauncher, "outside": OutsideLauncher}


def load_launcher(name: str, options: Mapping[str, Any]) -> Launcher:
    """Return a built-in launcher, an entry point in the group ``inflight.launchers``, or ``module:attribute``.

    Raises `ConfigError` if there is no such launcher, or if it cannot reach its hosts.
    """
    launcher: Launcher = make(Launcher, "launcher", "launchers", name, {}, options, _BUILT_IN)
    return launcher


def check_launcher(name: str) -> None:
    """Raise `ConfigError` unless the launcher exists. It is not constructed, because that may start a cluster."""
    find_factory("launcher", "launchers", name, _BUILT_IN)
