"""Publishes from M trainer hosts to N server hosts with limited links: ``python -m benchmarks.sharded``, as root.

Every host is a network namespace whose link to a router carries 200 Mbit/s each way; a server's link carries M times
as much, except where the receiver's link is to be the limit. The trainer is the FSDP worker with one rank on each host,
the servers are ``inflight serve``. Gathered and sharded publishes of the same weights alternate. Results are written to
results/sharded.json. ``--quick`` runs a small part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from tests.namespaces import Host, hosts_with_links

LINK_MBIT = 200
MODEL_BYTES = 100_000_000
BUCKET_BYTES = 16 << 20
TOKEN = "benchmark"
DEADLINE_S = 120.0
FORWARD_TOKENS = 2_000
START_S = 300.0


@dataclass(frozen=True)
class Case:
    """One setting; ``server_mbit`` is the link of each server."""

    transport: str
    num_ranks: int
    num_servers: int
    server_mbit: int
    num_rounds: int = 3
    delta: bool = False
    changed_share: float = 1.0
    overlaps: bool = False
    """Whether forwards run after and during sharded publishes, in place of gathered and sharded publishes."""

    @property
    def modes(self) -> tuple[str, str]:
        return ("before forwards", "during forwards") if self.overlaps else ("gathered", "sharded")


def cases(*, is_quick: bool) -> Iterator[Case]:
    for transport in ("http", "gloo"):
        for num_ranks in (1, 2, 4):
            for num_servers in (1, 2, 8):
                if is_quick and (num_servers > 1 or num_ranks == 1):
                    continue
                num_rounds = 1 if num_servers == 8 else 3
                yield Case(transport, num_ranks, num_servers, num_ranks * LINK_MBIT, num_rounds)
        if not is_quick:
            yield Case(transport, 2, 1, LINK_MBIT)
    if not is_quick:
        for share in (0.01, 0.1):
            yield Case("http", 4, 1, 4 * LINK_MBIT, delta=True, changed_share=share)
        yield Case("http", 2, 1, 2 * LINK_MBIT, overlaps=True)


def measure(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """Run the publishes of one case, and return what rank 0 wrote."""
    limits = [LINK_MBIT] * case.num_ranks + [case.server_mbit] * case.num_servers
    with hosts_with_links(limits) as made, contextlib.ExitStack() as stack:

        def start(host: Host, name: str, *words: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(host.start(folder / f"{name}.log", *words, INFLIGHT_TOKEN=TOKEN))
            stack.callback(process.kill)
            return process

        ranks, servers = made[: case.num_ranks], made[case.num_ranks :]
        for number, host in enumerate(servers):
            words = ("inflight", "serve", str(model), "--host", host.address, "--port", "8000", "--threads", "1")
            ready = ("--ready-file", str(folder / f"ready-{number}"), "--exit-with-stdin")
            start(host, f"server-{number}", *words, *ready)
        wait_for(lambda: all((folder / f"ready-{number}").exists() for number in range(len(servers))), folder)
        pids = [json.loads((folder / f"ready-{number}").read_text())["pid"] for number in range(len(servers))]
        settings = {
            "case": asdict(case),
            "model": str(model),
            "ranks": [host.address for host in ranks],
            "servers": [f"http://{host.address}:8000" for host in servers],
            "pids": pids,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        running = [
            start(host, f"rank-{rank}", "benchmarks.sharded", "--rank", str(rank), str(folder))
            for rank, host in enumerate(ranks)
        ]
        wait_for(lambda: (folder / "result.json").exists() or any(it.poll() for it in running), folder)
        if not (folder / "result.json").exists():
            raise SystemExit("\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("rank-*.log"))))
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result


def wait_for(is_done: Any, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not is_done():
        if time.monotonic() > deadline:
            raise SystemExit("\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log"))))
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------------------ one rank


def rank_main(rank: int, folder: Path) -> None:
    """Publish gathered and sharded in turns; rank 0 writes the times."""
    import torch
    import torch.distributed as dist
    from tests.worker.worker_cases import make_batch

    from inflight.weights.send.publisher import WeightPublisher, publish_weights
    from inflight.weights.send.ranks import PartSender
    from inflight.weights.transports import make_sender
    from inflight_fsdp import create_worker

    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    case, address = Case(**settings["case"]), settings["ranks"][rank]
    routes = json.loads(subprocess.check_output(["ip", "-j", "route", "show", "default"]))
    os.environ["GLOO_SOCKET_IFNAME"] = routes[0]["dev"]
    store = dist.FileStore(str(folder / "store"), case.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case.num_ranks, timeout=timedelta(seconds=DEADLINE_S)
    )
    # With a copy on each host, forwards do not use the links.
    copies = {"shard_size": 1} if case.overlaps else {}
    worker = create_worker({"model_path": settings["model"], "dtype": "float32", "device": "cpu", **copies})
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in case.modes}
    firsts: dict[str, float] = {}
    batch = make_batch((FORWARD_TOKENS,), 0)
    with contextlib.ExitStack() as stack:
        if rank:
            parts = stack.enter_context(PartSender(worker, make_sender(case.transport, address=address)))
        else:
            options = {"run_id": "run", "token": TOKEN, "transport": case.transport, "address": address}
            sharded = worker if case.num_ranks > 1 else None
            publisher = WeightPublisher.connect(settings["servers"], **options, delta=case.delta, sharded=sharded)
            stack.callback(publisher.close)

        def publish(mode: str, version: int) -> Any:
            if rank:
                return parts.send(DEADLINE_S)
            can = {"sharded": mode != "gathered"}
            targets = {it: known.model_copy(update=can) for it, known in publisher.endpoints.items()}
            limits = {"deadline_s": DEADLINE_S, "bucket_bytes": BUCKET_BYTES}
            return publish_weights(worker, publisher, endpoints=targets, version=version, **limits)

        def forwards() -> None:
            if case.overlaps:
                with torch.no_grad():
                    worker.forward(batch)

        # Sharded first, since what it leaves in memory is less.
        turns = [mode for _ in range(case.num_rounds + 1) for mode in reversed(case.modes)]
        if case.delta:  # a delta follows an update that was cut in the same way
            turns.sort()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for number, mode in enumerate(turns):
            change(worker, case.changed_share, number)
            measured = Measured(settings["pids"])
            dist.barrier()
            measured.begin()
            if mode == "during forwards":
                publishing = pool.submit(publish, mode, number + 1)
                forwards()
                report = publishing.result()
            else:
                report = publish(mode, number + 1)
                forwards()
            found = measured.end()
            everyone: list[Any] = [None] * case.num_ranks
            dist.all_gather_object(everyone, found)
            if mode not in turns[:number]:  # it touches new memory
                firsts[mode] = found["growth_bytes"]
            elif not rank:
                rounds[mode].append(
                    {
                        "wall_s": found["wall_s"],
                        "sent_bytes": report.sent_bytes,
                        "pause_s": report.spans.pause_s,
                        "trainer_cpu_s": sum(it["cpu_s"] for it in everyone),
                        "server_cpu_s": found["server_cpu_s"],
                    }
                )
    if not rank:
        size_bytes = sum(spec.size_bytes for spec in worker.parameter_specs())
        (folder / "result.tmp").write_text(
            json.dumps({"size_bytes": size_bytes, "rank_0_growth_bytes": firsts, "rounds": rounds})
        )
        (folder / "result.tmp").rename(folder / "result.json")
    dist.destroy_process_group()


def change(worker: Any, share: float, seed: int) -> None:
    """Change that share of the elements of this rank's shards."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shard in worker._parameters.owned_shards():
            flat = shard.view(-1)
            num = max(1, round(share * flat.numel()))
            index = torch.randperm(flat.numel(), generator=random)[:num] if share < 1 else slice(None)
            flat[index] += 1e-3


class Measured:
    """Time, processor time and memory of one publish."""

    def __init__(self, server_pids: list[int]) -> None:
        self._pids = server_pids

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = status("VmRSS")
        self._servers = sum(map(cpu_of, self._pids))
        self._cpu, self._start = time.process_time(), time.monotonic()

    def end(self) -> dict[str, float]:
        return {
            "wall_s": time.monotonic() - self._start,
            "cpu_s": time.process_time() - self._cpu,
            "server_cpu_s": sum(map(cpu_of, self._pids)) - self._servers,
            "growth_bytes": status("VmHWM") - self._before,
        }


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def line_of(row: dict[str, Any]) -> str:
    """Return the medians of a case as one line."""

    def median(mode: str, key: str) -> float:
        return statistics.median(it[key] for it in row["rounds"][mode])

    both = [(mode, {key: median(mode, key) for key in row["rounds"][mode][0]}) for mode in row["rounds"]]
    gigabytes = row["size_bytes"] / 1e9
    of_modes = []
    for mode, it in both:
        cpu = it["trainer_cpu_s"] / gigabytes, it["server_cpu_s"] / gigabytes / row["num_servers"]
        growth, sent = row["rank_0_growth_bytes"][mode] / 1e6, it["sent_bytes"] / 1e6
        of_modes.append(
            f"{mode} {it['wall_s']:.2f} s, CPU {cpu[0]:.1f} and {cpu[1]:.1f} s/GB, rank 0 +{growth:.0f} MB, "
            f"sent {sent:.1f} MB, paused {1e3 * it['pause_s']:.0f} ms"
        )
    ratio = both[0][1]["wall_s"] / both[1][1]["wall_s"]
    what = f", delta of {row['changed_share']:.0%}" if row["delta"] else ""
    where = f"{row['transport']} M={row['num_ranks']} N={row['num_servers']} at {row['server_mbit']} Mbit/s{what}"
    return f"{where}: {ratio:.2f} ({'; '.join(of_modes)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return rank_main(arguments.rank, arguments.folder)
    if os.geteuid():
        raise SystemExit("only root may make network namespaces")
    os.environ["INFLIGHT_TESTS_FORK"] = "0"  # each process has memory of its own, which is measured
    from inflight.bench.server import make_model

    rows = []
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "model"
        make_model(model, MODEL_BYTES, "float32")
        for case in cases(is_quick=arguments.quick):
            with tempfile.TemporaryDirectory(dir=made) as folder:
                row = {**asdict(case), **measure(case, model, Path(folder))}
            rows.append(row)
            print(line_of(row), flush=True)
    if not arguments.quick:
        write_results("sharded", {"rows": rows})


if __name__ == "__main__":
    main()
