"""The actor: offers items to a scheduler, samples what it issues, scores groups and hands them on.

Endpoints get work while `Actor.serve` names them. A refused request costs only its item; so does one that is too slow
on a healthy endpoint. Knows nothing of trainers, and decides nothing that a scheduler decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from inflight.contracts import InferenceEndpoint, Scheduler
from inflight.contracts.scheduling import (
    Abort,
    Decision,
    Event,
    Finished,
    Issue,
    Joined,
    Left,
    Offered,
    Published,
    Returned,
    Scored,
    Settled,
    StepReady,
    StepWanted,
    Withdrawn,
)
from inflight.errors import CheckpointError, EndpointError, InflightError, TaskError
from inflight.rollouts import HistoryStore, Ledger
from inflight.rollouts.slots import SlotAccount
from inflight.run.sampling.open_group import DroppedItem, OpenGroup, Running
from inflight.run.sampling.seats import Seat, SlowRequest, UnusableItem
from inflight.run.sampling.work import Order, Sampled, ScoredGroup, Work
from inflight.types import Group
from inflight.wire import Capabilities, Completion, DraftCounts

T = TypeVar("T")

_MAX_TRIES = 3
"""After this many failed requests an item is dropped."""
_ABORT_AGAIN_S = 1.0
"""How long an aborted request may take to come back before it is aborted again."""
_NUM_REFUSED = 32
"""The run ends after this many unusable prompts if no group has finished by then."""


@dataclass(eq=False)
class Actor:
    """Offers items while ``may_issue()`` allows and the scheduler wants them, and settles each in the ledger.

    ``on_end`` is called when a group has ended: with the finished group, with the item if it was dropped, or with None
    if it will be issued again. An item is dropped if it can never be trained on, if an endpoint refuses it, if it fails
    repeatedly, or if too many of its episodes fail.
    """

    work: Work
    ledger: Ledger
    scheduler: Scheduler
    history: HistoryStore
    _: KW_ONLY
    seed: int
    may_issue: Callable[[], bool]
    on_end: Callable[[Group | DroppedItem | None], None]
    on_failed_episode: Callable[[int, str, str], None] = lambda item, kind, what_happened: None
    """Called with the item, a word to count by, and what happened."""
    on_request: Callable[[Running, Sequence[Sampled], str | None], None] = lambda request, sampled, error: None
    """Called when a request has ended, with what it brought and why it failed."""
    clock: Callable[[], float] = time.monotonic
    saved: dict[int, Sequence[Sampled | None]] = field(default_factory=dict)
    """Completions of unfinished groups, whole or in part, from an earlier life of the run; by item."""
    num_resumed_tokens: int = field(default=0, init=False)
    """Tokens of aborted completions that were continued."""
    num_rewritten: int = field(default=0, init=False)
    """Conversations that went on from another rendering of their past, as another rollout."""
    slots: SlotAccount = field(default_factory=SlotAccount, init=False)
    """A completion holds its slot until the request that it belongs to has ended."""
    lost: dict[str, str] = field(default_factory=dict, init=False)
    """Endpoints that get no work because they failed, with the reason."""
    unserved: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no endpoint gets work, from the first loss on."""
    _drafted: list[DraftCounts] = field(default_factory=list, init=False)
    _seats: list[Seat] = field(default_factory=list, init=False)
    _open: dict[int, OpenGroup] = field(default_factory=dict, init=False)
    """Groups that are being sampled or scored, by item."""
    _beside: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    """Calls that score a group, or abort requests."""
    _to_abort: dict[asyncio.Task[Any], Running] = field(default_factory=dict, init=False)
    """Requests that the next turn of the loop aborts, in one call for each endpoint."""
    _num_failures: Counter[int] = field(default_factory=Counter, init=False)
    """Failed requests of each item that is not settled yet."""
    _num_offered: int = field(default=0, init=False)
    _num_finished: int = field(default=0, init=False)
    _num_unusable: int = field(default=0, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    quiet: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while nothing is sampled or scored, and nothing may be issued."""
    _failure: BaseException | None = field(default=None, init=False)
    _can_train: Callable[[int], bool] = field(default=lambda _: True, init=False)
    """As `drop_stale` was told last, for groups that are given up."""

    @property
    def num_running(self) -> int:
        """Groups that are being sampled or scored."""
        return len(self._open)

    @property
    def num_issued(self) -> int:
        """Those of them of which something is or was sampled."""
        return sum(group.has_part for group in self._open.values())

    @property
    def oldest(self) -> int:
        """Number, in the order of offers, of the oldest group that is sampled or scored, or else of the next one."""
        first = next(iter(self._open.values()), None)  # in the order of offers
        return self._num_offered + 1 if first is None else first.serial

    def partials(self) -> dict[str, Any]:
        """Return what is there of unfinished groups, as JSON values, for `continue_from`."""
        open_groups = {index: group.sampled for index, group in self._open.items()} | self.saved
        return {
            str(index): [None if one is None else one.model_dump(mode="json") for one in sampled]
            for index, sampled in open_groups.items()
            if any(one is not None for one in sampled)
        }

    def continue_from(self, data: Mapping[str, Any]) -> None:
        """Go on with unfinished groups as `partials` gave them; those of another size are sampled anew.

        Raises `CheckpointError` if they cannot be read.
        """
        try:
            parsed = {
                int(index): [None if one is None else self.work.parse(one) for one in sampled]
                for index, sampled in data.items()
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the unfinished groups in the checkpoint cannot be read: {error}") from error
        self.saved = {index: sampled for index, sampled in parsed.items() if len(sampled) == self.work.size}

    def take_drafted(self) -> DraftCounts:
        """Return what endpoints have counted of drafts since the last call."""
        total = sum(self._drafted, DraftCounts())
        self._drafted.clear()
        return total

    def wake(self) -> None:
        """Look again what may be offered and issued."""
        self._changed.set()
        self.quiet.clear()

    # ------------------------------------------------------------------------------------------------- endpoints

    def add(self, endpoint: InferenceEndpoint, limit: int, declared: Capabilities | None = None) -> None:
        """Add an endpoint that runs up to ``limit`` sequences at a time; it gets work once `serve` names it."""
        if declared is not None:
            limit = min(limit, declared.max_concurrent_sequences)
        capacity = max(limit, self.work.size if self.work.is_one_request else 1)
        self._seats.append(Seat(endpoint, capacity, declared, drafted=self._drafted))
        self._note_slots(self._seats[-1])

    def retire(self, name: str, on_idle: Callable[[], None], *, hands_on: bool = False) -> None:
        """Give an endpoint no more work. Once its requests have ended, forget it and call ``on_idle``.

        With ``hands_on`` its requests are ended, and what they have sampled goes on elsewhere, where that is possible.
        """
        for seat in [seat for seat in self._seats if seat.name == name]:
            self._close(seat)
            seat.on_idle = on_idle
            if hands_on:
                for group in self._open.values():
                    for request, running in group.requests.items():
                        if running.seat is seat:
                            self._abort(request, running)
            self._note_slots(seat)
            self._forget_if_idle(seat)
        self._note_whether_unserved()

    def serve(self, names: Collection[str], version: int) -> None:
        """Give work to these endpoints, which ``version`` was published to, and to no others."""
        for seat in self._seats:
            if seat.name in names:
                took_work, seat.version = seat.takes_work, version
                self._note_slots(seat)
                self.lost.pop(seat.name, None)
                if seat.takes_work and not took_work:
                    self.scheduler.tell(Joined(self.clock(), seat.name, seat.capacity, self._keeps_partials(seat)))
            else:
                self.lose(seat.name, f"it could not be brought to version {version}")
        self.scheduler.tell(Published(self.clock(), version))
        self._note_whether_unserved()

    def lose(self, name: str, reason: str) -> None:
        """Give an endpoint no work until `serve` names it again; what ran there is issued again elsewhere."""
        for seat in self._seats:
            if seat.name == name:
                self.lost.setdefault(name, reason)
                for running in seat.running if seat.version is not None else ():
                    running.cancel()
                self._close(seat)
                seat.version = None
                self._note_slots(seat)
        self._note_whether_unserved()

    def _keeps_partials(self, seat: Seat) -> bool:
        return seat.keeps_partials and self.work.is_one_request

    def _close(self, seat: Seat) -> None:
        if seat.takes_work:
            self.scheduler.tell(Left(self.clock(), seat.name))

    def slots_now(self) -> tuple[int, int]:
        """Return the slots of the endpoints that take work, and how many of them are free."""
        seats = [seat for seat in self._seats if seat.takes_work]
        num_slots = sum(seat.capacity for seat in seats)
        return num_slots, num_slots - sum(seat.num_running for seat in seats)

    def _note_slots(self, seat: Seat) -> None:
        self.slots.note(self.clock(), seat.name, seat.capacity, seat.num_running, takes_work=seat.takes_work)

    def _note_whether_unserved(self) -> None:
        if any(seat.takes_work for seat in self._seats):
            self.unserved.clear()
        else:
            self.unserved.set()
        self.wake()

    def _forget_if_idle(self, seat: Seat) -> None:
        if seat.on_idle is not None and not seat.running and seat in self._seats:
            self._seats.remove(seat)
            self.slots.forget(self.clock(), seat.name)
            self.lost.pop(seat.name, None)
            seat.on_idle()

    # ----------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Offer and issue until cancelled. Raises `TaskError` if task or reward fail, and what ``on_end`` raises."""
        try:
            while self._failure is None:
                self._changed.clear()
                self._send_aborts()
                await self._offer_and_issue()
                if not (self._changed.is_set() or self._beside or any(seat.running for seat in self._seats)):
                    self.quiet.set()
                await self._changed.wait()
            raise self._failure
        finally:
            running = [*self._beside, *(task for seat in self._seats for task in seat.running)]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.work.aclose()

    async def _offer_and_issue(self) -> None:
        while self._failure is None:
            while self._failure is None and self.scheduler.num_wanted() > 0 and self.may_issue():
                self._offer()
                await asyncio.sleep(0)  # tasks make prompts, which may take long
            decisions = self.scheduler.decide(self.clock())
            for decision in decisions:
                self._carry_out(decision)
            self._send_aborts()
            if not decisions:
                return

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.wake()

    def _tell(self, event: Event) -> None:
        self.scheduler.tell(event)
        self.wake()

    def settled(self, item: int, *, is_trained: bool) -> None:
        """Tell the scheduler what became of a finished group."""
        self._tell(Settled(self.clock(), item, is_trained))

    def step_wanted(self, version: int, num_groups: int) -> None:
        """Tell the scheduler that the run collects groups for the step that starts from ``version``."""
        self._tell(StepWanted(self.clock(), version, num_groups))

    def step_ready(self, version: int) -> None:
        """Tell the scheduler that the step which starts from ``version`` has enough groups."""
        self._tell(StepReady(self.clock(), version))

    def drop_stale(self, can_train: Callable[[int], bool]) -> None:
        """End the unfinished groups of which no completion can be trained on, by the version of its first token.

        Where a completion began after its request was sent is only known once it is back. A group that turns out to be
        young enough is sampled further, if its endpoint keeps what was aborted.
        """
        for group in [*self._open.values()]:
            if group.is_given_up or group.is_scoring or not group.is_stale(can_train):
                continue
            group.is_given_up = True
            self._can_train = can_train
            self._tell(Withdrawn(self.clock(), group.item.index))
            for request, running in [*group.requests.items()]:
                self._abort(request, running)
            self._drop_if_stale(group)

    def _drop_if_stale(self, group: OpenGroup) -> None:
        """Decide what becomes of a group that is given up, once all its requests have ended."""
        if group.requests:
            return
        index = group.item.index
        if group.is_stale(self._can_train):
            lengths = [one.num_tokens for one in group.sampled if one is not None]
            what = "the first tokens of all its completions are older than rollouts.max_lag allows"
            known = [version for version in group.first_versions if version is not None]
            whole = tuple(lengths) if len(lengths) == self.work.size else ()
            self._drop(index, "stale", what, whole, min(known, default=None))
            return
        group.is_given_up = False
        group.begun = [None] * self.work.size
        self._tell_offered(group)

    def _offer(self) -> None:
        """Take the next item from the ledger, render its prompt, and offer it; drop it if it can never be trained."""
        index = self.ledger.next_item()
        self._num_offered += 1
        try:
            item = self.work.item(index)
            prompt_token_ids = self.work.prompt_of(item)
        except BaseException as error:
            self.ledger.requeue(index)
            self._fail(error)
            return
        if (why := self.work.too_long(prompt_token_ids)) is not None:
            self._unusable(index, why)
            return
        prompt = hashlib.blake2b(repr(prompt_token_ids).encode(), digest_size=12).hexdigest()
        sampled = list(self.saved.pop(index, (None,) * self.work.size))
        begun: list[int | None] = [None] * self.work.size
        group = self._open[index] = OpenGroup(item, self._num_offered, prompt_token_ids, prompt, sampled, begun)
        self._tell_offered(group)

    def _tell_offered(self, group: OpenGroup) -> None:
        """Offer a group with what is there of it."""
        index, num_tokens = group.item.index, tuple(0 if one is None else one.num_tokens for one in group.sampled)
        self._tell(Offered(self.clock(), index, group.prompt, len(group.prompt_token_ids), num_tokens))
        for i, one in group.whole:
            self._tell(Finished(self.clock(), index, i, one.num_tokens))
        self._score_if_enough(group)

    # ----------------------------------------------------------------------------------------------------- requests

    def _carry_out(self, decision: Decision) -> None:
        group = self._open[decision.item]
        match decision:
            case Issue(endpoint, _, completions):
                seat = next(seat for seat in self._seats if seat.name == endpoint)
                fresh = tuple(i for i in completions if group.sampled[i] is None)
                for numbers in [fresh] if self.work.is_one_request and fresh else [(i,) for i in fresh]:
                    self._issue(seat, group, numbers)
                for i in completions:
                    if isinstance(partial := group.sampled[i], Completion):
                        self._issue(seat, group, (i,), partial)
            case Abort(_, completions):
                for request, running in group.requests.items():
                    if {*running.order.numbers} & {*completions}:
                        self._abort(request, running)

    def _issue(self, seat: Seat, group: OpenGroup, numbers: tuple[int, ...], partial: Completion | None = None) -> None:
        """Sample completions of a group in one request, or the rest of ``partial``, or play an episode."""
        group.num_requests += 1
        if seat.name not in group.endpoints:
            group.endpoints.append(seat.name)
        index = group.item.index
        for i in numbers:
            # A request that is sent during an update may begin with the next version.
            group.begun[i] = None if seat.version is None else seat.version + (not seat.keeps_partials)
            if (kept := self.work.first_version(index, i)) is not None:
                group.begun[i] = kept
        parts = () if len(numbers) == self.work.size else (numbers[0],)
        order = Order(
            f"item-{index}-{group.serial}-{group.num_requests}",
            group.item,
            group.prompt_token_ids,
            numbers,
            seed_of(self.seed, index, *parts),
            partial,
        )
        if partial is not None:
            self.num_resumed_tokens += partial.num_tokens
        request = asyncio.ensure_future(self.work.sample(seat, order))
        seat.running.add(request)
        seat.num_running += len(numbers)
        self._note_slots(seat)
        running = group.requests[request] = Running(seat, order, time.time())

        def ended(request: asyncio.Task[Sequence[Sampled]]) -> None:
            seat.running.discard(request)
            seat.num_running -= len(numbers)
            self._note_slots(seat)
            del group.requests[request]
            self._settling(lambda: self.on_request(running, *_outcome(request)))
            if self._open.get(index) is group and not group.is_scoring:  # not if the item has been settled meanwhile
                self._settling(lambda: self._request_ended(group, running, request))
            self._forget_if_idle(seat)
            self.wake()

        request.add_done_callback(ended)

    def _abort(self, request: asyncio.Task[Any], running: Running) -> None:
        """End a request with what it has, or without that if the endpoint cannot do it."""
        if self._keeps_partials(running.seat):
            self._to_abort[request] = running
            self.wake()
        else:
            request.cancel()

    def _send_aborts(self) -> None:
        by_seat: dict[Seat, dict[asyncio.Task[Any], str]] = {}
        for request, running in self._to_abort.items():
            by_seat.setdefault(running.seat, {})[request] = running.order.request_id
        self._to_abort.clear()
        for seat, requests in by_seat.items():
            self._run_beside(_aborted(seat, requests), lambda _: None)

    def _run_beside(self, call: Coroutine[Any, Any, T], on_end: Callable[[asyncio.Task[T]], None]) -> None:
        task = asyncio.ensure_future(call)
        self._beside.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._beside.discard(task)
            self._settling(lambda: on_end(task))
            self.wake()

        task.add_done_callback(ended)

    def _settling(self, settle: Callable[[], None]) -> None:
        try:
            settle()
        except Exception as error:  # a full disk, say
            self._fail(error)

    def _request_ended(self, group: OpenGroup, running: Running, request: asyncio.Task[Sequence[Sampled]]) -> None:
        """Decide what the end of a request means for its item, its endpoint and the run."""
        index, seat = group.item.index, running.seat
        error = None if request.cancelled() else request.exception()
        if error is None:
            self._take(group, running, () if request.cancelled() else request.result())
        elif isinstance(error, UnusableItem):
            self._unusable(index, str(error))
        elif not isinstance(error, EndpointError | SlowRequest):
            self._requeue(group)
            self._fail(error)
        else:
            # When an endpoint fails, only the request that failed first is charged: `lose` cancels the others.
            self._num_failures[index] += isinstance(error, SlowRequest) or seat.version is not None
            if isinstance(error, EndpointError):
                self.lose(seat.name, error.message)
            if self._num_failures[index] >= _MAX_TRIES:
                self._drop(index, "failed", f"{error} ({_MAX_TRIES} tries)")
            else:
                self._take(group, running, ())

    def _take(self, group: OpenGroup, running: Running, sampled: Sequence[Sampled]) -> None:
        """Keep what a request has sampled; what is not whole may be issued again.

        If nothing is left of the item, it goes back to the ledger.
        """
        numbers = running.order.numbers
        if not self._keeps_partials(running.seat) and any(not one.is_whole for one in sampled):
            sampled = ()  # the whole request begins anew: keeping what was short enough would prefer short completions
        for i, new in zip(numbers, sampled, strict=False):
            if new.num_tokens or new.is_whole:
                group.sampled[i] = new
            else:
                group.begun[i] = None
        if group.is_given_up:
            self._drop_if_stale(group)
            return
        if not group.has_part:
            self._requeue(group)
            return
        now, index = self.clock(), group.item.index
        for i in numbers:
            one = group.sampled[i]
            num_tokens = 0 if one is None else one.num_tokens
            is_whole = one is not None and one.is_whole
            group.begun[i] = None
            self._tell(Finished(now, index, i, num_tokens) if is_whole else Returned(now, index, i, num_tokens))
        self._score_if_enough(group)

    def _score_if_enough(self, group: OpenGroup) -> None:
        """Score a group that has all that it needs, and give up what still runs of it."""
        if not self.work.is_enough(group.sampled):
            return
        group.is_scoring = True
        self.work.forget(group.item.index)
        for request in group.requests:
            request.cancel()
        sampled = [one for _, one in group.whole]
        for i, one in enumerate(group.sampled):
            if one is None:
                self._tell(Finished(self.clock(), group.item.index, i, 0))
        self._run_beside(
            self.work.score(group.item, group.prompt_token_ids, sampled),
            lambda scored: self._group_scored(group, scored),
        )

    def _group_scored(self, group: OpenGroup, scored: asyncio.Task[ScoredGroup]) -> None:
        index = group.item.index
        error = None if scored.cancelled() else scored.exception()
        if scored.cancelled() or error is not None:
            self._requeue(group)
            if error is not None:
                self._fail(error)
            return
        outcome = scored.result()
        for kind, what_happened in outcome.failures:
            self.on_failed_episode(index, kind, what_happened)
        if not outcome.rollouts:
            self._unusable(index, "; ".join(what for _, what in outcome.failures[:1]), "failed episodes")
            return
        self._num_finished += 1
        self.num_rewritten += outcome.num_rewritten
        self._num_failures.pop(index, None)
        self.ledger.finish(index)
        del self._open[index]
        self.history.record(group.prompt, outcome.lengths, outcome.rewards, outcome.completions)
        self._tell(Scored(self.clock(), index, group.prompt, outcome.lengths, outcome.rewards))
        self.on_end(Group(group.serial, index, outcome.rollouts, ",".join(group.endpoints)))

    # -------------------------------------------------------------------------------------------------------- items

    def _unusable(self, index: int, why: str, reason: str = "unusable") -> None:
        self._num_unusable += 1
        if self._num_finished == 0 and self._num_unusable >= _NUM_REFUSED:
            self._fail(TaskError(f"none of the first {self._num_unusable} items can be used; the last: {why}"))
        self._drop(index, reason, why)

    def _drop(
        self,
        index: int,
        reason: str,
        what_happened: str,
        lengths: tuple[int, ...] = (),
        first_version: int | None = None,
    ) -> None:
        self._num_failures.pop(index, None)
        self.work.forget(index)
        self.ledger.drop(index, reason)
        self._withdraw(index)
        self.on_end(DroppedItem(index, reason, what_happened, lengths, first_version))

    def _requeue(self, group: OpenGroup) -> None:
        self.ledger.requeue(group.item.index)
        self._withdraw(group.item.index)
        self.on_end(None)

    def _withdraw(self, index: int) -> None:
        """Forget an item, and end what still runs of it."""
        group = self._open.pop(index, None)
        if group is not None:
            for request in group.requests:
                request.cancel()
            if not group.is_given_up:
                self._tell(Withdrawn(self.clock(), index))


async def _aborted(seat: Seat, requests: Mapping[asyncio.Task[Any], str]) -> None:
    """Abort requests of one endpoint by their ids, and return once they have ended."""
    try:
        while ids := tuple(request_id for request, request_id in requests.items() if not request.done()):
            await seat.abort(ids)
            # A call can overtake a request that it is to end, and is then ignored.
            await asyncio.wait(requests, timeout=_ABORT_AGAIN_S)
    except InflightError:
        for request in requests:
            request.cancel()


def _outcome(request: asyncio.Task[Sequence[Sampled]]) -> tuple[Sequence[Sampled], str | None]:
    """Return what a request brought, and why it failed."""
    if request.cancelled():
        return (), "cancelled"
    error = request.exception()
    return ((), str(error)) if error is not None else (request.result(), None)


def seed_of(seed: int, index: int, *parts: int) -> int:
    """Return a seed for one item of one run, or for a part of it; it does not depend on the order of the items."""
    text = ":".join(map(str, (seed, index, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
