"""Measures a server's token times at several numbers of running completions, for ``inflight plan``."""

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
"""Ratio of the lengths of long and short completions, which separates the costs of requests and tokens."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Median times, in seconds, for one number of running completions."""

    num_running: int
    token_s: float
    """Time of one step, in which each completion receives a token."""
    request_s: float
    """Time that each request adds to the time of its tokens, including its prompt."""


async def measure(
    endpoint: InferenceEndpoint,
    batches: Sequence[int],
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    num_rounds: int,
    report_progress: Callable[[str], None] = lambda _: None,
) -> list[EngineTimes]:
    """Return the times for each number of simultaneous completions in ``batches``.

    Rounds of long and short completions alternate. Nothing else should use the server during the measurement.

    Raises `ConfigError` if the server cannot run so many completions at a time, or if its context is too short.
    """
    capabilities = await endpoint.capabilities()
    if max(batches) > capabilities.max_concurrent_sequences:
        raise ConfigError(
            f"{endpoint.name} runs at most {capabilities.max_concurrent_sequences} completions at a time, not "
            f"{max(batches)}; request fewer"
        )
    if num_tokens + num_prompt_tokens > capabilities.max_model_len or num_tokens < 2 * _SHORTER:
        raise ConfigError(
            f"--tokens {num_tokens} and --prompt-tokens {num_prompt_tokens} must be at least {2 * _SHORTER} tokens "
            f"and together fit the server's context of {capabilities.max_model_len} tokens"
        )
    rng = random.Random(0)
    number = 0

    async def seconds(num_running: int, length: int) -> float:
        nonlocal number
        requests = []
        for _ in range(num_running):
            number += 1
            prompt = tuple(rng.randrange(1, capabilities.vocab_size) for _ in range(num_prompt_tokens))
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0)
            requests.append(GenerateRequest(request_id=f"bench-{number}", prompt_token_ids=prompt, sampling=sampling))
        began = time.perf_counter()
        await run_together(*(endpoint.generate(request) for request in requests))
        return time.perf_counter() - began

    found = []
    await seconds(1, num_tokens)  # warm-up: for example, code is compiled once
    for num_running in batches:
        report_progress(f"{num_running} running")
        tokens, overheads = [], []
        for _ in range(num_rounds):
            short, long = await seconds(num_running, num_tokens // _SHORTER), await seconds(num_running, num_tokens)
            token_s = max(1e-9, (long - short) / (num_tokens - num_tokens // _SHORTER))
            tokens.append(token_s)
            overheads.append(max(0.0, long - num_tokens * token_s) / num_running)
        found.append(EngineTimes(num_running, statistics.median(tokens), statistics.median(overheads)))
    return found


def as_plan(found: Sequence[EngineTimes]) -> str:
    """Return the measurements as the section ``[generation]`` of a plan."""
    points = ", ".join(f"[{it.num_running}, {it.token_s:.3g}]" for it in found)
    return f"[generation]\ntoken_s = [{points}]\nmax_concurrent = {found[-1].num_running}"
