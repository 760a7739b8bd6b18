"""Token times of a running server by how many completions run: the curve that ``inflight plan`` takes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.wire import GenerateRequest, SamplingParams

_SHORTER = 4
"""How many times fewer tokens the shorter completions have, from which the cost of a request is distinguished."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What one number of running completions costs, in seconds; medians of the rounds."""

    num_running: int
    token_s: float
    """Time of one token of each."""
    request_s: float
    """What a request takes in addition, its prompt included."""


async def measure(
    endpoint: InferenceEndpoint,
    batches: Sequence[int],
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    num_rounds: int,
    report_progress: Callable[[str], None] = lambda _: None,
) -> list[EngineTimes]:
    """Sample so many completions at a time, long and short ones in turns. Nothing else should use the server.

    Raises `ConfigError` if it runs fewer at a time, or has no room for as many tokens.
    """
    declared = await endpoint.capabilities()
    if max(batches) > declared.max_concurrent_sequences:
        raise ConfigError(
            f"{endpoint.name} runs {declared.max_concurrent_sequences} completions at a time: ask for less"
        )
    if num_tokens + num_prompt_tokens > declared.max_model_len or num_tokens < 2 * _SHORTER:
        raise ConfigError(
            f"--tokens {num_tokens} and --prompt-tokens {num_prompt_tokens} must be at least {2 * _SHORTER} tokens and "
            f"fit the context of {declared.max_model_len}"
        )
    rng = random.Random(0)
    number = 0

    async def seconds(num_running: int, length: int) -> float:
        nonlocal number
        requests = []
        for _ in range(num_running):
            number += 1
            prompt = tuple(rng.randrange(1, declared.vocab_size) for _ in range(num_prompt_tokens))
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0)
            requests.append(GenerateRequest(request_id=f"bench-{number}", prompt_token_ids=prompt, sampling=sampling))
        began = time.perf_counter()
        await run_together(*(endpoint.generate(request) for request in requests))
        return time.perf_counter() - began

    found = []
    await seconds(1, num_tokens)  # what is only made once, such as compiled code
    for num_running in batches:
        report_progress(f"{num_running} running")
        tokens, besides = [], []
        for _ in range(num_rounds):
            short, long = await seconds(num_running, num_tokens // _SHORTER), await seconds(num_running, num_tokens)
            token_s = max(1e-9, (long - short) / (num_tokens - num_tokens // _SHORTER))
            tokens.append(token_s)
            besides.append(max(0.0, long - num_tokens * token_s))
        found.append(EngineTimes(num_running, statistics.median(tokens), statistics.median(besides)))
    return found


def as_plan(found: Sequence[EngineTimes]) -> str:
    """Return the section of a plan."""
    points = ", ".join(f"[{it.num_running}, {it.token_s:.3g}]" for it in found)
    return f"[generation]\ntoken_s = [{points}]\nmax_concurrent = {found[-1].num_running}"
