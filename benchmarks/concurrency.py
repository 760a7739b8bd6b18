"""Tokens per CPU second of the embedded engine, of transformers' ``generate`` and of vLLM, by concurrency.

    inflight pretrained-model models/smollm2
    make engines
    python -m benchmarks.concurrency models/smollm2 --vllm .engines/vllm-0.32.0/bin/python

Each contender generates in a process of its own with one thread, in bfloat16: prompts of 16 random tokens, completions
of 64 tokens at temperature 1, all started together. Contenders take turns. Loading, compiling and one completion per
sequence to warm up are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONCURRENCIES = (1, 8, 32, 64)
NUM_PROMPT_TOKENS, NUM_TOKENS = 16, 64
WARM_UP_TOKENS = 4
Generate = Callable[[list[list[int]], int], None]
"""Generates that many tokens for each prompt."""


def embedded(path: str, num: int) -> Generate:
    """Return a function that generates with the embedded engine."""
    import asyncio

    from inflight.engines.embedded.loading import load_endpoint
    from inflight.wire import GenerateRequest, SamplingParams

    endpoint = load_endpoint(Path(path), dtype="bfloat16", device="cpu", max_concurrent=num)

    async def generate(prompts: list[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        requests = [
            GenerateRequest(request_id=f"{num_tokens}-{i}", prompt_token_ids=tuple(prompt), sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(endpoint.generate(request) for request in requests))

    runner = asyncio.Runner()
    return lambda prompts, num_tokens: runner.run(generate(prompts, num_tokens))


def transformers_generate(path: str, num: int) -> Generate:
    """Return a function that generates with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        options = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "do_sample": True, "top_k": 0}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)

    return generate


def vllm(path: str, num: int) -> Generate:
    """Return a function that generates with vLLM, in this process."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(path, dtype="bfloat16", max_num_seqs=num, max_model_len=2048, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        # Our engine returns the logprob of every token; so must this one.
        sampling = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return generate


CONTENDERS = {"embedded": embedded, "generate": transformers_generate, "vllm": vllm}


def measure(name: str, path: str, num: int) -> dict[str, float]:
    """Return the seconds and CPU seconds of one contender in this process."""
    import torch

    torch.set_num_threads(1)
    generate = CONTENDERS[name](path, num)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num)]
    generate(prompts, WARM_UP_TOKENS)
    started, used = time.perf_counter(), time.process_time()
    generate(prompts, NUM_TOKENS)
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}


def measured_apart(name: str, python: str, path: str, num: int) -> dict[str, float]:
    """Return what `measure` returns in another process."""
    one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, __file__, path, "--measure", name, "--concurrent", str(num)]
    ran = subprocess.run(
        command, env={**os.environ, **one_thread, **in_process}, stdout=subprocess.PIPE, text=True, check=True
    )
    row: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Measure all contenders in turns, print a table and write ``results/concurrency.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--concurrent", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.model, arguments.concurrent)), flush=True)
        os._exit(0)  # engines' threads need not end
    if not arguments.vllm:
        parser.error("--vllm is missing: give the interpreter of an environment with vLLM, which `make engines` makes")
    from benchmarks.results import write_results

    pythons = {"embedded": sys.executable, "generate": sys.executable, "vllm": arguments.vllm}
    rows = []
    for num in CONCURRENCIES:
        speeds: dict[str, list[float]] = {name: [] for name in pythons}
        for _ in range(arguments.rounds):
            for name, python in pythons.items():
                seconds = measured_apart(name, python, arguments.model, num)
                speeds[name].append(num * NUM_TOKENS / seconds["cpu_seconds"])
        for name, values in speeds.items():
            ratios = [ours / theirs for ours, theirs in zip(speeds["embedded"], values, strict=True)]
            row = {"concurrent": num, "contender": name, "tokens_per_cpu_s": values, "embedded_over_it": ratios}
            rows.append(row)
            print(
                f"{num:3} concurrent  {name:10} {statistics.median(values):6.1f} tokens per CPU s "
                f"({min(values):.1f} to {max(values):.1f}), embedded over it {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    write_results("concurrency", {"model": Path(arguments.model).name, "measured": rows})


if __name__ == "__main__":
    main()
