"""Tokens per second of the embedded engine, against transformers' ``generate`` and its compiled static cache.

The same requests, all submitted at once, with half as many slots as requests. ``generate`` runs batches of as many
until the longest of a batch is done, as its users do. Lengths are all equal, or log-normal.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.models import half_billion, save_random_model
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import in_words, spread
from transformers import AutoModelForCausalLM, GenerationConfig

from inflight.local.loading import load_endpoint
from inflight.local.tiny import PAD
from inflight.wire import GenerateRequest, SamplingParams

ENGINE, GENERATE, COMPILED = "engine", "generate", "generate, static cache, compiled"
KINDS = ("equal", "log-normal")
_SIGMA = 0.9


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one round."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    """Tokens that each samples."""
    num_slots: int
    most: int
    """The largest length of any load."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def measure(settings: Settings) -> dict[str, Any]:
    """Return the figures of this section."""
    path = save_random_model(half_billion(settings), settings)
    num_requests, mean, most = (4, 5, 12) if settings.quick else (128, 64, 256)
    rng = random.Random(0)
    loads = {kind: _load(kind, num_requests, mean, most, rng) for kind in KINDS}
    compiled, compile_s = _compiled(path, loads["equal"], settings)
    contenders = {ENGINE: _engine(path, settings), GENERATE: _generate(path, settings)} | compiled
    tokens_per_s: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in contenders} for kind in KINDS}
    failed: dict[str, str] = {}
    num_rounds = 1 if settings.quick else 3
    round_s = 0.0
    for i in range(num_rounds):
        started = time.monotonic()
        if i and settings.left_s < 1.2 * round_s:
            break
        for kind, load in loads.items():
            for name in contenders if i % 2 == 0 else reversed(contenders):
                contender = contenders[name]
                if isinstance(contender, str) or name in failed:
                    continue
                try:
                    seconds = contender(load)
                except Exception as error:  # compiling in particular may raise anything
                    failed[name] = in_words(error)
                else:
                    tokens_per_s[kind][name].append(load.num_tokens / seconds)
        round_s = time.monotonic() - started
    rows = []
    for kind, load in loads.items():
        row: dict[str, Any] = {
            "lengths": kind,
            "num_requests": num_requests,
            "num_slots": load.num_slots,
            "num_tokens": load.num_tokens,
            "longest": max(load.lengths),
            "contenders": {},
        }
        for name, contender in contenders.items():
            found = tokens_per_s[kind][name]
            if isinstance(contender, str):
                row["contenders"][name] = {"absent": contender}
            elif name in failed or not found:
                row["contenders"][name] = {"failed": failed.get(name, "no round ended")}
            else:
                row["contenders"][name] = {"tokens_per_s": spread(found), "num_rounds": len(found)}
        rows.append(row)
    return {"dtype": "bfloat16", "compile_s": compile_s, "loads": rows}


Contender = Callable[[Load], float]
"""Samples a load and returns the seconds that it took."""


def _load(kind: str, num_requests: int, mean: int, most: int, rng: random.Random) -> Load:
    mu = torch.tensor(float(mean)).log().item() - _SIGMA**2 / 2
    lengths = [
        mean if kind == "equal" else min(most, max(1, round(rng.lognormvariate(mu, _SIGMA))))
        for _ in range(num_requests)
    ]
    prompts = [[rng.randrange(256) for _ in range(16)] for _ in range(num_requests)]
    return Load(prompts, lengths, num_requests // 2, most)


def _engine(path: Path, settings: Settings) -> Contender:
    def run(load: Load) -> float:
        return asyncio.run(serve(load))

    async def serve(load: Load) -> float:
        endpoint = load_endpoint(path, max_concurrent=load.num_slots, device=settings.device)
        try:
            await _sample(endpoint, load, "warm", 2)
            started = time.perf_counter()
            answers = await _sample(endpoint, load, "timed")
            elapsed = time.perf_counter() - started
        finally:
            await endpoint.aclose()
        assert [len(answer.completions[0].token_ids) for answer in answers] == list(load.lengths)
        return elapsed

    return run


async def _sample(endpoint: Any, load: Load, name: str, most: int | None = None) -> list[Any]:
    requests = [
        GenerateRequest(
            request_id=f"{name}-{i}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=min(length, most or length), ignore_eos=True),
        )
        for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
    ]
    return list(await asyncio.gather(*(endpoint.generate(request) for request in requests)))


def _generate(path: Path, settings: Settings, **options: Any) -> Contender:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="sdpa")
    model = model.to(settings.device).eval()

    def run(load: Load) -> float:
        started = time.perf_counter()
        for first in range(0, len(load.lengths), load.num_slots):
            part = slice(first, first + load.num_slots)
            prompts = torch.tensor(load.prompts[part], device=settings.device)
            longest = max(load.lengths[part])
            sampled = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                top_k=0,
                pad_token_id=PAD,
                **options,
            )
            sampled.cpu()
        return time.perf_counter() - started

    return run


def _compiled(path: Path, load: Load, settings: Settings) -> tuple[dict[str, Contender | str], float | None]:
    """Return the compiled contender by its name, and the seconds that compiling took."""
    if not settings.on_gpu:
        return {COMPILED: "transformers compiles generate on a GPU only"}, None
    options: dict[str, Any] = {"cache_implementation": "static"}
    if hasattr(GenerationConfig(), "max_cache_len"):  # one size of cache, so that nothing is compiled twice
        options["max_cache_len"] = len(load.prompts[0]) + load.most
    run = _generate(path, settings, **options)
    short = Load(load.prompts[: load.num_slots], [8] * load.num_slots, load.num_slots, load.most)
    started = time.monotonic()
    try:
        run(short)
        run(short)
    except Exception as error:  # the compiler may raise anything
        return {COMPILED: f"compiling failed: {in_words(error)}"}, None
    return {COMPILED: run}, time.monotonic() - started
