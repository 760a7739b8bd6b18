"""Level ``tokens``: what ends a completion (a stop token, an end-of-sequence token, or its length limit)."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.aftermath import require_right_logprobs
from inflight.conformance.endpoint.repeats import least_common, require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import make_model_of_text
from inflight.conformance.reference import distribution
from inflight.wire import Completion, SamplingParams

LEVEL = "tokens"
_NUM_CASES = 4
_ENDS_S = 15.0
"""After this many seconds, a single completion that has ended is enough."""
_DEFAULT_TOKENS = 40
"""More tokens than the default of max_tokens in any engine; OpenAI's default is 16."""
_NUM_COMPARED = 6
"""Number of completions with an end-of-sequence token whose logprobs are compared."""
_FEWEST_COARSE_CASES = 3
"""Fewest cases that are judged where rounding decides whether any single completion is repeated."""
_TEXT, _ENDS = "abcdefghij\x00l", "d\x00"
"""A text that a model samples, and the bytes of it that end a sequence. One of these is token 0."""
_NUM_STOP_TOKENS = 40
"""Number of stop tokens in a request where only the last of them occurs."""


@check("E-19", deadline_s=60, look_at="whether the engine drops the stop token from its output")
async def stop_token_ids(subject: EndpointSubject) -> None:
    """A completion ends at the first token that is one of its stop_token_ids, however many there are. That token is
    listed with its logprob, and the finish reason is stop; the same token in the prompt does not end the completion."""
    num_stopped = 0
    for seed in range(_NUM_CASES):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        free = await subject.generate(prompt, max_tokens=24, **same)
        listed = (free.token_ids[8], prompt[0], prompt[-1], free.token_ids[16])
        stop = (*listed[seed:], *listed[:seed])  # rotated, so that the token sampled first is at each position once
        request, found = await subject.ask(prompt, max_tokens=24, stop_token_ids=stop, **same)
        ends = [i for i, token in enumerate(found.token_ids) if token in stop]
        num_stopped += require_ended(found, ends, 24, f"stop tokens {list(stop)}")
        require_right_logprobs(subject, request, found, "a completion with stop tokens")
    require_most_stopped(subject, num_stopped, _NUM_CASES)
    first = free.token_ids[0]
    found = await subject.generate(prompt, max_tokens=24, stop_token_ids=(first,), **same)
    require_ended(found, [i for i, token in enumerate(found.token_ids) if token == first], 24, f"stop token {first}")
    others = [i for i in range(subject.capabilities.vocab_size) if i not in free.token_ids][: _NUM_STOP_TOKENS - 1]
    found = await subject.generate(prompt, max_tokens=24, stop_token_ids=(*others, free.token_ids[8]), **same)
    ends = [i for i, token in enumerate(found.token_ids) if token in (*others, free.token_ids[8])]
    what = f"{len(others) + 1} stop tokens, of which only the last, {free.token_ids[8]}, was sampled without them"
    require_ended(found, ends, 24, what)
    await require_each_stopped(subject, seed=19)


async def require_each_stopped(subject: EndpointSubject, seed: int) -> None:
    """Require that each completion of a request ends at the first stop token that it contains, and is unchanged up to
    there."""
    asked: dict[str, Any] = {"n": _NUM_CASES, "max_tokens": 24, **subject.repeatable(seed)}
    free = (await subject.endpoint.generate(subject.request(**asked))).completions
    # The first completion stops late and the last one early, unless they contain each other's tokens.
    stop = tuple(it.token_ids[20 - 6 * i] for i, it in enumerate(free))
    found = (await subject.endpoint.generate(subject.request(**asked, stop_token_ids=stop))).completions
    pairs = []
    for whole, one in zip(free, found, strict=True):
        what = f"stop tokens {list(stop)}, completion {one.index} of {len(free)}"
        require_ended(one, [i for i, token in enumerate(one.token_ids) if token in stop], 24, what)
        num = next((i + 1 for i, token in enumerate(whole.token_ids) if token in stop), 24)
        pairs.append(
            (one, whole.model_copy(update={"token_ids": whole.token_ids[:num], "logprobs": whole.logprobs[:num]}))
        )
    require_repeated(subject, pairs, f"{len(free)} completions with and without stop tokens")


@check("E-21", "model", deadline_s=60)
@look_at("which ids end a sequence (all those of the generation config), and whether the last token is dropped")
async def finish_reasons(subject: EndpointSubject) -> None:
    """Any end-of-sequence token of the model is listed with its logprob and ends its completion with stop, unless
    ignore_eos is set and the token is not among the stop_token_ids; length means exactly max_tokens."""
    await _require_every_end(subject)
    prompt, temperature, likelihood = prompt_near_the_end(subject)
    ends_of = subject.reference.eos_token_ids
    num_tokens, num_met, num_passed, num_rounds = 32, 0, 0, 0
    started = time.monotonic()
    for seed, ignore_eos in product(range(8), (False, True)):
        fewest = 8 if time.monotonic() - started < _ENDS_S else 1
        if not ignore_eos and num_met >= fewest and num_passed:
            break
        num_rounds += 1
        drawn: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos, "seed": seed}
        request = subject.request(prompt, n=16, max_tokens=num_tokens, **drawn)
        for completion in (await subject.endpoint.generate(request)).completions:
            ends = [i for i, token in enumerate(completion.token_ids) if token in ends_of]
            if ignore_eos:
                num_passed += bool(ends)
                ends = []
            is_met = require_ended(completion, ends, num_tokens, f"ignore_eos={str(ignore_eos).lower()}")
            num_met += is_met
            if is_met and num_met <= _NUM_COMPARED:
                require_right_logprobs(subject, request, completion, "a completion that ended its sequence")
    num_stopped = 0
    for seed in range(1, 5):
        if num_stopped:
            break
        drawn = {"temperature": temperature, "seed": seed, "stop_token_ids": tuple(sorted(ends_of))}
        request = subject.request(prompt, n=16, max_tokens=num_tokens, **drawn)
        for completion in (await subject.endpoint.generate(request)).completions:
            ends = [i for i, token in enumerate(completion.token_ids) if token in ends_of]
            what = "ignore_eos=true and the same tokens in stop_token_ids"
            num_stopped += require_ended(completion, ends, num_tokens, what)
    subject.note(likelihood_of_the_end=likelihood, ended=num_met, went_on=num_passed, completions=16 * num_rounds)
    subject.note(ended_by_stop_token_ids=num_stopped)
    if not num_met:
        skip(f"none of {16 * num_rounds} completions reached an end-of-sequence token")


async def _require_every_end(subject: EndpointSubject) -> None:
    """Require that each end-of-sequence token of a model with several ends a completion.

    The check starts another endpoint, which serves a model that samples a known text.
    """
    if (reason := subject.missing("fresh")) is not None:
        subject.note(several_ends=f"not checked: {reason}")
        return
    path, begin = make_model_of_text(subject.directory / "ends", _TEXT, ()), 0
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *_ENDS.encode()]}))
    endpoint = (await subject.fresh(path)).endpoint
    for end in (_TEXT.index(letter) + 1 for letter in _ENDS):
        prompt = (0, 1, 2, *_TEXT[:begin].encode())
        found = await subject.generate(prompt, endpoint=endpoint, max_tokens=24, temperature=0.0, ignore_eos=False)
        what, text = "one of several end-of-sequence tokens", bytes(token % 256 for token in found.token_ids)
        require_ended(found, [end - begin - 1], 24, f"{what}, {_TEXT[end - 1]!r}, after {text!r}")
        begin = end
    sampling: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "stop_token_ids": (0,)}
    found = await subject.generate((1, 2), endpoint=endpoint, **sampling)
    require_ended(found, [found.token_ids.index(0)] if 0 in found.token_ids else [], 24, "stop token 0")


@check("E-27", deadline_s=60, look_at="a default for max_tokens (OpenAI's is 16)")
async def no_max_tokens(subject: EndpointSubject) -> None:
    """Without max_tokens, a completion continues until it ends on its own or fills the context."""
    if not subject.pace.allows_prompt(subject.capabilities.max_model_len):
        await _require_no_default(subject)
        return
    num_tokens = min(24, subject.capabilities.max_model_len - 1)
    prompt = subject.prompt(subject.capabilities.max_model_len - num_tokens)
    filled = await subject.generate(prompt, max_tokens=None)
    subject.note(prompt=len(prompt), room=num_tokens, tokens=len(filled.token_ids))
    require_ended(filled, [], num_tokens, "max_tokens=None and ignore_eos=true")
    if subject.capabilities.streaming:
        stream = subject.streaming.generate_stream(subject.request(prompt, max_tokens=None, stream=True))
        num_streamed = sum([len(chunk.token_ids) async for chunk in stream])
        words = f"with max_tokens=None and room for {num_tokens} tokens, a stream carried {num_streamed}"
        require(num_streamed == num_tokens, words)
    ended = await subject.generate(prompt, max_tokens=None, ignore_eos=False)
    require(
        ended.finish_reason == "stop" or len(ended.token_ids) == num_tokens,
        f"in a context with {num_tokens} tokens left and max_tokens=None, {len(ended.token_ids)} were sampled and the "
        f"finish reason is {ended.finish_reason!r}",
    )


async def _require_no_default(subject: EndpointSubject) -> None:
    """Require that a completion without max_tokens is still being decoded after more tokens than any usual default."""
    subject.note(part_of_context=f"{_DEFAULT_TOKENS} tokens, because filling the context would take minutes")
    if subject.capabilities.max_concurrent_sequences < 2:
        skip("one sequence runs at a time, and filling the context would take minutes")
    request = subject.request(max_tokens=None)
    answer = subject.begin(subject.endpoint.generate(request))
    await subject.generate(max_tokens=_DEFAULT_TOKENS)
    require(not answer.done(), f"a request without max_tokens ended within about {_DEFAULT_TOKENS} tokens")


def require_ended(completion: Completion, ends: Sequence[int], num_tokens: int, what: str) -> bool:
    """Require that a completion ended at the first of ``ends``, or at its length limit; return whether it contains any
    of ``ends``.

    If both happen at the same token, the contract does not specify which of them is the reason.
    """
    length, reason = len(completion.token_ids), completion.finish_reason
    is_full = reason == "length" and length == num_tokens
    if ends:
        words = f"with {what}, token {ends[0]} should be the last, but {length} tokens are listed"
        require(ends[0] == length - 1, words)
        words = f"with {what}, a completion ended where it should, but the finish reason is {reason!r}"
        require(reason == "stop" or is_full, words)
    else:
        words = f"with {what}, a completion has {length} of {num_tokens} tokens and the finish reason {reason!r}"
        require(is_full, f"{words}, but none of its tokens should have ended it")
    return bool(ends)


def require_most_stopped(subject: EndpointSubject, num_stopped: int, num_cases: int) -> None:
    """Require that enough of the completions stopped that sampled the place to stop at when they did not have to."""
    subject.note(cases=num_cases, stopped=num_stopped)
    share = least_common(subject)
    require(
        num_stopped >= share * num_cases or (share < 1.0 and num_cases < _FEWEST_COARSE_CASES),
        f"only {num_stopped} of {num_cases} repeated seeded completions contain what they should have stopped at",
    )


def prompt_near_the_end(subject: EndpointSubject) -> tuple[tuple[int, ...], float, float]:
    """Return a prompt and a temperature at which the next token probably ends the sequence, and that probability."""
    if not (ids := known_ids(subject, subject.reference.eos_token_ids)):
        skip("the checkpoint names no token that ends a sequence")
    return prompt_before(subject, ids)


def known_ids(subject: EndpointSubject, ids: Collection[int]) -> list[int]:
    """Return the ids that are in the endpoint's vocabulary, in ascending order."""
    return sorted(token for token in ids if token < subject.capabilities.vocab_size)


def prompt_before(subject: EndpointSubject, ids: Sequence[int]) -> tuple[tuple[int, ...], float, float]:
    """Return a prompt and a temperature at which the next token is probably one of ``ids``, and that probability."""
    prompts = [subject.prompt(8, seed=seed) for seed in range(24)]
    prompts += [(*prompt, ids[0]) for prompt in prompts[:4]] + [(*prompt, ids[0], ids[0]) for prompt in prompts[:4]]
    candidates = []
    for prompt in prompts:
        logits_TV = subject.reference.logits(subject.reference.weights, prompt, (0,))
        for temperature in (1.0, 2.0):
            logprobs_V = distribution(logits_TV, SamplingParams(temperature=temperature))[0]
            candidates.append((float(logprobs_V[ids].exp().sum()), prompt, temperature))
    likelihood, prompt, temperature = max(candidates)
    return prompt, temperature, likelihood
