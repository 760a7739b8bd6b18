"""When the trainer has enough: finished groups, cut into optimizer steps by the tokens that will be trained."""

from __future__ import annotations

from collections import deque

from inflight.errors import InvalidRequestError
from inflight.rollouts.staleness import StalenessPolicy
from inflight.types import Group


class BatchComposer:
    """Collects groups as they finish; a step is ready once the budget of training tokens of all workers is reached.

    Tokens are counted as the step that `advance` names will see them: those that ``staleness`` masks do not count, and
    a completion without any other brings no prompt either. Steps are made of whole groups in the order of `add`, and
    are the shortest that reach the budget: what exceeds it is less than one group.
    """

    def __init__(self, tokens_per_worker: int, num_workers: int, staleness: StalenessPolicy) -> None:
        self._tokens_per_step = tokens_per_worker * num_workers
        self._staleness = staleness
        self._version = 0
        self._groups: deque[tuple[Group, int]] = deque()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Training tokens (prompts and completions) that wait."""
        return self._num_tokens

    @property
    def num_groups(self) -> int:
        """Groups that wait."""
        return len(self._groups)

    def advance(self, version: int) -> list[Group]:
        """Count for a step that starts from ``version`` from now on.

        Removes and returns the groups, oldest first, that have no token left to train.
        """
        groups = [group for group, _ in self._groups]
        self._version = version
        self._groups.clear()
        self._num_tokens = 0
        return [group for group in groups if not self.add(group)]

    def add(self, group: Group) -> bool:
        """Put a finished group at the end of the line; returns False, and leaves it out, if all its tokens are old."""
        num_tokens = self._staleness.num_trained_tokens(group, self._version)
        if num_tokens:
            self._groups.append((group, num_tokens))
            self._num_tokens += num_tokens
        return num_tokens > 0

    def ready(self) -> bool:
        """Return whether the groups that wait fill an optimizer step."""
        return self._num_tokens >= self._tokens_per_step

    def take(self) -> list[Group]:
        """Remove and return the groups of one step, oldest first. Raises `InvalidRequestError` if it is not ready."""
        if not self.ready():
            raise InvalidRequestError(
                f"a step needs {self._tokens_per_step} training tokens and {self._num_tokens} wait: ask ready() first"
            )
        step: list[Group] = []
        step_tokens = 0
        while step_tokens < self._tokens_per_step:
            group, num_tokens = self._groups.popleft()
            step.append(group)
            step_tokens += num_tokens
        self._num_tokens -= step_tokens
        return step

    def take_all(self) -> list[Group]:
        """Remove and return every group that waits, oldest first; may be none."""
        groups = [group for group, _ in self._groups]
        self._groups.clear()
        self._num_tokens = 0
        return groups
