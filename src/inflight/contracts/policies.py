"""The Protocols of the policies of a run: schedulers, staleness, length predictors and batch composers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from inflight.contracts.scheduling import Decision, Event
from inflight.types import Group, Sample

if TYPE_CHECKING:
    pass


@runtime_checkable
class StalenessPolicy(Protocol):
    """Which tokens and groups are too old to train on, and how much may be under way. Deterministic, without I/O."""

    @abstractmethod
    def mask(self, token_versions: Sequence[int], trainer_version: int) -> Sequence[bool]:
        """Return, for each token of one completion, whether a step from ``trainer_version`` trains on it."""

    @abstractmethod
    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return how many groups may be in flight, or finished but not trained, at once; at least 1.

        ``groups_per_step`` is an average. One more group is admitted where none is in flight and no step is ready.
        """

    def trainable(self, waiting: Sequence[int], oldest: int, groups_per_step: float) -> Sequence[bool]:
        """Return which of the waiting groups a step may be made of; by default all of them.

        Groups are given by the order in which they were offered; ``oldest`` is the first one that is sampled or scored,
        or the next to be offered if none is. Groups before it must be allowed, or nothing might ever be trained.
        """
        return [True] * len(waiting)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        """Return whether a completion whose first token ``first_version`` sampled may still be trained on.

        That is, whether `mask` may keep any of its tokens, those included that are not sampled yet, in a step from
        ``trainer_version`` or a later one. By default it may. If no completion of a group may, sampling of the group
        ends, and the group is dropped.
        """
        return True

    def after_step(self, version: int, effective_sample_size: float | None) -> None:
        """Take note of a step that led to ``version``; nothing by default. Raises `TrainerError` to stop the run.

        ``effective_sample_size`` is that of the step's importance ratios, as a share between 0 and 1; None: the loss
        has no ratios.
        """
        return

    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what a later `restore` needs; nothing by default."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. Called before anything else."""
        return


@runtime_checkable
class Scheduler(Protocol):
    """Which completions run where and when. Deterministic, without I/O: no clock, thread, file or randomness.

    `inflight.contracts.scheduling` has the events that it receives and the decisions that it returns. The live run and
    a simulator drive the same objects. It is constructed with ``group_size`` (completions per item), ``history`` (a
    `HistoryStore`, which the run fills), ``seed`` and parameters of its own.
    """

    surplus: float = 1.0
    """How many times as many groups as a step needs it may be offered in conventional mode."""

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Take note of an event. Events come in the order of their times."""

    @abstractmethod
    def num_wanted(self) -> int:
        """Return how many more items to offer now; the staleness policy may allow fewer."""

    @abstractmethod
    def decide(self, time_s: float) -> Sequence[Decision]:
        """Return what to do now; empty: nothing until the next event. Each decision counts as carried out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what a later `restore` needs: neither items nor endpoints, which are told again."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. Called before anything is told."""

    def metrics(self) -> Mapping[str, float]:
        """Return figures of its own for the row of the last step, and start again; none by default."""
        return {}


@runtime_checkable
class LengthPredictor(Protocol):
    """How long the completions of a prompt will be. Deterministic, without I/O."""

    @abstractmethod
    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        """Return the expected length in tokens; None if nothing is known.

        ``prompt`` identifies the prompt as in `inflight.contracts.scheduling.Offered`; ``finished`` are the lengths of
        those of its group that have finished.
        """


@runtime_checkable
class BatchComposer(Protocol):
    """Which finished groups make up the next optimizer step. Deterministic, without I/O."""

    @abstractmethod
    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        """Return the indices of the groups of a step, none twice; an empty sequence waits for more groups.

        ``groups`` are those that wait, oldest first, and ``num_tokens[i]`` counts the tokens of ``groups[i]`` that a
        step would train on. Called again whenever a group arrives; sampling pauses while a step is ready.
        """

    def accepts(self, group: Group) -> bool:
        """Return whether a finished group may be trained on; by default any.

        Others are dropped, and further items are sampled.
        """
        return True

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        """Return what a step trains on, of the samples of the groups that it is made of; by default all of them.

        ``version`` is that of the step. A sample may come back with more of its tokens masked, several times, or not at
        all; denominators count the groups as they were.
        """
        return samples
