"""One section in this process: ``python -m benchmarks.gpu.section`` with the arguments that `benchmarks.gpu` gives."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import SECTIONS, Settings


def main() -> int:
    """Measure, and write the figures or the error to a file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[section.name for section in SECTIONS])
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings = Settings(
        arguments.device, arguments.quick, arguments.place, deadline=time.monotonic() + arguments.seconds
    )
    (module,) = (section.module for section in SECTIONS if section.name == arguments.name)
    name, _, function = module.partition(":")
    try:
        measure = getattr(importlib.import_module(f"benchmarks.gpu.{name}"), function or "measure")
        result: dict[str, Any] = {"figures": measure(settings)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    arguments.out.write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
