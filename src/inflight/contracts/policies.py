"""Protocols for the policies of a run: staleness, scheduling, length prediction and batch composition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from inflight.contracts.scheduling import Decision, Event
from inflight.types import Group, Sample


@runtime_checkable
class StalenessPolicy(Protocol):
    """Decides which tokens and groups are too old to train on, and how many groups may be outstanding.

    Implementations are deterministic and do no I/O.
    """

    @abstractmethod
    def mask(self, token_versions: Sequence[int], trainer_version: int) -> Sequence[bool]:
        """Return, for each token of one completion, whether a step from ``trainer_version`` may train on it."""

    @abstractmethod
    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return how many groups may be in flight, or finished but not trained on, at the same time; at least 1.

        ``groups_per_step`` is an average. If no group is in flight and no step is ready, one more group is admitted.
        """

    def trainable(self, waiting: Sequence[int], oldest: int, groups_per_step: float) -> Sequence[bool]:
        """Return, for each waiting group, whether a step may include it; by default it may include all of them.

        Groups are numbered in the order in which they were offered, and ``waiting`` contains the numbers of the waiting
        groups. ``oldest`` is the number of the oldest group that is being sampled or scored, or of the next group to be
        offered if there is none. Groups before ``oldest`` must be allowed; otherwise training might never continue.
        """
        return [True] * len(waiting)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        """Return whether a completion whose first token was sampled by ``first_version`` may still be trained on.

        That is, whether `mask` may keep any of the completion's tokens, including tokens not yet sampled, in a step
        from ``trainer_version`` or a later version. The default is True. If the result is False for every completion of
        a group, the run stops sampling the group and drops it.
        """
        return True

    def after_step(self, version: int, effective_sample_size: float | None) -> None:
        """Update the policy after the step that produced ``version``. Raise `TrainerError` to stop the run.

        The default does nothing. ``effective_sample_size`` is a share between 0 and 1, computed from the step's
        importance ratios; it is None if the loss has no ratios.
        """
        return

    def state(self) -> dict[str, Any]:
        """Return the state that a later `restore` needs, as JSON values; empty by default."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. The run calls this before any other method."""
        return


@runtime_checkable
class Scheduler(Protocol):
    """Decides which completions run where and when.

    Implementations are deterministic and do no I/O: they use no clock, thread, file or unseeded randomness. The events
    that they receive and the decisions that they return are defined in `inflight.contracts.scheduling`. Live runs and
    the simulator use the same schedulers. A scheduler is constructed with ``group_size`` (completions per item),
    ``history`` (a `HistoryStore`, which the run fills), ``seed``, and parameters of its own.
    """

    surplus: float = 1.0
    """In conventional mode, the number of groups that may be offered for each group that a step needs."""

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Update the scheduler from an event. Events arrive in the order of their times."""

    @abstractmethod
    def num_wanted(self) -> int:
        """Return how many more items to offer now; the staleness policy may allow fewer."""

    @abstractmethod
    def decide(self, time_s: float) -> Sequence[Decision]:
        """Return the decisions to carry out now; empty if there is nothing to do until the next event.

        The scheduler must treat each returned decision as carried out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that a later `restore` needs, as JSON values.

        The state contains neither items nor endpoints, because the events that announce them are sent again."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. The run calls this before it sends the first event."""

    def metrics(self) -> Mapping[str, float]:
        """Return the scheduler's own metrics since the last call, and reset them; none by default.

        The run adds them to the metrics of the last step.
        """
        return {}


@runtime_checkable
class LengthPredictor(Protocol):
    """Predicts the length of the completions of a prompt. Implementations are deterministic and do no I/O."""

    @abstractmethod
    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        """Return the expected length in tokens, or None if there is no basis for a prediction.

        ``prompt`` identifies the prompt as in `inflight.contracts.scheduling.Offered`. ``finished`` contains the
        lengths of the group's finished completions.
        """


@runtime_checkable
class BatchComposer(Protocol):
    """Selects the finished groups of the next optimizer step. Implementations are deterministic and do no I/O."""

    @abstractmethod
    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        """Return the indices of the groups of a step, without duplicates, or an empty sequence to wait for more groups.

        ``groups`` contains the waiting groups, oldest first, and ``num_tokens[i]`` is the number of tokens of
        ``groups[i]`` that a step would train on. The run calls this again whenever a group arrives. Sampling pauses
        while a step is ready.
        """

    def accepts(self, group: Group) -> bool:
        """Return whether a finished group may be trained on; True by default.

        Rejected groups are dropped, and other items are sampled instead.
        """
        return True

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        """Return the samples that a step trains on, given the samples of its groups; by default all of them.

        ``version`` is the version that the step starts from. The result may omit samples, repeat them, or mask more of
        their tokens; the denominators of the loss are still computed from the original groups.
        """
        return samples
