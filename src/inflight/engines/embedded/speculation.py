"""Drafts of running sequences and their verification, in the engine's thread.

A step computes a sequence's last token and its draft. After each of these tokens, it draws a token exactly as it would
without a draft: from the same distribution, with the random number of that position in the completion. The drawn tokens
are kept up to and including the first that differs from the draft. This is rejection sampling (arXiv:2211.17192,
algorithm 1) for a draft distribution that is a point mass: a drafted token x is accepted with probability p(x), and a
token drawn in its place has the distribution p without x, renormalized. Since the random numbers belong to positions, a
seed yields the same tokens regardless of the drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from inflight.engines.embedded.counters import EngineCounters
from inflight.engines.embedded.sequences import Sequence
from inflight.rollouts.drafts import DraftSource
from inflight.wire import DraftHistory


class DrawnTokens(NamedTuple):
    """The one or more tokens that a sequence receives in one step, and their logprobs."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]


class Speculation:
    """Drafts tokens from ``source`` (none if it is None), and counts their verification in ``counters``."""

    def __init__(self, source: DraftSource | None, counters: EngineCounters) -> None:
        self._source = source
        self._counters = counters

    @property
    def is_on(self) -> bool:
        return self._source is not None

    @property
    def takes_history(self) -> bool:
        return self._source is not None and self._source.takes_history

    def record(self, history: DraftHistory) -> None:
        assert self._source is not None
        self._source.record(history)

    def begin(self, sequence: Sequence) -> None:
        if self._source is not None:
            ids, num_continued = sequence.request.prompt_token_ids, sequence.request.num_continued
            num_prompt = len(ids) - num_continued
            sequence.drafter = self._source.drafter(ids[:num_prompt], ids[num_prompt:])

    def propose(self, sequence: Sequence) -> int:
        """Draft the next tokens of a running sequence; return their number. One more token fits after them."""
        if sequence.drafter is None:
            return 0
        sequence.draft = sequence.drafter.draft(sequence.request.max_tokens - len(sequence.token_ids) - 1)
        return len(sequence.draft)

    def verify(self, sequences: Iterable[Sequence], token_ids: list[int], logprobs: list[float]) -> list[DrawnTokens]:
        """Return the drawn tokens that each sequence keeps.

        For each sequence, ``token_ids`` has the token drawn after its last token, then one drawn after each drafted
        token.
        """
        if self._source is None:
            return [DrawnTokens(s, [token], [p]) for s, token, p in zip(sequences, token_ids, logprobs, strict=True)]
        kept, start = [], 0
        for sequence in sequences:
            draft, stop = sequence.draft, start + len(sequence.draft) + 1
            own = token_ids[start:stop]
            num = num_accepted(draft, own)
            if draft and sequence.drafter is not None:
                sequence.drafter.verified(len(draft), num)
                self._counters.num_verifications += 1
                self._counters.num_drafted += len(draft)
                self._counters.num_accepted += num
                sequence.num_verifications += 1
                sequence.num_accepted += num
                sequence.draft = []
            kept.append(DrawnTokens(sequence, own[: num + 1], logprobs[start : start + num + 1]))
            start = stop
        return kept


def num_accepted(draft: list[int], token_ids: list[int]) -> int:
    """Return how many tokens of a draft equal the drawn tokens, up to the first that differs."""
    return next((i for i, token in enumerate(draft) if token_ids[i] != token), len(draft))
