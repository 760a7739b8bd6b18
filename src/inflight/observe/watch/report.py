"""Writes the page of finished runs as a single offline file that contains the runs' data."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from inflight.base.whole_files import write_whole
from inflight.errors import CheckpointError, ConfigError
from inflight.observe.trace.files import EVENTS, STEPS, EventFollower
from inflight.observe.watch import views
from inflight.observe.watch.model import RunModel
from inflight.observe.watch.serving import asset

_WIDTH = 1200
_TILE_FACTOR = 4
"""Number of tiles into which each level of the timeline divides a tile of the previous level; the page uses it too."""
_MAX_LEVELS = 6
_TIMELINE_BYTES = 24 * 1024 * 1024
_NUM_ITEMS, _NUM_DETAILS, _NUM_WITH_TOKENS = 2000, 400, 60


def write_report(directories: Sequence[Path], output: Path) -> None:
    """Write the page of some runs to a file.

    Raises `ConfigError` for a directory without a run, and `CheckpointError` if the file cannot be written.
    """
    runs = []
    for directory in directories:
        if not any((directory / name).exists() for name in (EVENTS, STEPS)):
            raise ConfigError(f"{str(directory)!r} contains no run events: pass a run directory")
        run = RunModel(directory)
        with contextlib.closing(EventFollower(directory)) as follower:
            run.fold(follower.read())
        run.reading.is_complete = True
        runs.append(_embedded(run))
    try:
        write_whole(output, _page(to_json({"runs": runs}, inf_nan_mode="null").decode()))
    except OSError as error:
        raise CheckpointError(f"the report cannot be written to {output}: {error.strerror}") from error


def _embedded(run: RunModel) -> dict[str, Any]:
    listed = views.rollouts(run, "", "newest", 0, _NUM_ITEMS)
    details = {}
    for number, row in enumerate(listed["items"][:_NUM_DETAILS]):
        details[row["item"]] = views.rollout(run, row["item"], with_tokens=number < _NUM_WITH_TOKENS)
    return {
        "overview": views.overview(run, run.steps.names),
        "timeline": _levels(run),
        "rollouts": listed,
        "details": details,
    }


def _levels(run: RunModel) -> list[list[dict[str, Any]]]:
    """Return the timeline at increasing resolution, until it is complete or the report would become too large."""
    end_s = max(run.end_s, 0.1)
    levels: list[list[dict[str, Any]]] = []
    size = 0
    for level in range(_MAX_LEVELS):
        num = _TILE_FACTOR**level
        tiles = [views.timeline(run, end_s * i / num, end_s * (i + 1) / num, _WIDTH) for i in range(num)]
        size += len(to_json(tiles, inf_nan_mode="null"))
        if levels and size > _TIMELINE_BYTES:
            break
        levels.append(tiles)
        if not any("bins" in lane for tile in tiles for lane in tile["lanes"]):
            break
    return levels


def _page(data: str) -> str:
    """Return the page with embedded style, scripts and data, and a security policy that allows nothing else."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def embed(tag: str, name: str) -> str:
        text = asset(name)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{text}</{tag}>"

    page = asset("index.html")
    page = re.sub(r'<link rel="stylesheet" href="page/([\w.]+)">', lambda found: embed("style", found[1]), page)
    page = re.sub(r'<script src="page/([\w.]+)"></script>', lambda found: embed("script", found[1]), page)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Escaped so that no text of a run can close the element that contains it or open another one.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)
    before, scripts, after = page.partition("</footer>")
    return f'{before}{scripts}\n<script id="data" type="application/json">{safe}</script>{after}'
