"""The queue of finished groups, from which a composer forms optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.base.extensions import make
from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.errors import InvalidRequestError
from inflight.rollouts.composers import COMPOSERS
from inflight.rollouts.staleness import num_trained_tokens
from inflight.types import Group


def load_composer(name: str, params: Mapping[str, Any], tokens_per_step: int) -> BatchComposer:
    """Return the named batch composer, constructed with ``tokens_per_step`` and ``params``. Raises `ConfigError`."""
    arguments = {"tokens_per_step": tokens_per_step}
    composer: BatchComposer = make(BatchComposer, "batch composer", "composers", name, arguments, params, COMPOSERS)
    return composer


class WaitingGroups:
    """Holds finished groups, oldest first, until a composer puts them into a step or all their tokens are too old.

    Tokens are counted for the step that starts from the version last passed to `advance`: tokens that ``staleness``
    masks do not count, and neither does the prompt of a completion whose tokens are all masked. A different
    ``count`` function replaces this rule.
    """

    def __init__(
        self,
        staleness: StalenessPolicy,
        composer: BatchComposer,
        count: Callable[[Group, StalenessPolicy, int], int] = num_trained_tokens,
    ) -> None:
        self._staleness = staleness
        self._composer = composer
        self._count = count
        self._version = 0
        self._waiting: list[Group] = []
        self._tokens: list[int] = []
        """For each waiting group, how many of its tokens can be trained on."""
        self._num_tokens = 0
        self._composed: tuple[tuple[int, float], Sequence[int]] | None = None
        """The composer's last choice, with its ``oldest`` and ``groups_per_step``; None if groups have changed since
        then.
        """

    @property
    def num_tokens(self) -> int:
        """Training tokens (prompts and completions) in the queue."""
        return self._num_tokens

    @property
    def num_groups(self) -> int:
        """Number of groups in the queue."""
        return len(self._waiting)

    def advance(self, version: int) -> list[Group]:
        """Count tokens for a step that starts from ``version`` from now on.

        Removes the groups that have no tokens left to train on, and returns them, oldest first.
        """
        self._version = version
        return [group for group in self.take_all() if not self.add(group)]

    def add(self, group: Group) -> bool:
        """Append a finished group and return True; return False, without adding it, if all its tokens are too old."""
        num_tokens = self._count(group, self._staleness, self._version)
        if num_tokens:
            self._waiting.append(group)
            self._tokens.append(num_tokens)
            self._num_tokens += num_tokens
            self._composed = None
        return num_tokens > 0

    def ready(self, oldest: int = 0, groups_per_step: float = 1.0) -> bool:
        """Return whether the composer can form a step from those waiting groups that the staleness policy allows.

        ``oldest`` and ``groups_per_step`` have the same meaning as in `StalenessPolicy.trainable`.
        """
        return len(self._compose(oldest, groups_per_step)) > 0

    def take(self, oldest: int = 0, groups_per_step: float = 1.0) -> list[Group]:
        """Remove and return the groups of one step. Raises `InvalidRequestError` if there is none yet."""
        chosen = self._compose(oldest, groups_per_step)
        if not chosen:
            raise InvalidRequestError(
                f"the {self.num_tokens} waiting training tokens are too few for a step: call ready() first"
            )
        step = [self._waiting[i] for i in chosen]
        taken = {*chosen}
        self._num_tokens -= sum(self._tokens[i] for i in taken)
        rest = [i for i in range(len(self._waiting)) if i not in taken]
        self._waiting, self._tokens = [self._waiting[i] for i in rest], [self._tokens[i] for i in rest]
        self._composed = None
        return step

    def take_all(self) -> list[Group]:
        """Remove and return every group in the queue, oldest first; the list may be empty."""
        groups, self._waiting, self._tokens = self._waiting, [], []
        self._num_tokens, self._composed = 0, None
        return groups

    def _compose(self, oldest: int, groups_per_step: float) -> Sequence[int]:
        """Return the composer's choice; the composer is called again only if groups or arguments have changed."""
        asked = oldest, groups_per_step
        if self._composed is None or self._composed[0] != asked:
            self._composed = asked, self._chosen(*asked)
        return self._composed[1]

    def _chosen(self, oldest: int, groups_per_step: float) -> Sequence[int]:
        if type(self._staleness).trainable is StalenessPolicy.trainable:  # all are trainable: skip a slow call
            indices: Sequence[int] = range(len(self._waiting))
            groups, num_tokens = self._waiting, self._tokens
        else:
            ids = [group.group_id for group in self._waiting]
            allowed = self._staleness.trainable(ids, oldest, groups_per_step)
            indices = [i for i, is_allowed in enumerate(allowed) if is_allowed]
            groups, num_tokens = [self._waiting[i] for i in indices], [self._tokens[i] for i in indices]
        chosen = self._composer.compose(groups, num_tokens)
        if len({*chosen} & {*range(len(groups))} if chosen else ()) != len(chosen):
            raise InvalidRequestError(
                f"the batch composer chose {list(chosen)} of {len(groups)} groups: it must choose valid indices, "
                "each at most once"
            )
        return [indices[i] for i in chosen]


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[list[Group]]:
    """Split groups, in order, into ``num_parts`` parts of about equally many tokens; few groups form fewer parts."""
    total = sum(group.num_tokens for group in groups)
    parts: list[list[Group]] = [[] for _ in range(num_parts)]
    before = 0
    for group in groups:
        middle = before + group.num_tokens / 2
        parts[min(num_parts - 1, int(middle * num_parts / total))].append(group)
        before += group.num_tokens
    return [part for part in parts if part]
