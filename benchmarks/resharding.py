"""Resharding straight from trainer ranks to server ranks, against gathering on rank 0 and broadcasting.

    python benchmarks/resharding.py

Four trainer ranks hold rows (FSDP), two server ranks need columns and rows (tensor parallel), all processes of one
machine over gloo. ``direct``: `Resharder`. ``gathered``: torch's gather of each tensor on rank 0, a broadcast of it to
the server ranks, each of which keeps its part. The ways take turns, version by version, so that whatever the machine
does besides is shared; a version counts from a barrier to the next. Bytes of ``gathered`` are those of its tensors;
which rank passes a broadcast on is Gloo's choice.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inflight.weights.layouts import Box, Layout, merged, replicated, sharded
from inflight.weights.resharding import Plan, plan_transfers
from inflight.weights.transports.resharding import HostedGroup, Resharder
from inflight.wire import ProcessGroupSpec, TensorSpec
from results import write_results

TRAINERS, SERVERS = (0, 1, 2, 3), (4, 5)
HIDDEN_SIZE, INTERMEDIATE_SIZE = 1024, 2752
TIMEOUT_S = 120.0

Shards = dict[str, list[tuple[Box, torch.Tensor]]]


def model(num_layers: int) -> tuple[list[TensorSpec], Layout, Layout]:
    """Return the tensors of a decoder's layers in bfloat16, what trainers hold and what servers need."""

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype="bfloat16", shape=shape)

    h, i = HIDDEN_SIZE, INTERMEDIATE_SIZE
    layers = range(num_layers)
    column = [spec(f"{n}.{name}", h, h) for n in layers for name in ("q", "k", "v")]
    column += [spec(f"{n}.{name}", i, h) for n in layers for name in ("gate", "up")]
    row = [spec(f"{n}.{name}", h, size) for n in layers for name, size in (("o", h), ("down", i))]
    norms = [spec(f"{n}.norm", h) for n in layers]
    specs = [*column, *row, *norms]
    targets = merged(sharded(column, SERVERS, 0), sharded(row, SERVERS, 1), replicated(norms, SERVERS))
    return specs, sharded(specs, TRAINERS, 0), targets


def allocated(layout: Layout, rank: int) -> Shards:
    return {
        name: [(box, torch.full(box.shape, float(rank), dtype=torch.bfloat16)) for box in boxes]
        for name, boxes in layout.get(rank, {}).items()
    }


class Gathered:
    """What one writes without a plan: every tensor whole on rank 0, and from there to every server."""

    def __init__(self, specs: list[TensorSpec], rank: int) -> None:
        self.specs, self.rank = specs, rank
        self.trainers, self.receivers = dist.new_group(TRAINERS), dist.new_group((0, *SERVERS))
        self.whole = {s.shape: torch.empty(s.shape, dtype=torch.bfloat16) for s in specs}

    def move(self, held: Shards, needed: Shards) -> None:
        """Move one version."""
        for spec in self.specs:
            whole = self.whole[spec.shape]
            if self.rank in TRAINERS:
                parts = list(whole.chunk(len(TRAINERS))) if self.rank == 0 else None
                dist.gather(held[spec.name][0][1], parts, dst=0, group=self.trainers)
            if self.rank == 0 or self.rank in SERVERS:
                dist.broadcast(whole, 0, group=self.receivers)
            for box, tensor in needed.get(spec.name, ()):
                tensor.copy_(whole[tuple(slice(*edges) for edges in zip(box.starts, box.stops, strict=True))])


def rank_main(rank: int, directory: Path, num_layers: int, num_versions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    specs, sources, targets = model(num_layers)
    held, needed, same = (allocated(layout, rank) for layout in (sources, targets, targets))
    plan = plan_transfers(specs, sources, targets)
    resharder, _hosted = resharder_of(plan, rank, directory)
    gathered = Gathered(specs, rank)
    ways = {
        "direct": lambda: resharder.reshard(held, needed, TIMEOUT_S),
        "gathered": lambda: gathered.move(held, same),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for version in range(num_versions + 1):
        for way, move in ways.items():
            dist.barrier()
            started = time.monotonic()
            move()
            dist.barrier()
            if version:  # the first one allocates
                seconds[way].append(time.monotonic() - started)
    equal = all(torch.equal(a[0][1], b[0][1]) for a, b in zip(needed.values(), same.values(), strict=True))
    if not equal:
        raise SystemExit("the two ways differ")
    (directory / f"{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def resharder_of(plan: Plan, rank: int, directory: Path) -> tuple[Resharder, HostedGroup | None]:
    hosted, file = None, directory / "group.json"
    if rank == 0:
        hosted = HostedGroup("benchmark", len(TRAINERS) + len(SERVERS), TIMEOUT_S)
        file.write_text(hosted.spec.model_dump_json())
    dist.barrier()
    resharder = Resharder(plan, ProcessGroupSpec.model_validate_json(file.read_text()), rank)
    resharder.join()
    return resharder, hosted


def run_ranks(num_layers: int, num_versions: int) -> dict[str, list[float]]:
    world_size = len(TRAINERS) + len(SERVERS)
    with tempfile.TemporaryDirectory() as directory:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(world_size):
            variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [sys.executable, __file__, "rank", str(rank), directory, str(num_layers), str(num_versions)]
            ranks.append(subprocess.Popen(command, env=environment))
        for process in ranks:
            if process.wait(timeout=600):
                raise SystemExit(f"a rank ended with status {process.returncode}")
        found: dict[str, list[float]] = json.loads((Path(directory) / "0.json").read_text())
        return found


def measure(num_layers: int, num_versions: int) -> dict[str, Any]:
    specs, sources, targets = model(num_layers)
    plan = plan_transfers(specs, sources, targets)
    seconds = run_ranks(num_layers, num_versions)
    size_bytes = sum(spec.size_bytes for spec in specs)
    gathered_bytes = sum(t.num_elements * 2 for rank in TRAINERS[1:] for b in sources[rank].values() for t in b)
    ratios = [b / a for a, b in zip(seconds["direct"], seconds["gathered"], strict=True)]
    return {
        "size_bytes": size_bytes,
        "trainer_ranks": len(TRAINERS),
        "server_ranks": len(SERVERS),
        "lower_bound_bytes": plan.lower_bound_bytes,
        "direct": {
            "wire_bytes": plan.size_bytes,
            "sent_bytes": plan.sent_bytes,
            "received_bytes": plan.received_bytes,
            "seconds": seconds["direct"],
        },
        "gathered": {
            "wire_bytes": gathered_bytes + len(SERVERS) * size_bytes,
            "received_bytes": {0: gathered_bytes, **dict.fromkeys(SERVERS, size_bytes)},
            "seconds": seconds["gathered"],
        },
        "gathered / direct": {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
        },
    }


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of 25 MB each")
    parser.add_argument("--versions", type=int, default=7, help="moved in each way")
    arguments = parser.parse_args()
    row = measure(arguments.layers, arguments.versions)
    print(json.dumps(row, indent=2), flush=True)
    write_results("resharding", row)


if __name__ == "__main__":
    main()
