"""Measures how fast an endpoint is, and derives time limits and lengths for checks from its speed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_NUM_TOKENS, _NUM_PROMPT_TOKENS = 16, 256
_MEASURE_S = 15.0
"""Time limit for measuring: an endpoint that hangs must not delay the verdicts on it."""
_USUAL_TOKEN_S, _USUAL_PROMPT_TOKEN_S = 0.02, 0.004
"""Seconds per sampled token and per prompt token up to which the time limits in checks are not extended."""
_USUAL_UPDATE_BYTES = 64 << 20
"""Size of updates up to which the time limits in checks are not extended."""
_SLOW = 2.0
"""The slowness above which checks repeat themselves less often and try fewer variants."""
_LONG_S, _PROMPT_S = 12.0, 5.0
"""How long a check may sample for one request, and how long one prompt may take, not counting attention."""
_SHORTEST = 256
"""The length below which the contexts and prompts of checks are not shortened."""
_FEWEST = 64
"""The length below which the long completions of checks are not shortened."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per token of a request that runs alone; 0 if they could not be measured."""

    token_s: float = 0.0
    prompt_token_s: float = 0.0
    update_bytes: int = 0
    """Size of an update of all weights; 0 if the checkpoint is unknown."""

    @property
    def slowness(self) -> float:
        """The factor by which the time limits in checks are extended for this endpoint: at least 1."""
        of_tokens = max(self.token_s / _USUAL_TOKEN_S, self.prompt_token_s / _USUAL_PROMPT_TOKEN_S)
        return max(1.0, of_tokens, self.update_bytes / _USUAL_UPDATE_BYTES)

    def context_len(self, max_model_len: int) -> int:
        """Return the context length that checks use: ``max_model_len``, or less if filling the context takes too
        long."""
        if not self.token_s:
            return max_model_len
        return min(max_model_len, max(_SHORTEST, int(_LONG_S / self.token_s)))

    def shortened(self, num_tokens: int) -> int:
        """Return how many tokens a slow endpoint samples in the time in which a usual one samples ``num_tokens``."""
        shorter = num_tokens if self.token_s <= _USUAL_TOKEN_S else int(num_tokens * _USUAL_TOKEN_S / self.token_s)
        return max(shorter, min(num_tokens, _FEWEST))

    def prompt_len(self, seconds: float) -> int:
        """Return the length of a prompt that takes about ``seconds``, at least 256, or a huge number if the pace is
        unknown."""
        return max(_SHORTEST, int(seconds / self.prompt_token_s)) if self.prompt_token_s else sys.maxsize

    @property
    def is_slow(self) -> bool:
        """Whether the endpoint is so slow that checks repeat themselves less often and try fewer variants."""
        return self.slowness > _SLOW

    def fewer(self, num: int) -> int:
        """Return the number of repetitions on this endpoint of what a check does ``num`` times on a usual one.

        On a slow endpoint, it is half of ``num``, but not less than 2 unless ``num`` is."""
        return max(num // 2, min(num, 2)) if self.is_slow else num

    def allows_prompt(self, num_tokens: int) -> bool:
        """Return whether a prompt of this length is computed in time. Attention makes long prompts even slower."""
        return num_tokens * self.prompt_token_s <= _PROMPT_S


async def measure_pace(
    generate: Callable[[Sequence[int], int], Awaitable[object]],
    prompt: Callable[[int, int], Sequence[int]],
    update_bytes: int,
) -> Pace:
    """Return the pace of an endpoint.

    ``generate`` takes a prompt and a number of tokens; ``prompt`` takes a length and a seed. If the endpoint fails or
    takes too long, the pace is unknown; the checks will show why.
    """

    async def seconds(length: int, seed: int, num_tokens: int) -> float:
        started = time.monotonic()
        await generate(prompt(length, seed), num_tokens)
        return time.monotonic() - started

    with contextlib.suppress(Exception):  # an adapter around a dead engine may raise anything
        async with asyncio.timeout(_MEASURE_S):
            await seconds(12, 1, 2)  # the first request may compile and allocate
            first_s = await seconds(12, 2, 1)
            token_s = max(0.0, await seconds(12, 3, 1 + _NUM_TOKENS) - first_s) / _NUM_TOKENS
            prompt_token_s = await seconds(_NUM_PROMPT_TOKENS, 4, 1) / _NUM_PROMPT_TOKENS
            return Pace(token_s, prompt_token_s, update_bytes)
    return Pace(update_bytes=update_bytes)
