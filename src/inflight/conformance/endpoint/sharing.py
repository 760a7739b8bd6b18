"""Level ``caches``: keys and values that requests share while the weights stay the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.scoring import require_right_scores
from inflight.conformance.endpoint.subject import EndpointSubject

LEVEL = "caches"
_BLOCK = 64
"""Length of the blocks that prompts share: a multiple of the page size of engines, unless pages are very large."""
_EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Lengths of prefixes that are sent after the whole prompt. Pages end at or next to these lengths."""
_STEPS = (128, 256, 1 << 16)
"""Differences between ids that share their lowest bits, the only ones that a narrow integer keeps."""
_NUM_TOKENS = 4
_NUM_BETWEEN, _LENGTH_BETWEEN, _AT_A_TIME = 12_000, 1000, 6
"""Between two requests with the same prompt: the number of tokens of other prompts that are sent, the length of each of
these prompts, and how many of them are sent at a time."""
_BETWEEN_S, _MOST_BETWEEN_S = 3.0, 6.0
"""A slow endpoint receives only as many of these tokens as it should compute in the first of these times, and no
further prompts once the second has passed."""


@check("E-87", "model", deadline_s=75)
@look_at(
    "what a cached block is identified by: all tokens before it and its own, in their order, not its tokens alone, its "
    "position or a part of them; which tokens of a finished completion have keys and values (the last one has none); "
    "and whether a block that is overwritten is no longer found under its previous tokens"
)
async def shared_blocks(subject: EndpointSubject) -> None:
    """Keys and values computed for one request are used for another only where all tokens up to that position are the
    same: logprobs are those of the reference, regardless of the blocks or prefixes that prompts share, even where a
    prompt continues a finished completion or follows so many other prompts that cached blocks have been replaced."""
    block = min(_BLOCK, subject.context_len // 4)
    first, second, third = (subject.prompt(block, seed=40 + i) for i in range(3))
    other, middle = subject.prompt(1, seed=50), block // 2 + 5
    cases = {
        "a prompt": (*first, *third),
        "a prompt that begins differently": (*second, *third),
        "blocks in another order": (*third, *first),
        "one block twice": (*third, *third),
        "one block three times": (*third, *third, *third),
        "the second block alone": third,
        "a token more at the beginning": (*other, *first, *third),
        "a token less at the beginning": (*first[1:], *third),
        "another first token": (*other, *first[1:], *third),
        "the tokens of a block in another order": (*reversed(first), *third),
        "another token in the middle of a block": (*first[:middle], *other, *first[middle + 1 :], *third),
    }
    for step in _STEPS:
        if 2 * step <= subject.capabilities.vocab_size:
            moved = tuple(token - step if token >= step else token + step for token in first)
            cases[f"another first block, whose ids differ by {step}"] = (*moved, *third)
    for length in _EDGES:
        if length < 2 * block:
            cases[f"the first {length} tokens"] = cases["a prompt"][:length]
            cases[f"the first {length} tokens, with another last one"] = (*cases["a prompt"][: length - 1], *other)
    for what, prompt in cases.items():
        await _require_right(subject, prompt, f"{what}, next to prompts with equal blocks,")
        if subject.capabilities.scoring and prompt[-block:] == third and len(prompt) > block:
            await require_right_scores(subject, prompt, len(prompt) - 4, f"{what}, next to prompts with equal blocks")
    together = [(*subject.prompt(2 * block, seed=60), *subject.prompt(i, seed=61)) for i in (0, 0, 1, 20)]
    await asyncio.gather(
        *(
            _require_right(subject, it, "one of several prompts with a common beginning, sent at the same time,")
            for it in together
        )
    )
    await _require_right(subject, subject.prompt(block + 5, seed=62), "a prompt of several completions", n=4)
    await _second_turns(subject, subject.prompt(block // 2 + 3, seed=63))
    await _replaced_blocks(subject, subject.prompt(block, seed=66))


async def _replaced_blocks(subject: EndpointSubject, prompt: Sequence[int]) -> None:
    """Require correct logprobs for a prompt that is sent again after many other prompts."""
    await _require_right(subject, prompt, "a prompt before many others")
    length = min(_LENGTH_BETWEEN, subject.context_len - 1)
    num, num_sent = max(1, min(_NUM_BETWEEN, subject.pace.prompt_len(_BETWEEN_S)) // length), 0
    deadline = time.monotonic() + _MOST_BETWEEN_S
    while num_sent < num and (not num_sent or time.monotonic() < deadline):
        seeds = range(1000 + num_sent, 1000 + min(num, num_sent + _AT_A_TIME))
        others = [subject.request(subject.prompt(length, seed=seed), max_tokens=1) for seed in seeds]
        await asyncio.gather(*map(subject.endpoint.generate, others))
        num_sent += len(others)
    subject.note(**{"prompt tokens between two requests with the same prompt": num_sent * length})
    what = f"a prompt that was seen before {num_sent * length} tokens of other prompts"
    await _require_right(subject, (*prompt, *subject.prompt(1, seed=67)), f"{what}, with one more token,")
    await _require_right(subject, prompt, f"{what},")


async def _second_turns(subject: EndpointSubject, prompt: Sequence[int]) -> None:
    """Require correct logprobs for prompts that continue finished completions, which ended in different ways."""
    same = subject.repeatable(5)
    request = subject.request(prompt, n=2, max_tokens=29, **same)
    completions = list((await subject.endpoint.generate(request)).completions)
    stop = (completions[0].token_ids[17],)
    completions.append(await subject.generate(prompt, max_tokens=29, stop_token_ids=stop, **same))
    for completion in completions:
        whole = (*prompt, *completion.token_ids)
        for turn in (
            whole[:-1],
            whole,
            (*whole, *subject.prompt(9, seed=64)),
            (*whole[:-3], *subject.prompt(9, seed=65)),
        ):
            await _require_right(subject, turn, "a second turn, which continues a finished completion,")


async def _require_right(subject: EndpointSubject, prompt: Sequence[int], what: str, *, n: int = 1) -> None:
    """Require that each completion of a prompt has the logprobs of the reference."""
    request = subject.request(prompt, n=n, max_tokens=_NUM_TOKENS)
    for completion in (await subject.endpoint.generate(request)).completions:
        gap = subject.gap(subject.reference.weights, request, completion)
        require(
            gap <= subject.tolerance,
            f"{what} has logprobs that differ by up to {gap:.3g} from the reference's (tolerance "
            f"{subject.tolerance:g})",
        )
