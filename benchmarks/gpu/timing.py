"""Time and memory of a call: CUDA's events and counters on a GPU, the clock and a ledger of storages on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from benchmarks.gpu.settings import Settings

Contender = Callable[[], object] | str
"""What is measured, or why it cannot be."""


def seconds_of(call: Callable[[], object], settings: Settings) -> float:
    """Call once and return its seconds, the work that it queued on the GPU included."""
    if not settings.on_gpu:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def peak_bytes(call: Callable[[], object], settings: Settings) -> int:
    """Call once and return the most memory that it held beyond what was held before."""
    if not settings.on_gpu:
        from tests.losses.ledger import LiveBytes

        with LiveBytes() as ledger:
            call()
        return ledger.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def in_turns(
    contenders: Mapping[str, Contender],
    settings: Settings,
    *,
    num_rounds: int,
    budget_s: float,
    before: Callable[[], None] = lambda: None,
    kept_bytes: int = 0,
) -> dict[str, dict[str, Any]]:
    """Return ``seconds`` and ``peak_bytes`` of each contender, or why it is ``absent`` or ``failed``.

    Memory is measured first, without ``kept_bytes``, which every contender leaves behind. Then the contenders take
    turns, the order turning round each time, until ``num_rounds`` are done or ``budget_s`` is spent, but at least once.
    ``before`` precedes every call.
    """
    started = time.monotonic()
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, contender in contenders.items():
        if isinstance(contender, str):
            rows[name] = {"absent": contender}
            continue
        try:
            if settings.on_gpu:  # what the first call allocates for good, such as cuBLAS's workspace, is not counted
                before()
                contender()
            before()
            rows[name] = {"peak_bytes": peak_bytes(contender, settings) - kept_bytes}
        except Exception as error:  # other frameworks may raise anything; too little memory is a result too
            rows[name] = {"failed": in_words(error)}
        else:
            runs[name] = contender
        if settings.on_gpu:
            before()
            torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(num_rounds):
        if i and time.monotonic() - started > budget_s:
            break
        for name in runs if i % 2 == 0 else reversed(runs):
            before()
            seconds[name].append(seconds_of(runs[name], settings))
    for name, found in seconds.items():
        rows[name] |= {"seconds": spread(found), "num_rounds": len(found)}
    return rows


def in_words(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
