"""``python -m benchmarks.gpu``: what this project cannot prove on a CPU, in less than ten minutes, without a network.

Needs torch with CUDA. Each section runs in a process of its own, which is killed at its limit; a section that fails is
recorded with its error, and the others continue. Exit status: 0 every section ended and no check of a kit failed, 1
some did, 2 nothing was run. With a GPU and in full size, the figures go to benchmarks/results/gpu.json, from which
``make docs`` makes tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.distribution import ROOT, explain_missing, missing, write_metadata
from benchmarks.gpu.settings import CPU_LIMIT_SCALE, SECTIONS
from benchmarks.gpu.tables import section_text, targets_table
from benchmarks.gpu.targets import kits_are_passed, targets_of
from benchmarks.results import DIRECTORY, record_of

RESULT = DIRECTORY / "gpu.json"
_MARGIN_S = 12.0
"""How long before its limit a section should be done, so that it can still say what it found."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections and return the exit status."""
    arguments = _arguments(argv)
    if lacking := missing():
        return _refused(explain_missing(lacking))
    if arguments.device == "cuda" and (why := _no_cuda()):
        return _refused(f"{why}: run this where there is one, or see that it runs with --device cpu --quick")
    sections = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]
    started = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="inflight-gpu-") as made:
        place = Path(made)
        write_metadata(place / "distribution")
        path = [str(place / "distribution"), str(ROOT / "src"), str(ROOT)]
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TQDM_DISABLE": "1",
        }
        for section in sections:
            limit_s = section.limit_s * (1 if arguments.device == "cuda" else CPU_LIMIT_SCALE)
            print(f"{section.name}: {section.what}, at most {limit_s:g} s", flush=True)
            found[section.name] = _run(section.name, limit_s, arguments, place, environment)
            print(_told(section.name, found[section.name]), flush=True)
        rows: dict[str, Any] = {
            "device": arguments.device,
            "quick": arguments.quick,
            "seconds": time.monotonic() - started,
            "sections": found,
        }
        rows["targets"] = targets_of(rows)
        sys.path.insert(0, path[0])  # where the version of this project is written
        try:
            record = record_of("gpu", rows)
        finally:
            sys.path.remove(path[0])
        _write(record, arguments)
    print(targets_table(rows["targets"]))
    is_good = all("figures" in section for section in found.values()) and kits_are_passed(rows["targets"])
    return 0 if is_good else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", action="append", choices=names, metavar="SECTION", help=f"one of {', '.join(names)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: see that everything runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the figures instead")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("--device cpu is for seeing that everything runs: add --quick")
    return arguments


def _refused(why: str) -> int:
    print(f"benchmarks.gpu: {why}", file=sys.stderr)
    return 2


def _no_cuda() -> str | None:
    """Return why there is nothing to run on; asks another process, so that this one holds no GPU memory."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if answer.returncode != 0:
        return f"torch cannot be imported ({answer.stderr.strip().splitlines()[-1]})"
    version, count = answer.stdout.split()[-2:]
    return None if int(count) else f"torch {version} sees no GPU"


def _run(
    name: str, limit_s: float, arguments: argparse.Namespace, place: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Run one section in a process of its own; return its figures or its error, and how long it took."""
    out, log = place / f"{name}.json", place / f"{name}.log"
    (place / name).mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu.section", name, "--device", arguments.device]
    command += ["--place", str(place / name), "--out", str(out)]
    command += ["--seconds", str(max(limit_s - _MARGIN_S, limit_s / 2))]
    command += ["--quick"] if arguments.quick else []
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what the section started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if not result:
        words = " ".join(log.read_text(errors="replace").split()[-60:])
        why = f"its limit of {limit_s:g} s was over" if status is None else f"it ended with status {status}"
        result = {"error": f"{why}; its last output: {words}"}
    return {"seconds": seconds, "limit_s": limit_s} | result


def _told(name: str, section: dict[str, Any]) -> str:
    head = f"{name}: {section['seconds']:.0f} s"
    if "error" in section:
        return f"{head}, FAILED: {section['error']}\n"
    return f"{head}\n{section_text(name, section['figures'])}\n"


def _write(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the figures. Of a run of some sections, those of the others stay if the same machine made them."""
    out = arguments.out
    if out is None:
        if arguments.device != "cuda" or arguments.quick:
            return
        out = RESULT
    if arguments.only and out.exists():
        before = json.loads(out.read_text())
        rows = record["rows"]
        is_alike = all(before[key] == record[key] for key in ("machine", "versions"))
        if is_alike and all(before["rows"][key] == rows[key] for key in ("device", "quick")):
            rows["sections"] = before["rows"]["sections"] | rows["sections"]
            rows["targets"] = targets_of(rows)
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
