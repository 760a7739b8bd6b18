"""The dispatcher: decides which item is offered, sent, continued, scored, trained on or dropped, and when. No I/O.

A driver reports what happens and when, and carries out the resulting commands:

    next_item, offer -> SendRequest -> request_ended -> ScoreGroup -> group_scored -> FinishedGroup
                                                                                          |
    settle <- ComposedStep, from the groups that wait <----- want_step -------------------+

The live run sends the requests to endpoints; a simulation computes when they would end. All decisions are made here and
in the policies, so that both make the same decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy
from inflight.contracts.scheduling import Finished, Issue, Offered, Returned, Scored, Withdrawn
from inflight.errors import CheckpointError, InvalidRequestError
from inflight.rollouts.driver_commands import (
    Command,
    DroppedItem,
    EndRun,
    Failure,
    Outbox,
    RequeuedItem,
    SampledTokens,
    ScoredGroup,
    ScoreGroup,
    SendRequest,
)
from inflight.rollouts.endpoint_slots import EndpointPool, EndpointSlots
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.ledger import Ledger
from inflight.rollouts.littles_law import LittlesLaw
from inflight.rollouts.open_groups import OpenGroup, all_whole
from inflight.rollouts.step_queue import StepQueue, StepRules
from inflight.types import Group

_MAX_TRIES = 3
"""Number of failed requests after which an item is dropped."""
_NUM_REFUSED = 32
"""Number of unusable items after which the run ends if no group has finished by then."""


class Dispatcher:
    """Makes the decisions of one run. Every method takes the time ``now``, which never decreases.

    After each call, the driver carries out what `take_commands` returns. While `has_news` is True, the driver also
    offers the items that `next_item` returns and calls `decide`, until `next_item` returns None and `decide` returns
    False.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        staleness: StalenessPolicy,
        composer: BatchComposer,
        history: HistoryStore,
        rules: StepRules,
        *,
        ledger: Ledger | None = None,
        version: int = 0,
        is_one_request: bool = True,
        knows_versions: bool = True,
        is_enough: Callable[[Sequence[Any]], bool] = all_whole,
        request_prefix: str = "",
    ) -> None:
        """``is_one_request``: whether completions of an item that are issued together are sent in one request.

        ``knows_versions``: whether requests begin with the version that was published last; if not, groups that seem
        too old are not stopped. ``is_enough`` returns whether a group can be scored. Request ids begin with
        ``request_prefix``, and must differ from those of other runs on the same endpoint.
        """
        self.scheduler = scheduler
        self.history = history
        self.ledger = Ledger() if ledger is None else ledger
        self._outbox = Outbox(scheduler)
        self.steps = StepQueue(self._outbox, self.ledger, staleness, composer, rules, LittlesLaw(version))
        self.endpoints = EndpointPool(self._outbox)
        self.open: dict[int, OpenGroup] = {}
        """Groups that are being sampled or scored, by item, in the order of offers."""
        self.num_resumed_tokens = 0
        """Number of tokens of aborted completions that were continued."""
        self._is_one_request = is_one_request
        self._is_enough = is_enough
        self._request_prefix = request_prefix
        self._stops_stale = knows_versions and type(staleness).can_train is not StalenessPolicy.can_train
        self._saved: dict[int, Sequence[SampledTokens | None]] = {}
        """By item, completions of restored groups until they are offered, and of finished groups until they settle."""
        self._recorded: set[int] = set()
        """Items whose rewards the history holds, until they are settled. Restored groups are scored again."""
        self._failed_requests: Counter[int] = Counter()
        """The number of failed requests of each item that has not been settled yet."""
        self._counts: Counter[str] = Counter()
        """Number of items that were offered, have finished, or were unusable."""

    @property
    def has_news(self) -> bool:
        """Whether something has happened since `decide` returned False."""
        return self._outbox.has_news

    def take_commands(self) -> list[Command]:
        """Return the commands that the driver must carry out, in order."""
        commands, self._outbox.commands = self._outbox.commands, []
        return commands

    # ------------------------------------------------------------------------------------------------- saved state

    def state(self, to_json: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the state that determines what is sampled next; ``to_json`` converts sampled tokens."""
        partial = {index: group.sampled for index, group in self.open.items()} | self._saved
        return {
            "ledger": self.ledger.to_json(),
            "scheduler": self.scheduler.state(),
            "staleness": self.steps.staleness.state(),
            "history": self.history.to_json(),
            "partials": {
                str(index): [None if one is None else to_json(one) for one in sampled]
                for index, sampled in partial.items()
                if any(one is not None for one in sampled)
            },
            "recorded": sorted(self._recorded),
        }

    def restore(self, state: Mapping[str, Any], from_json: Callable[[Any], SampledTokens]) -> None:
        """Continue from a state that `state` returned; missing parts start from scratch.

        The ledger is not restored: pass it to the constructor. Raises `CheckpointError`.
        """
        try:
            self._saved = {
                int(index): [None if one is None else from_json(one) for one in sampled]
                for index, sampled in state.get("partials", {}).items()
            }
            self._recorded = {*map(int, state.get("recorded", ()))}
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the unfinished groups in the checkpoint cannot be read: {error}") from error
        self.history.restore(state.get("history", {}))
        if "scheduler" in state:
            self.scheduler.restore(state["scheduler"])
        if "staleness" in state:
            self.steps.staleness.restore(state["staleness"])

    # ------------------------------------------------------------------------------------------------------- items

    @property
    def oldest(self) -> int:
        """Position, in the order of offers, of the oldest group being sampled or scored; if there is none, of the next
        group.
        """
        first = next(iter(self.open.values()), None)
        return self._counts["offered"] + 1 if first is None else first.serial

    def next_item(self) -> int | None:
        """Return an item to offer now; None if the scheduler wants none, or none is admitted."""
        if self.scheduler.num_wanted() <= 0 or not self.steps.may_offer(
            len(self.open), self.ledger.outstanding, self.oldest, self.scheduler.surplus
        ):
            return None
        self._counts["offered"] += 1
        return self.ledger.next_item()

    def offer(
        self, item: int, prompt: str, num_prompt_tokens: int, num_completions: int, content: Any, now: float
    ) -> None:
        """Offer an item that `next_item` returned. ``content`` is returned in the commands about it."""
        nothing = [None] * num_completions
        sampled = self._saved.pop(item, nothing)
        kept = [*(sampled if len(sampled) == num_completions else nothing)]
        group = OpenGroup(item, self._counts["offered"], now, prompt, num_prompt_tokens, content, kept, [*nothing])
        self.open[item] = group
        self._offer(group, now)

    def refuse_item(self, item: int, why: str, now: float, reason: str = "unusable") -> None:
        """Drop an item that can never be trained on."""
        self._drop_item(item, reason, why, now)
        self._counts["unusable"] += 1
        if self._counts["finished"] == 0 and (num := self._counts["unusable"]) >= _NUM_REFUSED:
            self._outbox.command(
                EndRun(f"none of the first {num} items can be used; the reason for the last one: {why}")
            )

    def return_item(self, item: int, now: float) -> None:
        """Return an item to the ledger, which issues it again: its group could not be offered or scored."""
        self.ledger.requeue(item)
        self._close(item, now)
        self._outbox.command(RequeuedItem(item))
        self._compose_if_ready(now)

    def _offer(self, group: OpenGroup, now: float) -> None:
        self._outbox.notify(Offered(now, group.item, group.prompt, group.num_prompt_tokens, group.num_tokens))
        for i, one in group.whole:
            self._outbox.notify(Finished(now, group.item, i, one.num_tokens))
        self._score_if_enough(group, now)

    def _drop_item(self, item: int, reason: str, what: str, now: float, lengths: tuple[int, ...] = ()) -> None:
        self._failed_requests.pop(item, None)
        self.ledger.drop(item, reason)
        self._outbox.command(DroppedItem(item, reason, what, lengths))
        self._close(item, now)
        self._compose_if_ready(now)

    def _close(self, item: int, now: float) -> None:
        """Remove an item, and stop its running requests."""
        if (group := self.open.pop(item, None)) is not None:
            self.endpoints.withdraw([*group.requests.values()], keeps_partials=False)
            if not group.is_withdrawn:
                self._outbox.notify(Withdrawn(now, item))

    # ---------------------------------------------------------------------------------------------------- requests

    def decide(self, now: float) -> bool:
        """Ask the scheduler for decisions once; return whether it made any."""
        decisions = self.scheduler.decide(now)
        aborted: list[SendRequest] = []
        for decision in decisions:
            group = self.open[decision.item]
            if isinstance(decision, Issue):
                self._issue(group, decision, now)
            else:
                numbers = {*decision.completions}
                aborted += [request for request in group.requests.values() if not numbers.isdisjoint(request.numbers)]
        if aborted:
            self.endpoints.stop(aborted)
        if decisions:
            return True
        self._outbox.has_news = False
        if self.steps.is_phase_ending and not self._is_anything_running():
            self.steps.end_phase(now)
        return False

    def _is_anything_running(self) -> bool:
        return any(slots.requests for slots in self.endpoints.slots.values()) or any(
            group.is_scoring for group in self.open.values()
        )

    def _issue(self, group: OpenGroup, issue: Issue, now: float) -> None:
        slots, completions, sampled = self.endpoints.slots.get(issue.endpoint), issue.completions, group.sampled
        if slots is None or slots.num_free < len(completions):
            raise InvalidRequestError(
                f"the scheduler issued {len(completions)} completions to {issue.endpoint}, which "
                + ("has left" if slots is None or not slots.takes_work else f"has {slots.num_free} free slots")
            )
        for i in completions:
            if group.is_scoring or group.sent_version[i] is not None or ((it := sampled[i]) and it.is_whole):
                raise InvalidRequestError(
                    f"the scheduler issued completion {i} of item {group.item}, which is running or has finished"
                )
        fresh = tuple([i for i in completions if sampled[i] is None])
        if fresh:
            for numbers in [fresh] if self._is_one_request else [(i,) for i in fresh]:
                self._send(slots, group, numbers, None, now)
        for i in completions:
            if (partial := sampled[i]) is not None:
                self.num_resumed_tokens += partial.num_tokens
                self._send(slots, group, (i,), partial, now)

    def _send(
        self,
        slots: EndpointSlots,
        group: OpenGroup,
        numbers: tuple[int, ...],
        partial: SampledTokens | None,
        now: float,
    ) -> None:
        assert slots.version is not None
        group.num_requests += 1
        if slots.name not in group.endpoints:
            group.endpoints.append(slots.name)
        for i in numbers:
            # A request that is sent during an update may begin with the next version.
            group.sent_version[i] = slots.version + (not slots.keeps_partials)
        request_id = f"{self._request_prefix}item-{group.item}-{group.serial}-{group.num_requests}"
        request = SendRequest(request_id, group.item, group.content, numbers, slots.name, partial)
        group.requests[request_id] = request
        self.endpoints.hold(request, slots, now)

    def note_first_version(self, request: SendRequest, version: int) -> None:
        """Record that the request just sent continues an episode whose first token was sampled by ``version``."""
        for i in request.numbers:
            self.open[request.item].sent_version[i] = version

    def request_ended(
        self, request: SendRequest, sampled: Sequence[SampledTokens], now: float, failure: Failure | None = None
    ) -> None:
        """Record the end of a request.

        ``sampled`` has the tokens of each completion, and is empty if the request failed.

        Unfinished completions may be issued again. An item without any tokens returns to the ledger; an item that
        caused the failure, or whose requests fail repeatedly, is dropped.
        """
        self._outbox.has_news = True
        slots = self.endpoints.release(request, now)
        group = self.open.get(request.item)
        if group is not None and group.requests.pop(request.request_id, None) is not None and not group.is_scoring:
            if failure is None:
                self._keep(group, request, sampled, slots, now)
            else:
                self._request_failed(group, request, slots, failure, now)
        self.endpoints.forget_if_idle(slots, now)

    def _request_failed(
        self, group: OpenGroup, request: SendRequest, slots: EndpointSlots, failure: Failure, now: float
    ) -> None:
        item = group.item
        if failure.fault == "item":
            self.refuse_item(item, failure.message, now)
            return
        if failure.fault == "driver":
            self.return_item(item, now)
            return
        # When an endpoint fails, only the request that failed first is charged: `lose` stops the others.
        self._failed_requests[item] += failure.fault == "request" or slots.version is not None
        if failure.fault == "endpoint":
            self.endpoints.lose(slots.name, failure.message, now)
        if self._failed_requests[item] >= _MAX_TRIES:
            where = f"{slots.name}: " if failure.fault == "endpoint" else ""
            self._drop_item(item, "failed", f"{where}{failure.message} ({_MAX_TRIES} tries)", now)
        else:
            self._keep(group, request, (), slots, now)

    def _keep(
        self,
        group: OpenGroup,
        request: SendRequest,
        sampled: Sequence[SampledTokens],
        slots: EndpointSlots,
        now: float,
    ) -> None:
        if not slots.keeps_partials and not all(one.is_whole for one in sampled):
            sampled = ()  # repeat all of them: keeping only the finished ones would favour short completions
        for i, new in zip(request.numbers, sampled, strict=False):
            if new.num_tokens or new.is_whole:
                group.sampled[i] = new
            else:
                group.sent_version[i] = None
        if group.is_withdrawn:
            self._drop_or_offer(group, now)
            return
        if not group.has_part:
            self.return_item(group.item, now)
            return
        for i in request.numbers:
            group.sent_version[i] = None
            one = group.sampled[i]
            num_tokens = 0 if one is None else one.num_tokens
            if one is not None and one.is_whole:
                self._outbox.notify(Finished(now, group.item, i, num_tokens))
            else:
                self._outbox.notify(Returned(now, group.item, i, num_tokens))
        self._score_if_enough(group, now)

    # ----------------------------------------------------------------------------------------------------- scoring

    def _score_if_enough(self, group: OpenGroup, now: float) -> None:
        """Have a group scored if it has enough completions, and stop its other requests."""
        if not self._is_enough(group.sampled):
            return
        group.is_scoring = True
        for i, one in enumerate(group.sampled):
            if one is None:
                self._outbox.notify(Finished(now, group.item, i, 0))
        self._outbox.command(ScoreGroup(group.item, group.content, [one for _, one in group.whole]))
        self.endpoints.withdraw([*group.requests.values()], keeps_partials=False)

    def group_scored(self, item: int, scored: ScoredGroup, now: float) -> None:
        """Record the rewards of a group; the item of a group that has no rollouts left is dropped."""
        if not scored.rollouts:
            self.refuse_item(item, "; ".join(what for _, what in scored.failures[:1]), now, "failed episodes")
            return
        opened = self.open.pop(item)
        self._counts["finished"] += 1
        self._failed_requests.pop(item, None)
        self.ledger.finish(item)
        self._saved[item] = opened.sampled
        if is_new := item not in self._recorded:
            self._recorded.add(item)
            self.history.record(opened.prompt, scored.lengths, scored.rewards, scored.completions)
        self._outbox.notify(Scored(now, item, opened.prompt, scored.lengths, scored.rewards))
        group = Group(opened.serial, item, scored.rollouts, ",".join(opened.endpoints))
        self.steps.admission.scored(now - opened.offered_at)
        self.steps.add(group, scored.num_rewritten, now, is_new=is_new)
        self._compose_if_ready(now)

    # ------------------------------------------------------------------------------------------------------- steps

    def want_step(self, version: int, now: float) -> None:
        """Collect groups for the step that starts from ``version``, and drop those that are too old for it.

        In conventional mode the groups of a whole phase are collected, and nothing is offered outside a phase.
        """
        self.steps.version = version
        self.steps.drop_stale(now)
        if self._stops_stale:
            self._stop_stale(now)
        self.steps.want(version, self.oldest, now)
        self._compose_if_ready(now)

    def settle(self, groups: Sequence[Group], now: float) -> None:
        """Record that a step has trained on these groups."""
        num_issued = sum([group.has_part for group in self.open.values()])
        self.steps.settle(groups, len(self.open), num_issued, now)
        self._saved = {item: sampled for item, sampled in self._saved.items() if not self.ledger.is_settled(item)}
        self._recorded = {item for item in self._recorded if not self.ledger.is_settled(item)}

    def _compose_if_ready(self, now: float) -> None:
        self.steps.compose_if_ready(self.oldest, now)

    def _stop_stale(self, now: float) -> None:
        """Stop the unfinished groups in which every completion began with a version that is too old to be trained on.

        A completion may begin long after its request was sent; the version of its first token is then known only when
        the request ends. A group that turns out to be young enough is continued if its endpoint keeps the tokens of
        aborted requests.
        """
        stale = [
            group
            for group in self.open.values()
            if not (group.is_withdrawn or group.is_scoring) and group.is_stale(self._can_train)
        ]
        stopped = [request for group in stale for request in group.requests.values()]
        for group in stale:
            group.is_withdrawn = True
            self._outbox.notify(Withdrawn(now, group.item))
        self.endpoints.withdraw(stopped)
        for group in stale:
            self._drop_or_offer(group, now)

    def _drop_or_offer(self, group: OpenGroup, now: float) -> None:
        """Drop a withdrawn group, or offer it again, once all its requests have ended."""
        if group.requests:
            return
        if not group.is_stale(self._can_train):
            group.is_withdrawn = False
            group.sent_version = [None] * len(group.sampled)
            self._offer(group, now)
            return
        known = [version for version in group.first_versions if version is not None]
        if known:
            self.steps.law.left(min(known), is_trained=False)
        what = "the first tokens of all its completions are older than rollouts.max_lag allows"
        lengths = group.num_tokens if None not in group.sampled else ()
        self._drop_item(group.item, "stale", what, now, lengths)

    def _can_train(self, first_version: int) -> bool:
        return self.steps.staleness.can_train(first_version, self.steps.version)
