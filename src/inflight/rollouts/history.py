"""A bounded history of the completions of each prompt: their lengths, rewards and tokens.

The completions may come from any version of the weights, so they are hints and never training data.
"""

from __future__ import annotations

import base64
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import CheckpointError

_WHAT = "the history of rollouts in the checkpoint"


@dataclass(slots=True)
class PromptRecord:
    """The latest completions of one prompt, oldest first."""

    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    completions: list[array[int]] = field(default_factory=list)
    """The token ids of the last group only, as RhymeRL (arXiv 2508.18588) keeps only one epoch; empty if none were
    kept.
    """

    @property
    def mean_length(self) -> float:
        """The mean length, in tokens, of the recorded completions."""
        return sum(self.lengths) / len(self.lengths)


class HistoryStore:
    """Remembers the latest ``completions_per_prompt`` lengths and rewards of each prompt, and the last group's tokens.

    Prompts in excess of ``max_prompts`` are removed, least recently recorded first. If there are more than
    ``max_tokens`` tokens, the tokens of prompts are removed in the same order.
    """

    def __init__(
        self, *, max_prompts: int = 100_000, max_tokens: int = 8_000_000, completions_per_prompt: int = 16
    ) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._completions_per_prompt = completions_per_prompt
        self._records: OrderedDict[str, PromptRecord] = OrderedDict()
        """The records by prompt, least recently recorded first."""
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are stored."""
        return self._num_tokens

    def of(self, prompt: str) -> PromptRecord | None:
        """Return the record of a prompt; None if there is none."""
        return self._records.get(prompt)

    def record(
        self,
        prompt: str,
        lengths: Sequence[int],
        rewards: Sequence[float],
        completions: Sequence[Sequence[int]] = (),
    ) -> None:
        """Add one group of a prompt; ``completions``, if not empty, are the token ids of each completion."""
        record = self._records.setdefault(prompt, PromptRecord())
        self._records.move_to_end(prompt)
        record.lengths = [*record.lengths, *lengths][-self._completions_per_prompt :]
        record.rewards = [*record.rewards, *rewards][-self._completions_per_prompt :]
        self._forget_tokens(record)
        if completions:
            record.completions = [array("i", token_ids) for token_ids in completions]
            self._num_tokens += sum(map(len, record.completions))
        while len(self._records) > self._max_prompts:
            _, oldest = self._records.popitem(last=False)
            self._forget_tokens(oldest)
        if self._num_tokens > self._max_tokens:
            for oldest in self._records.values():
                self._forget_tokens(oldest)
                if self._num_tokens <= self._max_tokens:
                    break

    def _forget_tokens(self, record: PromptRecord) -> None:
        self._num_tokens -= sum(map(len, record.completions))
        record.completions = []

    def to_json(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as JSON values; token ids are 32-bit integers in base64."""
        return {
            prompt: [
                record.lengths,
                record.rewards,
                [base64.b64encode(token_ids.tobytes()).decode() for token_ids in record.completions],
            ]
            for prompt, record in self._records.items()
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Replace the history with one that `to_json` returned. Raises `CheckpointError` if it cannot be read."""
        records: OrderedDict[str, PromptRecord] = OrderedDict()
        try:
            for prompt, (lengths, rewards, completions) in data.items():
                token_ids = [array("i", base64.b64decode(text, validate=True)) for text in completions]
                records[prompt] = PromptRecord([int(n) for n in lengths], [float(r) for r in rewards], token_ids)
                if len(lengths) != len(rewards) or not lengths:
                    raise ValueError(f"prompt {prompt} has {len(lengths)} lengths and {len(rewards)} rewards")
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{_WHAT} cannot be read: {type(error).__name__}: {error}") from error
        self._records = records
        self._num_tokens = sum(len(ids) for record in records.values() for ids in record.completions)
