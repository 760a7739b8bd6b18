"""The ranks of the cases in test_resharding_ranks.py: ``python -m tests.weights.reshard_program DIRECTORY``.

Four trainer ranks, three server ranks. Each case forms a group of its own over some of them. Every rank runs the same
cases in the same order and writes what it saw to ``rank{RANK}.json`` after each. Ranks are forked before
any thread runs, so that torch is imported once; their exit statuses go to ``ended.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inflight.errors import InflightError
from inflight.weights.layouts import Box, Layout, merged, replicated, sharded
from inflight.weights.resharding import Plan, plan_transfers
from inflight.weights.transports.resharding import HostedGroup, Resharder, Shards
from inflight.wire import ProcessGroupSpec, TensorSpec

TRAINERS = (0, 1, 2, 3)
NUM_RANKS = 7
TIMEOUT_S = 20.0


def spec(name: str, *shape: int, dtype: Any = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


COLUMN = [spec("up", 30, 14), spec("qkv", 21, 8, dtype="bfloat16"), spec("embed", 53, 9)]
ROW = [spec("down", 14, 30), spec("out", 8, 21, dtype="bfloat16")]
WHOLE = [spec("norm", 14), spec("scale", 3, dtype="float64"), spec("bias", 5, dtype="bfloat16")]
SPECS = [*COLUMN, *ROW, *WHOLE]
LARGE = [spec(f"large.{i}", 1024, 256) for i in range(4)]


@dataclass(frozen=True)
class Case:
    """Layouts number the ranks of ``members``. ``spoil`` is done by a rank before it reshards, and may replace that."""

    name: str
    members: Sequence[int]
    specs: Sequence[TensorSpec]
    sources: Layout
    targets: Layout
    round_bytes: int = 1 << 20
    timeout_s: float = TIMEOUT_S
    dtype: str | None = None
    """What the trainers hold, where it is not the wire's dtype."""
    spoil: dict[int, Callable[[Resharder, Shards], Shards | None]] = field(default_factory=dict)

    def plan(self) -> Plan:
        return plan_transfers(self.specs, self.sources, self.targets)


def tensor_parallel(ranks: Sequence[int]) -> Layout:
    """Column-parallel tensors by rows of their weight, row-parallel ones by columns, the rest on every rank."""
    return merged(sharded(COLUMN, ranks, 0), sharded(ROW, ranks, 1), replicated(WHOLE, ranks))


class Doomed(dict[str, Any]):
    """Shards of a rank that is killed when it has packed some of them."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self.num_left = 9

    def get(self, *arguments: Any) -> Any:
        self.num_left -= 1
        if not self.num_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(*arguments)


def never_calls(resharder: Resharder, held: Shards) -> None:
    return None


def aborts_from_another_thread(resharder: Resharder, held: Shards) -> Shards:
    threading.Timer(0.3, resharder.abort).start()
    return held


def lacks_a_tensor(resharder: Resharder, held: Shards) -> Shards:
    return {name: shards for name, shards in held.items() if name != "down"}


def cases() -> list[Case]:
    fsdp = sharded(SPECS, TRAINERS, 0)
    replicas = merged(sharded(SPECS, TRAINERS[:2], 0), sharded(SPECS, TRAINERS[2:], 0))
    pipeline = merged(sharded(COLUMN[:1], (4,), 0), replicated(COLUMN[1:], (5, 6)), replicated([*ROW, *WHOLE], (6,)))
    tp2 = tensor_parallel((4, 5))
    large, large_tp2 = sharded(LARGE, TRAINERS, 0), sharded(LARGE, (4, 5), 1)
    six = tuple(range(6))
    return [
        Case("two servers", six, SPECS, fsdp, tp2),
        Case("three servers", range(7), SPECS, fsdp, tensor_parallel((4, 5, 6))),
        Case("stages", range(7), SPECS, fsdp, pipeline),
        Case("small rounds", range(7), SPECS, fsdp, tensor_parallel((4, 5, 6)), round_bytes=100),
        Case("replicas", six, SPECS, replicas, tp2),
        Case("same ranks", TRAINERS, SPECS, fsdp, tensor_parallel((2, 3))),
        Case("converted", six, SPECS, fsdp, tp2, dtype="float64"),
        Case("a missing tensor", six, SPECS, fsdp, tp2, spoil={2: lacks_a_tensor}),
        Case("too late", six, SPECS, fsdp, tp2, timeout_s=1.0, spoil={1: never_calls}),
        Case("aborted", six, SPECS, fsdp, tp2, timeout_s=2.0, spoil={1: never_calls, 5: aborts_from_another_thread}),
        Case("killed", six, LARGE, large, large_tp2, 1 << 16, spoil={1: lambda _, held: Doomed(held)}),
        Case(
            "host killed",
            (0, 2, 3, 4, 5),
            LARGE,
            sharded(LARGE, (0, 1, 2), 0),
            sharded(LARGE, (3, 4), 1),
            1 << 16,
            spoil={0: lambda _, held: Doomed(held)},
        ),
    ]


def whole(spec: TensorSpec, version: int) -> torch.Tensor:
    """A tensor's values in one version of the weights: the same in every process, exact in its dtype."""
    generator = torch.Generator().manual_seed(version * 1009 + sum(map(ord, spec.name)))
    return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))]


def shards_of(case: Case, layout: Layout, rank: int, version: int) -> dict[str, list[tuple[Box, torch.Tensor]]]:
    full = {s.name: whole(s, version) for s in case.specs}
    return {
        name: [(box, cut(full[name], box).clone()) for box in boxes] for name, boxes in layout.get(rank, {}).items()
    }


def group_spec(directory: Path, name: str, rank: int, world_size: int) -> tuple[ProcessGroupSpec, HostedGroup | None]:
    """Rank 0 hosts and writes how to join; the others wait for that."""
    file = directory / f"{name}.json"
    if rank == 0:
        hosted = HostedGroup(name, world_size, TIMEOUT_S)
        file.with_suffix(".new").write_text(hosted.spec.model_dump_json())
        file.with_suffix(".new").rename(file)
        return hosted.spec, hosted
    while not file.exists():
        time.sleep(0.01)
    return ProcessGroupSpec.model_validate_json(file.read_text()), None


def error_of(error: InflightError, started: float) -> dict[str, Any]:
    return {"error": [type(error).__name__, str(error)], "seconds": time.monotonic() - started}


def run_case(case: Case, resharder: Resharder, rank: int) -> dict[str, Any]:
    resharder.join()
    started = time.monotonic()
    seen: dict[str, Any] = {"sent": [], "received": [], "copied": [], "exact": []}
    for version in (1, 2):
        held: Any = shards_of(case, case.sources, rank, version)
        expected = shards_of(case, case.targets, rank, version)
        if case.dtype:
            held = {n: [(b, t.to(getattr(torch, case.dtype))) for b, t in shards] for n, shards in held.items()}
        if rank in case.spoil:
            held = case.spoil[rank](resharder, held)
            if held is None:
                return {}
        # Not contiguous: columns of something wider, as a fused parameter has them.
        needed = {
            name: [(box, torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype)[..., 1:-2]) for box, t in shards]
            for name, shards in expected.items()
        }
        try:
            traffic = resharder.reshard(held, needed, case.timeout_s)
        except InflightError as error:
            return error_of(error, started)
        pairs = [(a, b) for n in expected for (_, a), (_, b) in zip(needed[n], expected[n], strict=True)]
        seen["exact"].append(all(torch.equal(a, b) for a, b in pairs))
        seen["sent"].append(sum(traffic.sent_bytes.values()))
        seen["received"].append(sum(traffic.received_bytes.values()))
        seen["copied"].append(traffic.copied_bytes)
    return seen


def disagreement(spec: ProcessGroupSpec, rank: int) -> dict[str, Any]:
    """Rank 5 believes in another split than the others."""
    targets = tensor_parallel((4, 5)) if rank < 5 else merged(replicated(SPECS, (4,)), sharded(COLUMN, (5,), 0))
    started = time.monotonic()
    try:
        Resharder(plan_transfers(SPECS, sharded(SPECS, TRAINERS, 0), targets), spec, rank).join()
    except InflightError as error:
        return error_of(error, started)
    return {}


def rank_main(directory: Path, process: int) -> None:
    seen: dict[str, Any] = {}
    kept: list[Any] = []
    if process < 6:
        spec, hosted = group_spec(directory, "disagreement", process, 6)
        kept.append(hosted)
        seen["disagreement"] = disagreement(spec, process)
    for case in cases():
        if process in case.members:
            rank = list(case.members).index(process)
            spec, hosted = group_spec(directory, case.name, rank, len(case.members))
            resharder = Resharder(case.plan(), spec, rank, case.round_bytes)
            kept += [hosted, resharder]  # until the end: dropping them ends what others wait for
            seen[case.name] = run_case(case, resharder, rank)
            file = directory / f"rank{process}.json"
            file.with_suffix(".new").write_text(json.dumps(seen))
            file.with_suffix(".new").rename(file)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    ranks = []
    for process in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            rank_main(directory, process)
            return
        ranks.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    (directory / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
