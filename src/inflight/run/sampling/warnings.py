"""Warnings for the user about dropped groups, failed episodes, biased training and inconsistent ages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inflight.rollouts.audit import BiasAudit, BiasComparison
from inflight.rollouts.driver_commands import DroppedItem
from inflight.rollouts.littles_law import LittlesLaw
from inflight.types import Group

_NUM_DROPPED = 24
"""The user is warned after this many dropped groups in a row, and each time that number has doubled."""

_WHY_STALE = "Their tokens are older than rollouts.max_lag allows: check whether the servers lag behind the trainer"
_WHY_FILTERED = "The composer rejects groups like the last one: see rollouts.composer."


@dataclass(slots=True)
class SamplingWarnings:
    """Counts problems with the sampling of a run, and warns the user of the first and whenever a count has doubled."""

    note: Callable[[str], None]
    num_dropped: Mapping[str, int]
    """Number of dropped groups in the whole run, by reason."""
    audit: BiasAudit = field(default_factory=BiasAudit)
    num_failed_episodes: Counter[str] = field(default_factory=Counter)
    """Number of failed episodes, by kind of failure."""
    _shown_reasons: set[str] = field(default_factory=set)
    """The reasons for which the user has already been shown an example."""
    _num_dropped_in_a_row: int = 0

    def drops(self) -> str:
        """Return the counts of dropped groups by reason, as the end of a sentence."""
        counts = sorted(self.num_dropped.items(), key=lambda item: -item[1])
        return "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in counts) if counts else ""

    def group_kept(self) -> None:
        self._num_dropped_in_a_row = 0

    def group_dropped(self, group: Group, reason: str) -> None:
        """Record a finished group that no step will use; warn if that happens many times in a row."""
        why = _WHY_FILTERED
        if reason == "stale":  # groups dropped for their rewards are expected to differ from trained ones
            self.group_settled(group, [False] * len(group.rollouts))
            why = _WHY_STALE
        if reason == "equal rewards":
            why = (
                f"All completions of the last one have the reward {group.rollouts[0].reward:g}, so there is no "
                "signal: check whether the task is too hard or too easy for the model, and whether its "
                "reward is correct"
            )
        self._count_drop(why)

    def item_dropped(self, item: DroppedItem) -> None:
        """Record an item that was dropped before it was scored; the first one for each reason is shown."""
        if item.reason not in self._shown_reasons:
            self._shown_reasons.add(item.reason)
            self.note(
                f"item {item.item} was dropped ({item.reason}): {item.what_happened}. The summary counts "
                "all items of this kind"
            )
        if item.reason == "stale":
            if item.lengths:
                self._show_bias(self.audit.settled(item.lengths, [False] * len(item.lengths)))
            self._count_drop(_WHY_STALE)

    def episode_failed(self, kind: str, what_happened: str) -> None:
        """Count an episode that is left out of its group; the first one of each kind is shown."""
        self.num_failed_episodes[kind] += 1
        if self.num_failed_episodes[kind] == 1:
            self.note(f"an episode failed ({kind}): {what_happened}. The summary counts all of this kind")

    def group_settled(self, group: Group, is_trained: Sequence[bool]) -> None:
        """Add a settled group to the audit; warn if training prefers some completions."""
        lengths = [rollout.num_sampled_tokens for rollout in group.rollouts]
        self._show_bias(self.audit.settled(lengths, is_trained, [rollout.reward for rollout in group.rollouts]))

    def check_littles_law(self, law: LittlesLaw) -> None:
        """Warn if ages and counts disagree."""
        terms = law.alarm()
        if terms is None or law.num_alarms.bit_count() != 1:
            return
        self.note(
            f"groups are {terms.age:.1f} steps old when they are settled, according to their versions, but by Little's "
            f"law they should be {terms.expected_age:.1f}: {terms.in_flight:.0f} in flight, {terms.queued:.0f} queued "
            f"and {terms.training:.0f} in training, of which {terms.left:.1f} leave per step; this is alarm "
            f"{law.num_alarms}. If they are older, servers lag behind the trainer; if younger, requests wait "
            "in an engine (lower servers.max_concurrent), or the ledger has groups that will never be settled"
        )

    def _count_drop(self, why: str) -> None:
        self._num_dropped_in_a_row += 1
        num_doublings, rest = divmod(self._num_dropped_in_a_row, _NUM_DROPPED)
        if rest == 0 and num_doublings.bit_count() == 1:
            self.note(f"the last {self._num_dropped_in_a_row} groups were dropped{self.drops()}. {why}")

    def _show_bias(self, found: Mapping[str, BiasComparison]) -> None:
        if not found or self.audit.num_alarms.bit_count() != 1:
            return
        what = "; ".join(
            f"the median {name} of trained completions is {it.median_trained:g}, and of those left out "
            f"{it.median_left_out:g} (Kolmogorov-Smirnov distance {it.distance:.2f}, p {it.p:.1g})"
            for name, it in found.items()
        )
        self.note(
            f"training prefers some completions to others: {what}. Completions are left out because they are older "
            f"than rollouts.max_lag allows; this is alarm {self.audit.num_alarms}. Raise rollouts.max_lag, or lower "
            "servers.max_concurrent, so that fewer groups are in flight"
        )
