"""The conformance kit on a GPU: the embedded engine behind HTTP in bfloat16, and the FSDP2 worker over NCCL."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from benchmarks.gpu.settings import Settings

from inflight.conformance import EndpointTarget, Kit, WorkerTarget, endpoint_checks, worker_checks
from inflight.conformance.checks import Check
from inflight.conformance.verdicts import BAD_OUTCOMES, CheckOutcome, Verdict

QUICK_ENDPOINT = ("E-10", "U-22")
QUICK_WORKER = ("W-10",)
_START_S = 60.0
"""Longest time to start a subject."""
_CPU_SCALE = 4
"""Deadlines on a CPU are this many times longer."""


def measure_endpoint(settings: Settings) -> dict[str, Any]:
    """Return the verdicts on the embedded engine."""
    serve = f"{shlex.quote(sys.executable)} -m inflight serve {{model}} --port {{port}} --token-file {{token_file}}"
    command = f"{serve} --device {settings.device} --dtype bfloat16"
    checks = _chosen(endpoint_checks(), QUICK_ENDPOINT, settings)
    return _verdicts(EndpointTarget(command=command), checks, settings, num_kits=3 if settings.on_gpu else 1)


def measure_worker(settings: Settings) -> dict[str, Any]:
    """Return the verdicts on the FSDP2 worker, in its default dtype, with a rank for each GPU; one on a CPU."""
    num_ranks = torch.cuda.device_count() if settings.on_gpu else 1
    target = WorkerTarget(factory="inflight_fsdp:FSDP", num_ranks=num_ranks, options={"device": settings.device})
    checks = _chosen(worker_checks(), QUICK_WORKER, settings)
    return {"num_ranks": num_ranks} | _verdicts(target, checks, settings, num_kits=1)


def _chosen(checks: Sequence[Check], quick: Sequence[str], settings: Settings) -> list[Check]:
    return [check for check in checks if not settings.quick or check.id in quick]


def _verdicts(
    target: EndpointTarget | WorkerTarget, checks: Sequence[Check], settings: Settings, *, num_kits: int
) -> dict[str, Any]:
    """Share the checks out to ``num_kits`` kits at a time, each with a subject of its own."""
    started = time.monotonic()
    with ThreadPoolExecutor(num_kits) as pool:
        parts = list(pool.map(lambda i: _run(target, checks[i::num_kits], settings), range(num_kits)))
    verdicts = [verdict for found, _ in parts for verdict in found]
    capabilities = parts[0][1].get("capabilities", {})
    return {
        "dtype": capabilities.get("dtype"),
        "transports": capabilities.get("transports"),
        "seconds": time.monotonic() - started,
        "num_checks": len(checks),
        "num_passed": sum(verdict.outcome is CheckOutcome.PASSED for verdict in verdicts),
        "not_run": sorted({check.id for check in checks} - {verdict.id for verdict in verdicts}),
        "skipped": {v.id: v.message for v in verdicts if v.outcome is CheckOutcome.SKIPPED},
        "failed": {v.id: f"{v.outcome}: {v.message}"[:600] for v in verdicts if v.outcome in BAD_OUTCOMES},
    }


def _run(
    target: EndpointTarget | WorkerTarget, checks: Sequence[Check], settings: Settings
) -> tuple[list[Verdict], Mapping[str, Any]]:
    """Run checks while there is time for them; return their verdicts, and what the subject reports of itself."""
    verdicts: list[Verdict] = []
    scale = 1 if settings.on_gpu else _CPU_SCALE
    with Kit(target, start_deadline_s=_START_S, deadline_scale=scale) as kit:
        for check in checks:
            if settings.left_s > scale * check.deadline_s or not verdicts:
                verdicts.append(kit.run(check))
        return verdicts, kit.facts
