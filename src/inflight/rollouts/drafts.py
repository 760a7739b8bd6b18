"""Drafts completions from other completions of the same prompt.

The completions of a prompt are searched as in a suffix trie: the search finds the longest suffix of the tokens sampled
so far that occurs in one of the completions, and then follows the most frequent continuation, token by token. The nodes
of the trie are not stored. An index of short suffixes yields the places in the texts where a suffix ends, and the nodes
below it are counted during the walk, so memory grows with the number of tokens, not with the depth of the trie.

The algorithm and its constants are those of RhymeRL's HistoSpec (arXiv:2508.18588, section 4; code in
``specRL/histoSpec`` of verl-recipe). The weighting by reward is described only in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from inflight.contracts import DraftProvider
from inflight.wire import DraftHistory, PromptHistory

LONGEST_SUFFIX = 7
SHORTEST_SUFFIX = 4
PROMPT_TAIL = 5
"""Number of tokens of the prompt kept before each completion, so that the first tokens can be drafted too."""
LEAST_PROBABILITY = 0.1
"""A draft ends before the token that would bring its estimated probability below this value."""
SMALLEST_WINDOW, LARGEST_WINDOW = 2, 16
"""Bounds for the maximum length of a draft, in tokens.

The maximum doubles when a whole draft was accepted, and is halved otherwise.
"""

_MAX_PROMPTS = 1 << 16
_MAX_BYTES = 1 << 30
_TOKEN_BYTES = 400
"""Bytes of memory per indexed token (measured: 300 if no suffix occurs twice)."""
_MAX_FINISHED = 64
"""Maximum number of finished siblings of one prompt; beyond this, the older half is dropped."""
_MAX_PLACES = 256
"""Maximum number of places kept for one suffix; suffixes of repetitive texts have very many."""
_LEAST_WEIGHT = 1e-3
"""The weight of a text whose reward would make the weight zero or negative."""


@dataclass(slots=True, eq=False)
class _Text:
    """The tail of a prompt, followed by a completion."""

    token_ids: list[int]
    weight: float = 1.0

    @property
    def size_bytes(self) -> int:
        return _TOKEN_BYTES * len(self.token_ids)


_Place = tuple[_Text, int]
"""A text, and the index of one of its tokens."""


@dataclass(slots=True, eq=False)
class _Texts:
    """The texts of one prompt, with the places where each suffix of `SHORTEST_SUFFIX` tokens ends."""

    finished: list[_Text] = field(default_factory=list)
    running: list[_Text] = field(default_factory=list)
    places: dict[tuple[int, ...], list[_Place]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(text.size_bytes for text in self.finished)

    def replace(self, finished: list[_Text]) -> None:
        self.finished = finished
        self.places = {}
        for text in (*finished, *self.running):
            self.index(text, 0)

    def index(self, text: _Text, start: int) -> None:
        """Index the tokens of a text from ``start``."""
        ids = text.token_ids
        for end in range(max(start, SHORTEST_SUFFIX - 1), len(ids)):
            places = self.places.setdefault(tuple(ids[end - SHORTEST_SUFFIX + 1 : end + 1]), [])
            if len(places) < _MAX_PLACES:
                places.append((text, end))

    def continuation(self, text: _Text, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that may follow a text, based on what follows its longest suffix elsewhere."""
        tail = text.token_ids[-LONGEST_SUFFIX:]
        longest, found = 0, list[_Place]()
        for other, end in self.places.get(tuple(tail[-SHORTEST_SUFFIX:]), ()):
            ids = other.token_ids
            if other is text or end + 1 == len(ids):
                continue
            length = SHORTEST_SUFFIX
            while length < len(tail) and length <= end and ids[end - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, found = length, []
            if length == longest:
                found.append((other, end))
        return _walk(found, limit)


def _walk(places: list[_Place], limit: int) -> list[int]:
    """Return the tokens with the largest weights after these places, until they become too improbable."""
    walked: list[int] = []
    probability = 1.0
    while places and len(walked) < limit:
        if len(places) == 1:
            ((text, end),) = places
            return walked + text.token_ids[end + 1 : end + 1 + limit - len(walked)]
        children: dict[int | None, list[_Place]] = {}
        for text, end in places:
            token = text.token_ids[end + 1] if end + 1 < len(text.token_ids) else None
            children.setdefault(token, []).append((text, end + 1))
        if len(children) > 1:
            weights = {token: sum(text.weight for text, _ in below) for token, below in children.items()}
            likeliest = max(weights, key=weights.__getitem__)
            probability *= weights[likeliest] / sum(weights.values())
        else:
            (likeliest,) = children
        if likeliest is None or probability < LEAST_PROBABILITY:
            break
        walked.append(likeliest)
        places = children[likeliest]
    return walked


@dataclass(slots=True)
class DraftWindow:
    """Maximum number of tokens of the next draft of one completion."""

    size: int = SMALLEST_WINDOW

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        if num_accepted == num_drafted:
            self.size = min(2 * self.size, LARGEST_WINDOW)
        else:
            self.size = max(self.size // 2, SMALLEST_WINDOW)


class DraftSource:
    """The texts from which the completions of one engine are drafted, by prompt. Use it in one thread only.

    ``reward_weight`` is lambda in 1 + lambda * reward, the weight of a recorded completion. Beyond ``max_prompts`` or
    ``max_bytes``, the least recently used prompts are dropped.
    """

    def __init__(
        self,
        provider: DraftProvider,
        *,
        reward_weight: float = 0.0,
        max_prompts: int = _MAX_PROMPTS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.takes_history = provider in ("history", "both")
        self.takes_siblings = provider in ("siblings", "both")
        self._reward_weight = reward_weight
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._prompts: dict[tuple[int, ...], _Texts] = {}
        """The most recently used prompt comes last."""
        self.size_bytes = 0
        """Estimated memory of the finished texts."""

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def record(self, history: DraftHistory) -> None:
        """Replace the finished completions of the prompts in ``history``."""
        for entry in history.entries:
            prompt = entry.prompt_token_ids
            tail = prompt[-PROMPT_TAIL:]
            recorded = [
                _Text([*tail, *ids], max(1.0 + self._reward_weight * reward, _LEAST_WEIGHT))
                for ids, reward in zip(entry.completions, entry.rewards, strict=True)
            ]
            self._replace(prompt, self._used(prompt) or self._added(prompt), recorded)

    def drafter(self, prompt_token_ids: tuple[int, ...], continued: Sequence[int] = ()) -> Drafter:
        """Return a drafter for a completion. If an aborted completion continues, ``continued`` has its earlier tokens.

        Call `Drafter.finish` when the completion has ended, so that siblings can be drafted from it.
        """
        texts = self._used(prompt_token_ids)
        if texts is None and self.takes_siblings:
            texts = self._added(prompt_token_ids)
        return Drafter(self, prompt_token_ids, texts, continued)

    def add_finished(self, prompt: tuple[int, ...], texts: _Texts, text: _Text) -> None:
        """Keep a sibling that has ended."""
        texts.running.remove(text)
        finished = [*texts.finished, text]
        if len(finished) > _MAX_FINISHED:
            self._replace(prompt, texts, finished[-_MAX_FINISHED // 2 :])
            return
        texts.finished = finished
        if self._prompts.get(prompt) is texts:
            self.size_bytes += text.size_bytes
            self._forget()

    def _used(self, prompt: tuple[int, ...]) -> _Texts | None:
        """Return the texts of a prompt, and mark it as the most recently used one."""
        texts = self._prompts.pop(prompt, None)
        if texts is not None:
            self._prompts[prompt] = texts
        return texts

    def _added(self, prompt: tuple[int, ...]) -> _Texts:
        texts = self._prompts[prompt] = _Texts()
        return texts

    def _replace(self, prompt: tuple[int, ...], texts: _Texts, finished: list[_Text]) -> None:
        before = texts.size_bytes
        texts.replace(finished)
        if self._prompts.get(prompt) is texts:
            self.size_bytes += texts.size_bytes - before
            self._forget()

    def _forget(self) -> None:
        while self._prompts and (len(self._prompts) > self._max_prompts or self.size_bytes > self._max_bytes):
            oldest = next(iter(self._prompts))
            self.size_bytes -= self._prompts.pop(oldest).size_bytes


class Drafter:
    """Drafts the tokens of one completion, and learns every token that was sampled."""

    def __init__(
        self, source: DraftSource, prompt_token_ids: tuple[int, ...], texts: _Texts | None, continued: Sequence[int]
    ) -> None:
        self._source = source
        self._prompt_token_ids = prompt_token_ids
        self._texts = texts
        self._text = _Text([*prompt_token_ids[-PROMPT_TAIL:], *continued])
        self.window = DraftWindow()
        if texts is not None and source.takes_siblings:
            texts.running.append(self._text)
            texts.index(self._text, 0)

    def draft(self, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that may come next; empty if nothing is known."""
        if self._texts is None or limit < 1:
            return []
        return self._texts.continuation(self._text, min(limit, self.window.size))

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt the length of the next draft to how much of the last one was accepted."""
        self.window.verified(num_drafted, num_accepted)

    def sampled(self, token_id: int) -> None:
        """Add the next token of the completion."""
        if self._texts is not None:
            self._text.token_ids.append(token_id)
            if self._source.takes_siblings:
                self._texts.index(self._text, len(self._text.token_ids) - 1)

    def finish(self) -> None:
        """End the completion; its siblings can still be drafted from it. Idempotent."""
        texts, self._texts = self._texts, None
        if texts is not None and self._source.takes_siblings:
            self._source.add_finished(self._prompt_token_ids, texts, self._text)


def split_history(entries: Iterable[PromptHistory], max_tokens: int) -> Iterator[DraftHistory]:
    """Yield the entries as histories of at most ``max_tokens`` tokens each, unless one entry alone has more."""
    part: list[PromptHistory] = []
    num_tokens = 0
    for entry in entries:
        size = len(entry.prompt_token_ids) + sum(map(len, entry.completions))
        if part and num_tokens + size > max_tokens:
            yield DraftHistory(entries=tuple(part))
            part, num_tokens = [], 0
        part.append(entry)
        num_tokens += size
    if part:
        yield DraftHistory(entries=tuple(part))
