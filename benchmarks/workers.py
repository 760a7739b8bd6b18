"""Trainer workers: memory of loading and gathering, speed of a step, and whether a run learns alike with each.

    python benchmarks/workers.py memory    # a model of about 1 B parameters
    python benchmarks/workers.py speed     # forward, backward and step; segments of equal length, nothing padded
    python benchmarks/workers.py learning  # the quickstart with each trainer

Two ranks on one machine. ``inflight``: `FsdpWorker` loads its rows only and gathers bucket by bucket. ``full state
dict``: what torch's own recipes do, rank 0 loads the whole model and torch.distributed.checkpoint broadcasts it, and
`get_model_state_dict` gathers it whole. Peaks are resident memory above what the process had before, per rank.

Speed, step by step in turns: ``torchtitan``: `TorchTitanWorker`. ``hand-written``: ``fully_shard`` in a plain loop.
``accelerate``: the same loop on a model that accelerate's `fsdp2_prepare_model` sharded, as its Accelerator does; that
class itself offers no FSDP2 on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.base.peak_memory import PeakMemory
from inflight.contracts import TrainerWorker
from inflight.types import MicroBatch
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight_fsdp import create_worker
from quickstart import run_quickstart
from results import read_results, write_results

ROOT = Path(__file__).parents[1]
WHAT = ("memory", "speed", "learning")
TRAINERS = ("fsdp", "torchtitan")
NUM_RANKS = 2
SEGMENT_LENGTH = 256
SIZES = ((256, 4, 4_096, 8, 12), (512, 8, 32_000, 4, 8))
"""Of the models whose speed is measured: hidden size, layers and vocabulary; segments of a batch, steps."""


def make_model(path: Path, hidden_size: int, num_layers: int, vocab_size: int = 32_000) -> int:
    """Write a Llama in bfloat16 with random weights; return its number of parameters."""
    config = LlamaConfig(
        vocab_size=vocab_size,
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


def measured(do: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what ``do`` returns, by how much resident memory grew at its peak and for good, and the seconds."""
    memory, started = PeakMemory(), time.monotonic()
    result = do()
    seconds = time.monotonic() - started
    return result, {"peak_bytes": memory.grown_bytes(), "kept_bytes": memory.kept_bytes(), "seconds": seconds}


def ours(path: Path) -> dict[str, Any]:
    worker, loading = measured(lambda: create_worker({"model_path": str(path), "device": "cpu"}))
    buckets = plan_buckets(worker.parameter_specs(), DEFAULT_BUCKET_BYTES)

    def gather() -> None:
        for _ in worker.gather_weights(buckets):
            pass

    return {"loading": loading, "gathering": measured(gather)[1]}


def full_state_dict(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

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


class HandWritten:
    """A loop as one writes it: whole logits of a rectangular batch, ``fully_shard``, fused AdamW."""

    def __init__(self, path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.model = self.sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def sharded(self, model: Any, mesh: DeviceMesh) -> Any:
        """Shard the model in place."""
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, token_ids_BL: torch.Tensor) -> None:
        """Forward, backward, step."""
        logits_BLV = self.model(input_ids=token_ids_BL, use_cache=False).logits[:, :-1]
        logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, token_ids_BL[:, 1:, None]).squeeze(-1)
        (-logprobs_BL.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accelerate(HandWritten):
    """The same loop, sharded by accelerate."""

    def sharded(self, model: Any, mesh: DeviceMesh) -> Any:
        """Shard the model in place, each layer by itself as the launcher's usual policy has it."""
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh={("fsdp",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=["fsdp"]),
            mixed_precision="no",
            device=torch.device("cpu"),
            is_main_process=dist.get_rank() == 0,
        )
        return fsdp2_prepare_model(accelerator, model)


class Ours:
    """The same through the trainer contract."""

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker = worker

    def step(self, token_ids_BL: torch.Tensor) -> None:
        """Forward, backward, step."""
        num, length = token_ids_BL.shape
        positions_T = torch.arange(length).repeat(num)
        batch = MicroBatch(
            token_ids_T=token_ids_BL.reshape(-1),
            position_ids_T=positions_T,
            segment_ids_T=torch.arange(num).repeat_interleave(length),
            segment_lengths=(length,) * num,
            loss_mask_T=positions_T > 0,
            behaviour_logprobs_T=torch.zeros(num * length),
            advantages_T=torch.ones(num * length),
            temperature_T=torch.ones(num * length),
            versions_T=torch.zeros(num * length, dtype=torch.int64),
        )
        self.worker.backward(-self.worker.forward(batch).sum())
        self.worker.step()


def speed(path: Path) -> dict[str, Any]:
    """Take turns, step by step, so that other work on the machine affects all of them."""
    num_segments, num_steps = json.loads((path / "speed.json").read_text())
    from inflight_fsdp.torchtitan import create_worker as create_titan

    options = {"model_path": str(path), "device": "cpu"}
    ways: dict[str, Any] = {
        "inflight": Ours(create_worker(options)),
        "torchtitan": Ours(create_titan(options)),
        "hand-written": HandWritten(path),
        "accelerate": Accelerate(path),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    random = torch.Generator().manual_seed(dist.get_rank())
    for i in range(num_steps + 2):
        token_ids_BL = torch.randint(4_096, (num_segments, SEGMENT_LENGTH), generator=random)
        for way, loop in ways.items():
            dist.barrier()
            started = time.monotonic()
            loop.step(token_ids_BL)
            if i > 1:  # the first ones allocate
                seconds[way].append(time.monotonic() - started)
    return {"seconds": seconds}


WAYS = {"inflight": ours, "full state dict": full_state_dict}
PROGRAMS = {**WAYS, "speed": speed}


def rank_main(way: str, path: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.zeros(1) @ torch.zeros(1)
    found = PROGRAMS[way](path)
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
        row: dict[str, Any] = {
            "num_parameters": num_parameters,
            "ranks": NUM_RANKS,
            "bucket_bytes": DEFAULT_BUCKET_BYTES,
        }
        for way in WAYS:
            row[way] = run_ranks(way, path)
            for stage in ("loading", "gathering"):
                print(way, stage, [f"{r[stage]['peak_bytes'] / 2**20:,.0f} MiB" for r in row[way]], flush=True)
        for stage in ("loading", "gathering"):
            peak = {way: max(rank[stage]["peak_bytes"] for rank in row[way]) for way in WAYS}
            row[f"{stage}_ratio"] = peak["full state dict"] / peak["inflight"]
            print(f"{stage}: full state dict takes {row[f'{stage}_ratio']:.2f}x the memory", flush=True)
        return row


def measure_speed() -> list[dict[str, Any]]:
    """Return tokens/s of one rank, and the ratios of speed step by step, for two sizes of model."""
    rows = []
    for hidden_size, num_layers, vocab_size, num_segments, num_steps in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            num_parameters = make_model(path, hidden_size, num_layers, vocab_size)
            (path / "speed.json").write_text(json.dumps([num_segments, num_steps]))
            found = run_ranks("speed", path)[0]["seconds"]
        ratios = {
            f"{way} / {other}": [b / a for a, b in zip(found[way], found[other], strict=True)]
            for way in ("inflight", "torchtitan")
            for other in ("hand-written", "accelerate")
        }
        tokens = num_segments * SEGMENT_LENGTH
        rows.append(
            {
                "num_parameters": num_parameters,
                "vocab_size": vocab_size,
                "ranks": NUM_RANKS,
                "tokens_per_rank": tokens,
                "tokens_per_s": {way: tokens / statistics.median(seconds) for way, seconds in found.items()},
                "ratios": {
                    way: {"median": statistics.median(each), "quartiles": statistics.quantiles(each, n=4)[::2]}
                    for way, each in ratios.items()
                },
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_learning(trainer: str, num_steps: int) -> dict[str, Any]:
    """Return the reward of each step of the quickstart."""
    return {"trainer": trainer, **run_quickstart("--train.trainer", trainer, num_steps=num_steps)}


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT, nargs="*")
    parser.add_argument("--hidden-size", type=int, default=2_048, help="for memory")
    parser.add_argument("--layers", type=int, default=16, help="for memory")
    parser.add_argument("--steps", type=int, default=100, help="for learning: optimizer steps")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        rows = read_results("workers")["rows"]
    for what in arguments.what or WHAT:
        if what == "memory":
            rows[what] = measure_memory(arguments.hidden_size, arguments.layers)
        elif what == "speed":
            rows[what] = measure_speed()
        else:
            rows[what] = [measure_learning(trainer, arguments.steps) for trainer in TRAINERS]
            for row in rows[what]:
                print({key: value for key, value in row.items() if key != "curve"}, flush=True)
        write_results("workers", rows)


if __name__ == "__main__":
    main()
