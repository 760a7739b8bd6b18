"""Where benchmarks keep their results: JSON with the figures, the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "results"


def write_results(name: str, rows: Any) -> None:
    """Write ``results/NAME.json``."""
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{name}.json").write_text(json.dumps(record_of(name, rows), indent=2) + "\n")


def record_of(name: str, rows: Any) -> dict[str, Any]:
    """Return results with the date, the machine and the versions."""
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {package: version(package) for package in ("inflight", "torch", "transformers")},
        "rows": rows,
    }


def read_results(name: str) -> dict[str, Any]:
    """Return what `write_results` wrote."""
    record: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return record


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
