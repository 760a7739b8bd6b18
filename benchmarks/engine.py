"""The embedded engine against transformers' ``generate``: the same requests, the same model, one run, one thread.

256 requests, 64 slots, prompts of 16 tokens. In static batches of 64, ``generate`` runs until the longest of a batch
is done, as its users do. Lengths: log-normal (mean about 64, cap 512), and all equal. Alternating order, best of three.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.tiny import TinyShape, create_tiny_model, save_tiny_model
from inflight.wire import GenerateRequest, SamplingParams
from results import write_results

NUM_REQUESTS, NUM_SLOTS, PROMPT_TOKENS, CAP = 256, 64, 16, 512


def lengths_of(kind: str, rng: random.Random) -> list[int]:
    if kind == "equal":
        return [64] * NUM_REQUESTS
    sigma = 0.9
    return [min(CAP, max(1, round(rng.lognormvariate(4.159 - sigma**2 / 2, sigma)))) for _ in range(NUM_REQUESTS)]


def time_generate(path: Path, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Callable[[], float]:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()

    def run() -> float:
        started = time.perf_counter()
        for first in range(0, NUM_REQUESTS, NUM_SLOTS):
            longest = max(lengths[first : first + NUM_SLOTS])
            model.generate(
                torch.tensor(prompts[first : first + NUM_SLOTS]),
                attention_mask=torch.ones(NUM_SLOTS, PROMPT_TOKENS, dtype=torch.int64),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                top_k=0,
                pad_token_id=256,
            )
        return time.perf_counter() - started

    return run


def time_engine(path: Path, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Callable[[], float]:
    def run() -> float:
        async def serve() -> float:
            endpoint = load_endpoint(path, max_concurrent=NUM_SLOTS, device="cpu")
            requests = [
                GenerateRequest(
                    request_id=str(i),
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=length, ignore_eos=True),
                )
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
            started = time.perf_counter()
            answers = await asyncio.gather(*(endpoint.generate(request) for request in requests))
            elapsed = time.perf_counter() - started
            assert [len(a.completions[0].token_ids) for a in answers] == list(lengths)
            await endpoint.aclose()
            return elapsed

        return asyncio.run(serve())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rng = random.Random(0)
    rows = []
    shapes = {"tiny (0.2 M)": TinyShape(max_model_len=1024), "small (3 M)": TinyShape("qwen3", 256, 4, 8, 1024)}
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in shapes.items():
            path = Path(directory) / name.split()[0]
            save_tiny_model(create_tiny_model(shape, 0), path)
            for kind in ("log-normal", "equal"):
                lengths = lengths_of(kind, rng)
                prompts = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in lengths]
                contenders = {
                    "generate": time_generate(path, prompts, lengths),
                    "engine": time_engine(path, prompts, lengths),
                }
                times: dict[str, list[float]] = {key: [] for key in contenders}
                for _ in range(repeats):
                    for key, run in contenders.items():
                        times[key].append(run())
                ratios = [g / e for g, e in zip(times["generate"], times["engine"], strict=True)]
                row = {
                    "model": name,
                    "lengths": kind,
                    "num_tokens": sum(lengths),
                    "longest": max(lengths),
                    "engine_tokens_per_s": sum(lengths) / min(times["engine"]),
                    "generate_tokens_per_s": sum(lengths) / min(times["generate"]),
                    "ratio_median": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                }
                rows.append(row)
                print(
                    f"{name:14} {kind:11} engine {row['engine_tokens_per_s']:8.0f} tokens/s, generate "
                    f"{row['generate_tokens_per_s']:8.0f} tokens/s, ratio {row['ratio_median']:.2f} "
                    f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
                    flush=True,
                )
    write_results("engine", rows)


if __name__ == "__main__":
    main()
