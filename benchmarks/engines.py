"""The real engines: one publish compared with tensor by tensor, and the quickstart on each.

    python benchmarks/engines.py publish     # spans of a publish, and the same bytes one tensor at a time
    python benchmarks/engines.py learning    # the quickstart on the embedded engine, on each real one, on a mixed fleet

Tensor by tensor means one call of the engine's update route and one broadcast for each tensor, which is what engines'
own examples do. Both take turns in one run over the same group, while requests are running. `make engines` first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.real_engines.servers import ENGINES, VERSIONS, python_of
from tests.servers import TOKEN, ServerProcess

from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.http.client import HttpEndpoint
from inflight.types import PublishReport, WeightBucket
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import BucketSpec, GenerateRequest, SamplingParams, TensorSpec
from quickstart import run_quickstart
from results import read_results, write_results

NUM_ROUNDS = 5
NUM_RUNNING = 8
ROOT = Path(__file__).parents[1]
FLEETS = ("embedded", *ENGINES, "+".join(("embedded", *ENGINES)))


class Tensors:
    """A `WeightSource` of plain tensors with arbitrary values: only their movement is measured."""

    rank, world_size = 0, 1

    def __init__(self, model: torch.nn.Module) -> None:
        self.version = 0
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def parameter_specs(self) -> list[TensorSpec]:
        """See `WeightSource.parameter_specs`."""
        return [
            TensorSpec.model_validate(
                {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": tuple(t.shape)}
            )
            for name, t in self._tensors.items()
        ]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """See `WeightSource.gather_weights`."""
        specs, tensors = self.parameter_specs(), list(self._tensors.values())
        for bucket in buckets:
            part = slice(bucket.start, bucket.stop)
            yield WeightBucket(bucket.index, tuple(specs[part]), tuple(tensors[part]))


def random_model(path: Path) -> torch.nn.Module:
    """A Llama of about 100 M parameters in bfloat16, with random weights."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=1_024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=31_999,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model


async def keep_running(endpoint: InferenceEndpoint, until: asyncio.Event) -> None:
    """Keep requests running until told to stop."""

    async def one(i: int) -> None:
        j = 0
        while not until.is_set():
            j += 1
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            ids = tuple(range(2, 18))
            await endpoint.generate(GenerateRequest(request_id=f"{i}-{j}", prompt_token_ids=ids, sampling=sampling))

    await asyncio.gather(*(one(i) for i in range(NUM_RUNNING)))
    await endpoint.aclose()


async def first_token_s(url: str) -> float | None:
    """Return when the first token of the present version came, after the end of the pause. A publish does not wait."""
    endpoint = HttpEndpoint(url, token=TOKEN)
    try:
        timings = (await endpoint.weight_version()).last_update
        return None if timings is None else timings.first_token_s
    finally:
        await endpoint.aclose()


@contextlib.contextmanager
def served(name: str, model: Path) -> Iterator[str]:
    """Yield the URL of ``inflight serve --engine``, the engine on one core."""
    arguments = ("--engine", name, "--python", python_of(name), "--dtype", "bfloat16", "--device", "cpu")
    server = ServerProcess(model, model.parent / "server", *arguments)
    try:
        server.wait_until_ready(300.0)
        yield server.url
    finally:
        server.end()


def measure_publish(name: str, directory: Path) -> dict[str, Any]:
    """Return the median times of a bucketed publish and of one tensor by tensor, taking turns."""
    model = random_model(directory / "model")
    source: Any = Tensors(model)
    reports: dict[str, list[PublishReport]] = {"bucketed": [], "tensor by tensor": []}
    with (
        served(name, directory / "model") as url,
        WeightPublisher([HttpEndpoint(url, token=TOKEN)], ProcessGroupSender(), run_id="benchmark") as publisher,
        ThreadPoolExecutor() as threads,
    ):
        stop = asyncio.Event()
        load = threads.submit(lambda: asyncio.run(keep_running(HttpEndpoint(url, token=TOKEN), stop)))
        try:
            for i in range(NUM_ROUNDS + 1):
                for how, bucket_bytes in (("bucketed", DEFAULT_BUCKET_BYTES), ("tensor by tensor", 1)):
                    source.version += 1
                    report = publish_weights(source, publisher, deadline_s=120.0, bucket_bytes=bucket_bytes)
                    assert report is not None
                    time.sleep(1.0)
                    if i:  # the first one warms up
                        spans = replace(report.spans, first_token_s=asyncio.run(first_token_s(url)))
                        reports[how].append(replace(report, spans=spans))
                        print(f"{name}, {how}: {spans.total_s:.3f} s, paused {spans.pause_s:.3f} s", flush=True)
        finally:
            stop.set()
            load.result()
    ratios = [b.spans.total_s / a.spans.total_s for a, b in zip(*reports.values(), strict=True)]
    return {
        "engine": name,
        "version": VERSIONS[name],
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_tensors": len(source.parameter_specs()),
        "size_bytes": reports["bucketed"][0].size_bytes,
        "bucket_bytes": DEFAULT_BUCKET_BYTES,
        "rounds": NUM_ROUNDS,
        "running_requests": NUM_RUNNING,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "spans": {how: median_spans(found) for how, found in reports.items()},
    }


def median_spans(reports: Sequence[PublishReport]) -> dict[str, float | None]:
    """Return the median of each span in seconds."""
    spans = {}
    for name in ("gather_s", "pause_s", "wire_s", "load_s", "first_token_s", "total_s"):
        found = [value for report in reports if (value := getattr(report.spans, name)) is not None]
        spans[name] = statistics.median(found) if found else None
    return spans


def measure_learning(fleet: str, num_steps: int) -> dict[str, Any]:
    """Return the reward of each step of the quickstart, on servers that are ``+``-joined engines."""
    lines = [""]
    for engine in fleet.split("+"):
        lines += ["[[servers.fleet]]", f'engine = "{engine}"']
        lines += [] if engine == "embedded" else [f'python = "{python_of(engine)}"']
    return {"engine": fleet, **run_quickstart(num_steps=num_steps, more_config="\n".join(lines))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("publish", "learning"), nargs="*")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--fleet", choices=FLEETS, action="append", help="for learning")
    parser.add_argument("--steps", type=int, default=100, help="for learning: optimizer steps")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {"publish": [], "learning": []}
    with contextlib.suppress(FileNotFoundError):
        rows |= read_results("engines")["rows"]
    names = arguments.engine or ENGINES
    with tempfile.TemporaryDirectory() as directory:
        for what in arguments.what or tuple(rows):
            if what == "learning":
                for fleet in arguments.fleet or FLEETS:
                    row = measure_learning(fleet, arguments.steps)
                    rows[what] = [*(kept for kept in rows[what] if kept["engine"] != fleet), row]
                    print({key: value for key, value in row.items() if key != "curve"}, flush=True)
                    write_results("engines", rows)
                continue
            rows[what] = [row for row in rows[what] if row["engine"] not in names]
            rows[what] += [measure_publish(name, Path(directory) / name) for name in names]
            write_results("engines", rows)


if __name__ == "__main__":
    main()
