"""Makes the working tree known to Python as an installed package, and states what it needs that is missing.

Workers, engines and transports are found by their entry points, which a directory on the path alone does not have. So a
neighbouring directory holds what an installer would have written. Nothing is installed. Loads no torch.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOT_NEEDED = ("reasoning-gym", "tensorboard")
"""Packages of the extra ``local`` that the benchmark can do without."""


def project(root: Path = ROOT) -> dict[str, Any]:
    """Return the table ``project`` of a checkout's pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return found


def write_metadata(directory: Path, root: Path = ROOT) -> None:
    """Write the distribution's metadata into a directory, which then has to be on the path before others."""
    about = project(root)
    info = directory / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = []
    for group, entries in about["entry-points"].items():
        groups.append("\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]))
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def missing() -> list[str]:
    """Return the requirements of the project and its extra ``local`` that this Python does not meet."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return ["packaging (not installed)"]
    about = project()
    found = []
    for text in (*about["dependencies"], *about["optional-dependencies"]["local"]):
        requirement = Requirement(text)
        if requirement.name in NOT_NEEDED:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement} (not installed)")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement} ({installed} is installed)")
    return found


def explain_missing(requirements: list[str]) -> str:
    """Return one sentence that states what to install, and where."""
    return (
        f"{sys.executable} lacks {', '.join(requirements)}: install them there, or name another interpreter "
        "with make gpu GPU_PYTHON=..."
    )
