"""Trainer workers: peak memory of loading and of gathering a model of about 1 B parameters, beside full_state_dict.

    python benchmarks/workers.py memory

Two ranks on one machine. ``inflight``: `FsdpWorker` loads its rows only and gathers bucket by bucket. ``full state
dict``: what torch's own recipes do, rank 0 loads the whole model and torch.distributed.checkpoint broadcasts it, and
`get_model_state_dict` gathers it whole. Peaks are resident memory above what the process had before, per rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from results import write_results

NUM_RANKS = 2
BUCKET_BYTES = 256 << 20


def make_model(path: Path, hidden_size: int, num_layers: int) -> int:
    """Write a Llama in bfloat16 with random weights; return its number of parameters."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=2_048,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="1GB")
    return sum(parameter.numel() for parameter in model.parameters())


def resident_bytes(key: str) -> int:
    """Return ``VmRSS`` or ``VmHWM``, the peak since `measured` began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def measured(do: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what ``do`` returns, by how much resident memory grew at its peak and for good, and the seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = resident_bytes("VmRSS"), time.monotonic()
    result = do()
    seconds = time.monotonic() - started
    peak, after = resident_bytes("VmHWM"), resident_bytes("VmRSS")
    return result, {"peak_bytes": peak - before, "kept_bytes": after - before, "seconds": seconds}


def ours(path: Path) -> dict[str, Any]:
    from inflight.weights.buckets import plan_buckets
    from inflight_fsdp import create_worker

    worker, loading = measured(lambda: create_worker({"model_path": str(path), "device": "cpu"}))
    buckets = plan_buckets(worker.parameter_specs(), BUCKET_BYTES)

    def gather() -> None:
        for _ in worker.gather_weights(buckets):
            pass

    return {"loading": loading, "gathering": measured(gather)[1]}


def full_state_dict(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def load() -> torch.nn.Module:
        whole = {}
        if dist.get_rank() == 0:
            whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(path), dtype=torch.float32)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        set_model_state_dict(
            model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        )
        return model

    model, loading = measured(load)

    def gather() -> None:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        _ = {name: tensor.bfloat16() for name, tensor in whole.items()}

    return {"loading": loading, "gathering": measured(gather)[1]}


WAYS = {"inflight": ours, "full state dict": full_state_dict}


def rank_main(way: str, path: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.zeros(1) @ torch.zeros(1)
    found = WAYS[way](path)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(way: str, path: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        ranks = []
        for rank in range(NUM_RANKS):
            variables = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [sys.executable, __file__, "rank", way, str(path), directory]
            ranks.append(subprocess.Popen(command, env=environment))
        for process in ranks:
            if process.wait(timeout=1200):
                raise SystemExit(f"a rank of {way} ended with status {process.returncode}")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def measure_memory(hidden_size: int, num_layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        num_parameters = make_model(path, hidden_size, num_layers)
        gc.collect()
        row: dict[str, Any] = {"num_parameters": num_parameters, "ranks": NUM_RANKS, "bucket_bytes": BUCKET_BYTES}
        for way in WAYS:
            row[way] = run_ranks(way, path)
            for stage in ("loading", "gathering"):
                print(way, stage, [f"{r[stage]['peak_bytes'] / 2**20:,.0f} MiB" for r in row[way]], flush=True)
        for stage in ("loading", "gathering"):
            peak = {way: max(rank[stage]["peak_bytes"] for rank in row[way]) for way in WAYS}
            row[f"{stage}_ratio"] = peak["full state dict"] / peak["inflight"]
            print(f"{stage}: full state dict takes {row[f'{stage}_ratio']:.2f}x the memory", flush=True)
        return row


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory",), nargs="?", default="memory")
    parser.add_argument("--hidden-size", type=int, default=2_048)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    write_results("workers", {"memory": measure_memory(arguments.hidden_size, arguments.layers)})


if __name__ == "__main__":
    main()
