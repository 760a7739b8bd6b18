"""Level ``tokens``: what ends a completion (a stop token, a stop string, an end-of-sequence token, or its
length limit)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import product
from typing import Any

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.aftermath import require_right_logprobs
from inflight.conformance.endpoint.repeats import least_common, require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import make_model_of_text
from inflight.conformance.reference import ReferenceCheckpoint, distribution
from inflight.errors import InvalidRequestError
from inflight.wire import Completion, SamplingParams

LEVEL = "tokens"
_NUM_CASES = 4
_ENDS_S = 15.0
"""After this many seconds, a single completion that has ended is enough."""
_DEFAULT_TOKENS = 40
"""More tokens than the default of max_tokens in any engine; OpenAI's default is 16."""
_NUM_COMPARED = 6
"""Number of completions with an end-of-sequence token whose logprobs are compared."""
_STOP_LENGTHS = (2, 4, 3, 2)
"""Number of tokens in the stop string of each case."""
_FEWEST_COARSE_CASES = 3
"""Fewest cases that are judged where rounding decides whether any single completion is repeated."""
_MOST_SEEDS = 40
"""Maximum number of completions that are searched for a place at which to stop."""
_NUM_AT_ONCE = 8
"""Number of requests that are sampled at a time for such a search; it divides `_MOST_SEEDS`."""
_LITERALLY_ABSENT = ("QUI", "q.i", " qui", "qui ")
"""Stop strings that occur in the text of `_PAIRS` only if case or spaces are ignored, or as patterns."""
_NEVER, _SHORT = "\x00 never", "~"
"""Stop strings that never occur."""
_LONG_CHARACTERS = "\u4e0a\u5001\u6083\u7105\u8187\u9209"
"""Characters of three bytes each; all the bytes are different."""
_SPACES = "y \n\t"
"""A letter followed by white space."""
_IN_THE_PROMPT = "never"
"""A stop string that occurs in a prompt only."""
_TEXT, _ENDS = "abcdefghij\x00l", "d\x00"
"""A text that a model samples, and the bytes of it that end a sequence. One of these is token 0."""
_PAIRS, _CUT = ("qu", "ix", "ot"), "uixo"
"""Tokens of two letters each, and a part of their text that ends within the last token."""
_NUM_STOP_STRINGS, _NUM_STOP_TOKENS = 6, 40
"""Numbers of stop strings and stop tokens in requests where only the last of them occurs. OpenAI's limit is 4
strings."""


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
        num_stopped += _require_ended(found, ends, 24, f"stop tokens {list(stop)}")
        require_right_logprobs(subject, request, found, "a completion with stop tokens")
    _require_most_stopped(subject, num_stopped, _NUM_CASES)
    first = free.token_ids[0]
    found = await subject.generate(prompt, max_tokens=24, stop_token_ids=(first,), **same)
    _require_ended(found, [i for i, token in enumerate(found.token_ids) if token == first], 24, f"stop token {first}")
    others = [i for i in range(subject.capabilities.vocab_size) if i not in free.token_ids][: _NUM_STOP_TOKENS - 1]
    found = await subject.generate(prompt, max_tokens=24, stop_token_ids=(*others, free.token_ids[8]), **same)
    ends = [i for i, token in enumerate(found.token_ids) if token in (*others, free.token_ids[8])]
    what = f"{len(others) + 1} stop tokens, of which only the last, {free.token_ids[8]}, was sampled without them"
    _require_ended(found, ends, 24, what)
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
        _require_ended(one, [i for i, token in enumerate(one.token_ids) if token in stop], 24, what)
        num = next((i + 1 for i, token in enumerate(whole.token_ids) if token in stop), 24)
        pairs.append(
            (one, whole.model_copy(update={"token_ids": whole.token_ids[:num], "logprobs": whole.logprobs[:num]}))
        )
    require_repeated(subject, pairs, f"{len(free)} completions with and without stop tokens")


@check("E-20", "model", deadline_s=120)
@look_at(
    "whether tokens are cut with the text, whether the text is searched after every token, and whether completions of "
    "one request share the text that is searched"
)
async def stop_strings(subject: EndpointSubject) -> None:
    """A completion ends at the token that completes any of its stop strings, even if the string ends within that token
    or each of its characters takes several tokens. That token is listed with its logprob, and the finish reason is
    stop. A stop string is matched literally; one that occurs or begins in the prompt, or in an earlier part of the
    completion, does not end the completion."""
    tokenizer = subject.reference.tokenizer
    if tokenizer is None:
        skip("the checkpoint has no tokenizer")
    await _require_stopped_in_a_known_text(subject)
    num_stopped = num_cases = 0
    async for seed, (among_others,) in _sampled(subject, max_tokens=48):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        num, is_cut = _STOP_LENGTHS[num_cases], num_cases == _NUM_CASES - 1
        if plain_text(tokenizer, among_others.token_ids, num, is_cut=is_cut) is None:
            continue
        free = await subject.generate(
            prompt, max_tokens=48, **same
        )  # sampled alone, like the request with stop strings
        if (stop := plain_text(tokenizer, free.token_ids, num, is_cut=is_cut)) is None:
            continue
        num_cases += 1
        try:
            never = tuple(f"{_NEVER} {i}" for i in range(_NUM_STOP_STRINGS - 1))
            words = (stop, _NEVER) if num_cases % 2 else (*never, stop)
            request, found = await subject.ask(prompt, max_tokens=48, stop=words, **same)
        except InvalidRequestError as error:
            if "tokenizer" in str(error):
                skip(str(error))
            raise
        what = f"{len(words)} stop strings, of which only {stop!r} occurs"
        num_stopped += _require_ended(found, completing(tokenizer, stop, found), 48, what)
        require_right_logprobs(subject, request, found, "a completion with a stop string")
        if num_cases == _NUM_CASES:
            break
    if not num_cases:
        skip(f"{_MOST_SEEDS} completions contain no two tokens of plain text that could end a completion")
    _require_most_stopped(subject, num_stopped, num_cases)
    await _require_stopped_at_once(subject, tokenizer)
    await _require_stopped_by_a_character(subject, tokenizer)
    await _require_each_stopped_by_text(subject, tokenizer)
    await _require_prompt_ignored(subject, tokenizer)


async def _sampled(subject: EndpointSubject, **sampling: Any) -> AsyncGenerator[tuple[int, Sequence[Completion]]]:
    """Yield `_MOST_SEEDS` seeds, each with the completions of that seed's prompt. Several requests run at a time,
    because a search may need all of the seeds."""
    for first in range(0, _MOST_SEEDS, _NUM_AT_ONCE):
        seeds = range(first, first + _NUM_AT_ONCE)
        requests = [subject.request(subject.prompt(seed=it), **subject.repeatable(it) | sampling) for it in seeds]
        responses = await asyncio.gather(*map(subject.endpoint.generate, requests))
        for seed, response in zip(seeds, responses, strict=True):
            yield seed, response.completions


async def _require_stopped_in_a_known_text(subject: EndpointSubject) -> None:
    """Require that a completion ends at a stop string of each of four kinds: one that ends within a token, one whose
    characters take several tokens each, one that ends with white space, and one that is the first token.

    The check starts another endpoint, which serves a model that samples a text that contains all four.
    """
    if (reason := subject.missing("fresh")) is not None:
        subject.note(known_text=f"not checked: {reason}")
        return
    reference = ReferenceCheckpoint(make_model_of_text(subject.directory / "text", _LONG_CHARACTERS + _SPACES, _PAIRS))
    endpoint = (await subject.fresh(reference.path)).endpoint
    start, ends = [token % reference.vocab_size for token in subject.prompt()], []
    middle = [*start, ord(_SPACES[-1])]  # the pairs follow this token
    for stop, where, prompt in (
        (_LONG_CHARACTERS, "takes three tokens for each character", start),
        (_SPACES[:2], "ends with a space", start),
        (_SPACES[1:3], "consists of white space", start),
        (_CUT, "ends within a token", start),
        (_CUT, "ends within the third token", middle),
        (_PAIRS[0], "is the first token", middle),
    ):
        for words in ((stop,), (_SHORT, stop), (stop, _SHORT), (*_LITERALLY_ABSENT, stop)):
            asked = {"max_tokens": 48, "temperature": 0.0, "stop": words}
            found = await subject.generate(prompt, endpoint=endpoint, **asked)
            ends_at = completing(reference.tokenizer, stop, found)
            text = "" if reference.tokenizer is None else reference.tokenizer.decode(list(found.token_ids))
            require(ends_at, f"with the stop strings {words}, a completion of at most 48 tokens ended after {text!r}")
            what = f"stop string {stop!r}, which {where}, among {words}"
            _require_ended(found, ends_at, 48, what)
            ends.append(len(found.token_ids))
    # Sampled tokens complete the character at the end of the prompt, which contains a stop string.
    prompt = [*start, *_IN_THE_PROMPT.encode(), _LONG_CHARACTERS.encode()[0]]
    found = await subject.generate(prompt, endpoint=endpoint, max_tokens=24, temperature=0.0, stop=(_IN_THE_PROMPT,))
    text = f"a completion of 24 tokens after a prompt that contains the stop string {_IN_THE_PROMPT!r} and ends within"
    require(
        len(found.token_ids) == 24 and found.finish_reason == "length",
        f"{text} a character ended after {len(found.token_ids)} tokens with {found.finish_reason!r}",
    )
    subject.note(tokens_of_a_known_text=ends)


async def _require_stopped_at_once(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that a completion ends at its first token if that token contains a stop string."""
    async for seed, (free,) in _sampled(subject, max_tokens=2):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        stop = tokenizer.decode([free.token_ids[0]])
        if stop.isascii() and stop.isprintable() and stop.strip() == stop != "":
            found = await subject.generate(prompt, max_tokens=8, stop=(stop,), **same)
            _require_ended(
                found, completing(tokenizer, stop, found), 8, f"stop string {stop!r}, the first token's text"
            )
            return


async def _require_stopped_by_a_character(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that a completion ends at the last token of a character that several tokens spell, if one is found."""
    async for seed, (free,) in _sampled(subject, max_tokens=48):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        if (stop := _spelled_character(tokenizer, free.token_ids)) is not None:
            found = await subject.generate(prompt, max_tokens=48, stop=(stop,), **same)
            what = f"stop string {stop!r}, one character that several tokens spell"
            _require_ended(found, completing(tokenizer, stop, found), 48, what)
            subject.note(character_of_several_tokens=stop)
            return
    subject.note(character_of_several_tokens=f"none in {_MOST_SEEDS} completions")


def _spelled_character(tokenizer: Any, token_ids: Sequence[int]) -> str | None:
    """Return a character that adjacent tokens spell only together, and that follows a token of plain text; None if
    there is none."""
    special = set(tokenizer.all_special_ids)
    for start, num in product(range(1, len(token_ids) - 1), (2, 3, 4)):
        ids = list(token_ids[start - 1 : start + num])
        text = tokenizer.decode(ids[1:])
        if len(text) != 1 or text.isascii() or not text.isprintable() or text == "\ufffd" or special & set(ids):
            continue
        before = tokenizer.decode(list(token_ids[: start + num - 1]))
        plain = tokenizer.decode(ids[:1])
        if plain.isascii() and plain.isprintable() and tokenizer.decode(ids) == plain + text and text not in before:
            return str(text)
    return None


async def _require_each_stopped_by_text(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that each completion of a request ends at the first occurrence of a stop string in its own text."""
    asked: dict[str, Any] = {"n": _NUM_CASES, "max_tokens": 48}
    async for seed, (*_, last) in _sampled(subject, **asked):
        if (stop := plain_text(tokenizer, last.token_ids, 2)) is None:
            continue
        request = subject.request(subject.prompt(seed=seed), **asked, stop=(stop,), **subject.repeatable(seed))
        for one in (await subject.endpoint.generate(request)).completions:
            what = f"stop string {stop!r}, completion {one.index} of {_NUM_CASES}"
            _require_ended(one, completing(tokenizer, stop, one), 48, what)
        return


async def _require_prompt_ignored(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that no stop string is found in a prompt that contains it, or that ends with its first token, even if the
    end of the prompt is an earlier part of the completion."""
    async for seed, (completion,) in _sampled(subject, max_tokens=32, temperature=0.0):
        prompt, free = subject.prompt(seed=seed), completion.token_ids
        if (stop := plain_text(tokenizer, free, 2)) is None:
            continue
        cut = next(i for i in range(len(free)) if stop in tokenizer.decode(list(free[: i + 1])))
        of_prompt = ("begins at the end of the prompt", 0), ("is the end of the prompt", 0)
        of_part = ("begins at the end of the part before", cut), ("is the end of the part before", cut + 1)
        both = subject.capabilities.partial_rollouts
        for i, (where, num_continued) in enumerate((*of_prompt, *(of_part if both else ()))):
            ids = (*prompt, *free[: cut + i % 2])
            request = subject.request(ids, max_tokens=8, temperature=0.0, stop=(stop,))
            request = request.model_copy(update={"num_continued": num_continued})
            (found,) = (await subject.endpoint.generate(request)).completions
            ends = completing(tokenizer, stop, found)
            _require_ended(found, ends, 8, f"stop string {stop!r}, which {where}")
        return


def completing(tokenizer: Any, stop: str, completion: Completion) -> list[int]:
    """Return the index of each token of a completion such that the text up to this token contains a stop string.

    Special tokens have no text.
    """
    ids = completion.token_ids
    return [i for i in range(len(ids)) if stop in tokenizer.decode(list(ids[: i + 1]), skip_special_tokens=True)]


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
            is_met = _require_ended(completion, ends, num_tokens, f"ignore_eos={str(ignore_eos).lower()}")
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
            num_stopped += _require_ended(completion, ends, num_tokens, what)
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
        _require_ended(found, [end - begin - 1], 24, f"{what}, {_TEXT[end - 1]!r}, after {text!r}")
        begin = end
    sampling: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "stop_token_ids": (0,)}
    found = await subject.generate((1, 2), endpoint=endpoint, **sampling)
    _require_ended(found, [found.token_ids.index(0)] if 0 in found.token_ids else [], 24, "stop token 0")


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
    _require_ended(filled, [], num_tokens, "max_tokens=None and ignore_eos=true")
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


def _require_ended(completion: Completion, ends: Sequence[int], num_tokens: int, what: str) -> bool:
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


def _require_most_stopped(subject: EndpointSubject, num_stopped: int, num_cases: int) -> None:
    subject.note(cases=num_cases, stopped=num_stopped)
    share = least_common(subject)
    require(
        num_stopped >= share * num_cases or (share < 1.0 and num_cases < _FEWEST_COARSE_CASES),
        f"only {num_stopped} of {num_cases} repeated seeded completions contain what they should have stopped at",
    )


def plain_text(tokenizer: Any, token_ids: Sequence[int], num: int, *, is_cut: bool = False) -> str | None:
    """Return a text of ``num`` adjacent tokens that does not occur earlier in a completion; None if there is none.

    With ``is_cut``, the text begins and ends within its first and last token, if these have several characters.
    """
    special = set(tokenizer.all_special_ids)
    for i in range(3, len(token_ids) - num + 1):
        if special & set(token_ids[: i + num]):
            return None
        pieces = [tokenizer.decode([token]) for token in token_ids[i : i + num]]
        text = tokenizer.decode(list(token_ids[i : i + num]))
        is_plain = all(piece.isascii() and piece.isprintable() and piece == piece.strip() and piece for piece in pieces)
        if not is_plain or text != "".join(pieces):
            continue
        if is_cut:
            text = text[len(pieces[0]) > 1 : len(text) - (len(pieces[-1]) > 1)]
        before, after = (tokenizer.decode(list(token_ids[:stop])) for stop in (i + num - 1, i + num))
        if text not in before and text in after:
            return str(text)
    return None


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
