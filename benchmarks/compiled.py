"""The embedded engine with a compiled decode step against the same engine without, on the CPU with one thread.

64 slots, prompts of 16 tokens, models and lengths of `engine.py`; and one request at a time. The two take turns.
Seconds are the process's CPU time, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine import CAP, NUM_SLOTS, PROMPT_TOKENS
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.tiny import TinyShape, create_tiny_model, save_tiny_model
from inflight.wire import GenerateRequest, SamplingParams
from results import write_results

MODELS = {"tiny (0.2 M)": TinyShape(max_model_len=1024), "small (3 M)": TinyShape("qwen3", 256, 4, 8, 1024)}


def loads() -> dict[str, Sequence[int]]:
    rng, sigma = random.Random(0), 0.9
    drawn = [min(CAP, max(1, round(rng.lognormvariate(4.159 - sigma**2 / 2, sigma)))) for _ in range(96)]
    return {"96, log-normal": drawn, "64, equal": [64] * NUM_SLOTS, "one alone": [128]}


async def sampling_s(endpoint: EmbeddedEndpoint, lengths: Sequence[int]) -> float:
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(random.Random(i).randrange(256) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=length, ignore_eos=True),
        )
        for i, length in enumerate(lengths)
    ]
    started = time.process_time()
    await asyncio.gather(*(endpoint.generate(request) for request in requests))
    return time.process_time() - started


async def measure(path: Path, num_rounds: int) -> tuple[float, dict[str, dict[bool, list[float]]]]:
    """Return the CPU seconds that making the compiled engine took, and those of each load, compiled and not."""
    started = time.process_time()
    endpoints = {True: load_endpoint(path, device="cpu", max_concurrent=NUM_SLOTS, compile=True)}
    compile_s = time.process_time() - started
    endpoints[False] = load_endpoint(path, device="cpu", max_concurrent=NUM_SLOTS)
    found: dict[str, dict[bool, list[float]]] = {}
    for load, lengths in loads().items():
        found[load] = {True: [], False: []}
        for i in range(num_rounds + 1):
            for is_compiled, endpoint in endpoints.items():
                seconds = await sampling_s(endpoint, lengths)
                if i:  # the first round warms up
                    found[load][is_compiled].append(seconds)
    for endpoint in endpoints.values():
        await endpoint.aclose()
    return compile_s, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in MODELS.items():
            path = Path(directory) / name.split()[0]
            save_tiny_model(create_tiny_model(shape, 0), path)
            compile_s, found = asyncio.run(measure(path, num_rounds))
            for load, seconds in found.items():
                ratios = [eager / own for own, eager in zip(seconds[True], seconds[False], strict=True)]
                num_tokens = sum(loads()[load])
                row = {
                    "model": name,
                    "load": load,
                    "compile_cpu_s": compile_s,
                    "compiled_tokens_per_cpu_s": num_tokens / statistics.median(seconds[True]),
                    "eager_tokens_per_cpu_s": num_tokens / statistics.median(seconds[False]),
                    "ratio_median": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                }
                rows.append(row)
                print(row, flush=True)
    write_results("compiled", rows)


if __name__ == "__main__":
    main()
