"""Tokens per second of the embedded engine, against transformers' ``generate`` and its compiled static cache.

The same requests, all submitted at once, with half as many slots as requests. ``generate`` runs batches of as many
until the longest of a batch is done, as its users do. Lengths are all equal, or log-normal.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from benchmarks.gpu.models import half_billion, save_random_model
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import in_words, spread
from transformers import AutoModelForCausalLM, GenerationConfig

from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.tiny import PAD
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
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="sdpa")
    model = model.to(settings.device).eval()
    compiled, compile_s = _compiled(model, loads["equal"], settings)
    with start_blocking_portal() as portal:
        endpoint = load_endpoint(path, max_concurrent=loads["equal"].num_slots, device=settings.device)
        try:
            contenders = {ENGINE: _engine(endpoint, portal), GENERATE: _generate(model)} | compiled
            rows = _rows(loads, contenders, settings)
        finally:
            portal.call(endpoint.aclose)
    return {"dtype": "bfloat16", "compile_s": compile_s, "loads": rows}


Contender = Callable[[Load], float]
"""Samples a load and returns the seconds that it took."""


def _rows(loads: dict[str, Load], contenders: dict[str, Contender | str], settings: Settings) -> list[dict[str, Any]]:
    """Let the contenders take turns, as often as time allows."""
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
            "num_requests": len(load.lengths),
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
    return rows


def _load(kind: str, num_requests: int, mean: int, most: int, rng: random.Random) -> Load:
    mu = math.log(mean) - _SIGMA**2 / 2
    lengths = [
        mean if kind == "equal" else min(most, max(1, round(rng.lognormvariate(mu, _SIGMA))))
        for _ in range(num_requests)
    ]
    prompts = [[rng.randrange(256) for _ in range(16)] for _ in range(num_requests)]
    return Load(prompts, lengths, num_requests // 2, most)


def _engine(endpoint: Any, portal: BlockingPortal) -> Contender:
    def run(load: Load) -> float:
        portal.call(_sample, endpoint, load, 2)  # touches the memory of keys and values for the first time
        started = time.perf_counter()
        answers = portal.call(_sample, endpoint, load, load.most)
        elapsed = time.perf_counter() - started
        assert [len(answer.completions[0].token_ids) for answer in answers] == list(load.lengths)
        return elapsed

    return run


async def _sample(endpoint: Any, load: Load, most: int) -> list[Any]:
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=min(length, most), ignore_eos=True),
        )
        for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
    ]
    return list(await asyncio.gather(*(endpoint.generate(request) for request in requests)))


def _generate(model: Any, **options: Any) -> Contender:
    def run(load: Load) -> float:
        started = time.perf_counter()
        for first in range(0, len(load.lengths), load.num_slots):
            part = slice(first, first + load.num_slots)
            prompts = torch.tensor(load.prompts[part], device=model.device)
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


def _compiled(model: Any, load: Load, settings: Settings) -> tuple[dict[str, Contender | str], float | None]:
    """Return the compiled contender by its name, and the seconds that compiling took."""
    if not settings.on_gpu:
        return {COMPILED: "transformers compiles generate on a GPU only"}, None
    options: dict[str, Any] = {"cache_implementation": "static"}
    if hasattr(GenerationConfig(), "max_cache_len"):  # one size of cache, so that nothing is compiled twice
        options["max_cache_len"] = len(load.prompts[0]) + load.most
    run = _generate(model, **options)
    short = Load(load.prompts[: load.num_slots], [8] * load.num_slots, load.num_slots, load.most)
    started = time.monotonic()
    try:
        run(short)
        run(short)
    except Exception as error:  # the compiler may raise anything
        return {COMPILED: f"compiling failed: {in_words(error)}"}, None
    return {COMPILED: run}, time.monotonic() - started
