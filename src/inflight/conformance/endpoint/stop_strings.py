"""Level ``tokens``: stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import product
from typing import Any

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.aftermath import require_right_logprobs
from inflight.conformance.endpoint.endings import require_ended, require_most_stopped
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import make_model_of_text
from inflight.conformance.reference import ReferenceCheckpoint
from inflight.errors import InvalidRequestError
from inflight.wire import Completion

LEVEL = "tokens"
_STOP_LENGTHS = (2, 4, 3, 2)
"""Number of tokens in the stop string of each case."""
_NUM_CASES = len(_STOP_LENGTHS)
_MOST_SEEDS = 40
"""Maximum number of completions that are searched for a place at which to stop."""
_NUM_AT_ONCE = 8
"""Number of requests that are sampled at a time for such a search; it divides `_MOST_SEEDS`."""
_LITERALLY_ABSENT = ("QUI", "q.i", " qui", "qui ")
"""Stop strings that occur in the text of `_PAIRS` only if case or spaces are ignored, or as patterns."""
NEVER, _SHORT = "\x00 never", "~"
"""Stop strings that never occur."""
_LONG_CHARACTERS = (
    "\U0001f300\U000f0042\U00103105\u1187\u2348\u3250\u428b\u538f\u6452\u74d4\u8556\u95d8\ua65a\ub6dc\uc75e\ue821\uf8a3"
)
"""Characters of three or four bytes each; all the bytes are different. Two bytes per character would be far too few."""
_SPACES = "y \n\t"
"""A letter followed by white space."""
_IN_THE_PROMPT = "never"
"""A stop string that occurs in a prompt only."""
_PAIRS, _CUT = ("qu", "ix", "ot"), "uixo"
"""Tokens of two letters each, and a part of their text that ends within the last token."""
_NUM_OF_TEXT = 80
"""Value of max_tokens: enough for a completion to contain the whole text."""
_NUM_STOP_STRINGS = 6
"""Number of stop strings in requests where only the last of them occurs. OpenAI's limit is 4."""


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
        # The completion is sampled alone, like the request with stop strings.
        free = await subject.generate(prompt, max_tokens=48, **same)
        if (stop := plain_text(tokenizer, free.token_ids, num, is_cut=is_cut)) is None:
            continue
        num_cases += 1
        try:
            never = tuple(f"{NEVER} {i}" for i in range(_NUM_STOP_STRINGS - 1))
            words = (stop, NEVER) if num_cases % 2 else (*never, stop)
            request, found = await subject.ask(prompt, max_tokens=48, stop=words, **same)
        except InvalidRequestError as error:
            if "tokenizer" in str(error):
                skip(str(error))
            raise
        what = f"{len(words)} stop strings, of which only {stop!r} occurs"
        num_stopped += require_ended(found, completing(tokenizer, stop, found), 48, what)
        require_right_logprobs(subject, request, found, "a completion with a stop string")
        if num_cases == _NUM_CASES:
            break
    if not num_cases:
        skip(f"{_MOST_SEEDS} completions contain no two tokens of plain text that could end a completion")
    require_most_stopped(subject, num_stopped, num_cases)
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
    start, ends = [*(token % reference.vocab_size for token in subject.prompt()), 0], []  # the text follows this token
    middle = [*start, ord(_SPACES[-1])]  # the pairs follow this token
    for stop, where, prompt in (
        (_LONG_CHARACTERS, "takes several tokens per character", start),
        (_SPACES[:2], "ends with a space", start),
        (_SPACES[1:3], "consists of white space", start),
        (_CUT, "ends within a token", start),
        (_CUT, "ends within the third token", middle),
        (_PAIRS[0], "is the first token", middle),
    ):
        for words in ((stop,), (_SHORT, stop), (stop, _SHORT), (*_LITERALLY_ABSENT, stop)):
            asked = {"max_tokens": _NUM_OF_TEXT, "temperature": 0.0, "stop": words}
            found = await subject.generate(prompt, endpoint=endpoint, **asked)
            ends_at = completing(reference.tokenizer, stop, found)
            text = "" if reference.tokenizer is None else reference.tokenizer.decode(list(found.token_ids))
            limit = f"of at most {_NUM_OF_TEXT} tokens"
            require(ends_at, f"with the stop strings {words}, a completion {limit} ended after {text!r}")
            what = f"stop string {stop!r}, which {where}, among {words}"
            require_ended(found, ends_at, _NUM_OF_TEXT, what)
            ends.append(len(found.token_ids))
    # Sampled tokens complete the character at the end of the prompt, which contains a stop string.
    prompt = [*start, *_IN_THE_PROMPT.encode(), _LONG_CHARACTERS.encode()[0]]
    found = await subject.generate(prompt, endpoint=endpoint, max_tokens=24, temperature=0.0, stop=(_IN_THE_PROMPT,))
    what = f"a completion of 24 tokens after a prompt that contains the stop string {_IN_THE_PROMPT!r} and ends within"
    require(
        len(found.token_ids) == 24 and found.finish_reason == "length",
        f"{what} a character ended after {len(found.token_ids)} tokens with {found.finish_reason!r}",
    )
    subject.note(tokens_of_a_known_text=ends)


async def _require_stopped_at_once(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that a completion ends at its first token if that token contains a stop string."""
    async for seed, (free,) in _sampled(subject, max_tokens=2):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        stop = tokenizer.decode([free.token_ids[0]])
        if stop.isascii() and stop.isprintable() and stop.strip() == stop != "":
            found = await subject.generate(prompt, max_tokens=8, stop=(stop,), **same)
            require_ended(found, completing(tokenizer, stop, found), 8, f"stop string {stop!r}, the first token's text")
            return


async def _require_stopped_by_a_character(subject: EndpointSubject, tokenizer: Any) -> None:
    """Require that a completion ends at the last token of a character that several tokens spell, if one is found."""
    async for seed, (free,) in _sampled(subject, max_tokens=48):
        prompt, same = subject.prompt(seed=seed), subject.repeatable(seed)
        if (stop := _spelled_character(tokenizer, free.token_ids)) is not None:
            found = await subject.generate(prompt, max_tokens=48, stop=(stop,), **same)
            what = f"stop string {stop!r}, one character that several tokens spell"
            require_ended(found, completing(tokenizer, stop, found), 48, what)
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
            require_ended(one, completing(tokenizer, stop, one), 48, what)
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
            require_ended(found, ends, 8, f"stop string {stop!r}, which {where}")
        return


def completing(tokenizer: Any, stop: str, completion: Completion) -> list[int]:
    """Return the index of each token of a completion such that the text up to this token contains a stop string.

    Special tokens have no text.
    """
    ids = completion.token_ids
    return [i for i in range(len(ids)) if stop in tokenizer.decode(list(ids[: i + 1]), skip_special_tokens=True)]


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
