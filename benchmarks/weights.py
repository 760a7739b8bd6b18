"""How weights move: ``python -m benchmarks.weights [table|small|tokens|repeat|engines] ...``, all of them by default.

table     the spans of each transport and the machine's own limit, two sizes (what ``inflight bench weights`` prints)
real      the same for the weights of models/smollm2
small     1,000 small tensors as one bucket, and broadcast one by one
tokens    tokens that a server samples over an interval with one update, and without
repeat    1,000 updates in a row: memory, file handles and shared memory before and after
engines   real vLLM and SGLang with models/smollm2 and 0, 16 or 64 running requests: our publish compared with the
          engines' own ways to load new weights

Every ratio is taken within one run on the same bytes. Results are added to results/weights.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.results import DIRECTORY, read_results, write_results
from safetensors.torch import save_file
from tests.real_engines.servers import RealEngine, running
from transformers import AutoModelForCausalLM

from inflight.bench import limits
from inflight.bench.server import BenchServer, make_model, serving
from inflight.bench.weights import DEFAULT_TRANSPORTS, measure, sampling
from inflight.bench.weights import table as table_of
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender

SIZES = (64_000_000, 1_000_000_000)
SMOLLM2 = Path(__file__).parents[1] / "models" / "smollm2"
NUM_ROUNDS = 7
INTERVAL_S = 20.0


def measure_table() -> list[dict[str, Any]]:
    """Return the rows of both sizes."""
    rows = []
    for size_bytes in SIZES:
        results = measure(
            size_bytes, DEFAULT_TRANSPORTS, num_rounds=NUM_ROUNDS, report_progress=lambda text: print(text, flush=True)
        )
        print(table_of(results), flush=True)
        rows += [result.as_json() for result in results]
    return rows


def measure_real() -> list[dict[str, Any]]:
    """Return the rows of a real model."""
    transports = ("gloo", "shm", "file", "http", "gloo+delta", "shm+delta", "http+delta")
    results = measure(SMOLLM2, transports, num_rounds=5, report_progress=lambda text: print(text, flush=True))
    print(table_of(results), flush=True)
    return [result.as_json() for result in results]


def measure_small() -> dict[str, Any]:
    """Return the seconds of 1,000 tensors of 16 KB as one bucket and one by one, both bare, in turns."""
    num_tensors, size_bytes = 1_000, 16_384
    packed, apart = [], []
    for _ in range(5):
        packed.append(statistics.median(_with_packing(num_tensors, size_bytes)))
        apart.append(statistics.median(limits.broadcast_s([size_bytes] * num_tensors, 3)))
    ratios = [b / a for a, b in zip(packed, apart, strict=True)]
    print(f"1,000 tensors: {statistics.median(packed):.4f} s packed, {statistics.median(apart):.4f} s one by one")
    return {
        "num_tensors": num_tensors,
        "size_bytes": num_tensors * size_bytes,
        "packed_s": packed,
        "apart_s": apart,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _with_packing(num_tensors: int, size_bytes: int) -> list[float]:
    """Pack the tensors into one buffer, compute its checksum, and broadcast it."""
    from inflight.types import WeightBucket
    from inflight.weights.encode.bucket_bytes import Packer, checksum, pack
    from inflight.wire import TensorSpec

    tensors = tuple(torch.ones(size_bytes, dtype=torch.uint8) for _ in range(num_tensors))
    specs = tuple(TensorSpec(name=f"{i}", dtype="uint8", shape=(size_bytes,)) for i in range(num_tensors))
    packer = Packer()
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        checksum(pack(packer.pack_bucket(WeightBucket(0, specs, tensors)).tensors))
        seconds.append(time.perf_counter() - started)
    broadcast = limits.broadcast_s([num_tensors * size_bytes], 3)
    return [a + b for a, b in zip(seconds[1:], broadcast, strict=True)]


def measure_tokens() -> dict[str, Any]:
    """Return the tokens of intervals with one update of 1 GB through shared memory, and without, in turns."""
    kept: list[float] = []
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as made:
        model = make_model(Path(made) / "model", SIZES[-1], "float32")
        weights = ModuleWeights(model)
        with (
            serving(Path(made) / "model", Path(made), "float32", 1) as server,
            WeightPublisher.connect([server.url], run_id="tokens", token=server.token, transport="shm") as publisher,
        ):

            def update() -> None:
                weights.version += 1
                publish_weights(weights, publisher)

            update()
            with sampling(server.connect, 8):
                _interval(server, INTERVAL_S / 4, update)
                for _ in range(4):
                    without, with_one = _interval(server, INTERVAL_S, None), _interval(server, INTERVAL_S, update)
                    kept.append(with_one / without)
                    rows.append({"without": without, "with_one": with_one})
                    print(f"tokens: {without} without, {with_one} with one update", flush=True)
    return {
        "interval_s": INTERVAL_S,
        "size_bytes": SIZES[-1],
        "rounds": rows,
        "kept_median": statistics.median(kept),
        "kept_min": min(kept),
        "kept_max": max(kept),
    }


def _interval(server: BenchServer, seconds: float, update: Callable[[], None] | None) -> float:
    before, started = _num_tokens(server), time.monotonic()
    if update is not None:
        time.sleep(seconds / 4)
        update()
    time.sleep(max(0.0, seconds - (time.monotonic() - started)))
    return _num_tokens(server) - before


def _num_tokens(server: BenchServer) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("inflight_completion_tokens_total ")))


def measure_repeat(num_updates: int = 1_000) -> list[dict[str, Any]]:
    """Return what trainer and server hold after 100 updates and after all of them, over each transport."""
    rows = []
    with tempfile.TemporaryDirectory() as made:
        model = make_model(Path(made) / "model", 8_000_000, "float32")
        weights = ModuleWeights(model)
        with serving(Path(made) / "model", Path(made), "float32", 1) as server:
            for transport in ("gloo", "shm", "file", "http"):
                directory = Path(made) / "store" if transport == "file" else None
                run_id = f"repeat-{transport}"
                sender = make_sender(transport, directory=directory)  # type: ignore[arg-type]
                from inflight.http.client import HttpEndpoint

                endpoint = HttpEndpoint(server.url, token=server.token)
                with WeightPublisher([endpoint], sender, run_id=run_id, delta=transport == "shm") as publisher:
                    first: dict[str, dict[str, int]] = {}
                    started = time.monotonic()
                    for i in range(num_updates):
                        weights.version += 1
                        publish_weights(weights, publisher)
                        if i == num_updates // 10:
                            first = _held(server)
                    row = {
                        "transport": transport,
                        "num_updates": num_updates,
                        "early": first,
                        "late": _held(server),
                        "seconds": time.monotonic() - started,
                    }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def _held(server: BenchServer) -> dict[str, dict[str, int]]:
    time.sleep(0.5)  # an update is cleared away in the background
    return {"trainer": _held_by(os.getpid()), "server": _held_by(server.pid)}


def _held_by(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return {
        "rss_mib": kib // 1024,
        "file_handles": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "shared_memory_files": sum(1 for path in Path("/dev/shm").rglob("*") if path.is_file()),
    }


def measure_engines() -> list[dict[str, Any]]:
    """Return seconds from new weights in the trainer to an engine that serves them: ours, and the engines' own ways."""
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype="float32")
    rows = []
    for engine_name in ("vllm", "sglang"):
        with tempfile.TemporaryDirectory() as made, running(engine_name, SMOLLM2, max_concurrent=72) as engine:
            for num_requests in (0, 16, 64):  # leaves slots free, because attaching a client to SGLang samples tokens
                with sampling(partial(engine.endpoint, generate_timeout_s=3600.0), num_requests, max_tokens=512):
                    rows += _measure_engine(engine, model, Path(made) / "own", num_requests)
    return rows


def _measure_engine(engine: RealEngine, model: Any, directory: Path, num_requests: int) -> list[dict[str, Any]]:
    weights = ModuleWeights(model)
    capabilities = asyncio.run(_capabilities(engine))
    seconds: dict[str, list[float]] = {}
    paused: dict[str, list[float]] = {}
    ours = [transport for transport in ("gloo", "shm") if transport in capabilities.transports]
    for i in range(4):
        for transport in ours:
            run_id = f"engines-{uuid.uuid4().hex[:8]}"
            with WeightPublisher([engine.endpoint()], make_sender(transport), run_id=run_id) as publisher:  # type: ignore[arg-type]
                for _ in range(2):  # the second does not touch memory for the first time
                    weights.version += 1
                    report = publish_weights(weights, publisher)
                assert report is not None
                if i:
                    seconds.setdefault(f"inflight, {transport}", []).append(report.spans.total_s)
                    timings = report.endpoints[0].timings
                    assert timings is not None
                    paused.setdefault(f"inflight, {transport}", []).append(timings.paused_s)
        total_s, pause_s = _from_disk(engine, model, directory)
        if i:
            seconds.setdefault("the engine's own, from a file", []).append(total_s)
            paused.setdefault("the engine's own, from a file", []).append(pause_s)
    size_bytes = sum(spec.size_bytes for spec in weights.parameter_specs())
    rows = [
        {
            "engine": engine.kind.name,
            "num_requests": num_requests,
            "how": how,
            "size_bytes": size_bytes,
            "seconds": found,
            "median_s": statistics.median(found),
            "pause_median_s": statistics.median(paused[how]),
            "longest_pause_s": max(paused[how]),
        }
        for how, found in seconds.items()
    ]
    for row in rows:
        print(
            f"{row['engine']}, {num_requests} requests, {row['how']}: {row['median_s']:.3f} s, paused "
            f"{row['pause_median_s']:.3f} s",
            flush=True,
        )
    return rows


async def _capabilities(engine: RealEngine) -> Any:
    endpoint = engine.endpoint()
    try:
        return await endpoint.capabilities()
    finally:
        await endpoint.aclose()


def _from_disk(engine: RealEngine, model: Any, directory: Path) -> tuple[float, float]:
    """Save a safetensors file and have the engine load it as its own documentation says; total and paused seconds."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        source = engine.model / name
        if source.exists() and not (directory / name).exists():
            (directory / name).write_bytes(source.read_bytes())
    url = engine.process.url
    started = time.perf_counter()
    save_file({name: p.detach() for name, p in model.named_parameters()}, directory / "model.safetensors")
    if engine.kind.name == "vllm":
        _post(f"{url}/pause?mode=keep&clear_cache=false", None)
        paused = time.perf_counter()
        _post(f"{url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        _post(f"{url}/resume", None)
    else:
        _post(f"{url}/pause_generation", {"mode": "in_place"})
        paused = time.perf_counter()
        body = {"model_path": str(directory), "flush_cache": False, "abort_all_requests": False}
        _post(f"{url}/update_weights_from_disk", body)
        _post(f"{url}/continue_generation", {})
    ended = time.perf_counter()
    return ended - started, ended - paused


def _post(url: str, body: Any) -> None:
    content = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200, answer.read()


PARTS: dict[str, Callable[[], Any]] = {
    "table": measure_table,
    "real": measure_real,
    "small": measure_small,
    "tokens": measure_tokens,
    "repeat": measure_repeat,
    "engines": measure_engines,
}


def main() -> None:
    """Measure the parts that were asked for and keep what there is of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    torch.set_num_threads(1)
    for part in parser.parse_args().parts or PARTS:
        rows = read_results("weights")["rows"] if (DIRECTORY / "weights.json").exists() else {}
        write_results("weights", {**rows, part: PARTS[part]()})


if __name__ == "__main__":
    main()
