"""The actor: offers items to a scheduler, samples what it issues, scores groups and hands them on.

Endpoints get work while `Actor.serve` names them. A refused request costs only its item; so does one that is too slow
on a healthy endpoint. Knows nothing of trainers, and decides nothing that a scheduler decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from inflight.contracts import InferenceEndpoint, Scheduler
from inflight.errors import EndpointError, TaskError
from inflight.pipeline.scoring import Scoring
from inflight.pipeline.seats import Seat, SlowRequest, UnusableItem
from inflight.rollouts import Ledger
from inflight.scheduling import (
    Abort,
    Decision,
    Event,
    Finished,
    Issue,
    Joined,
    Left,
    Offered,
    Returned,
    Scored,
    Settled,
    Withdrawn,
)
from inflight.types import Group, Rollout, TaskItem
from inflight.wire import Completion, SamplingParams

_MAX_TRIES = 3
"""After this many failed requests an item is dropped."""
_NUM_REFUSED = 32
"""The run ends after this many unusable prompts if no group has finished by then."""


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that the actor gave up before it had all its completions."""

    index: int
    reason: str
    """``unusable`` or ``failed``, as the ledger counts it."""
    what_happened: str


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """An item that was offered and is not scored yet. Lists have one entry per completion."""

    item: TaskItem
    serial: int
    prompt_token_ids: tuple[int, ...]
    prompt: str
    """Digest of the prompt, by which schedulers know it."""
    done: list[Completion | None]
    requests: dict[asyncio.Task[Any], tuple[int, ...]] = field(default_factory=dict)
    endpoints: list[str] = field(default_factory=list)
    num_requests: int = 0

    @property
    def has_part(self) -> bool:
        """Whether something of it has been sampled or is being sampled."""
        return bool(self.requests) or any(completion is not None for completion in self.done)


@dataclass(eq=False)
class Actor:
    """Offers items while ``may_issue()`` allows and the scheduler wants them, and settles each in the ledger.

    ``on_end`` is called when a group has ended: with the finished group, with the item if it was dropped, or with None
    if it will be issued again. An item is dropped if its prompt and completion together may exceed
    ``max_sequence_tokens``, if an endpoint refuses it, or if it fails repeatedly.
    """

    scoring: Scoring
    sampling: SamplingParams
    ledger: Ledger
    scheduler: Scheduler
    _: KW_ONLY
    seed: int
    max_sequence_tokens: int
    may_issue: Callable[[], bool]
    on_end: Callable[[Group | DroppedItem | None], None]
    clock: Callable[[], float] = time.monotonic
    lost: dict[str, str] = field(default_factory=dict, init=False)
    """Endpoints that get no work because they failed, with the reason."""
    unserved: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no endpoint gets work, from the first loss on."""
    _seats: list[Seat] = field(default_factory=list, init=False)
    _open: dict[int, _OpenGroup] = field(default_factory=dict, init=False)
    """Groups that are being sampled or scored, by item."""
    _scored: set[asyncio.Task[list[float]]] = field(default_factory=set, init=False)
    """Calls that score a group."""
    _num_failures: Counter[int] = field(default_factory=Counter, init=False)
    """Failed requests of each item that is not settled yet."""
    _num_offered: int = field(default=0, init=False)
    _num_finished: int = field(default=0, init=False)
    _num_unusable: int = field(default=0, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: BaseException | None = field(default=None, init=False)

    @property
    def num_running(self) -> int:
        """Groups that are being sampled or scored."""
        return len(self._open)

    def wake(self) -> None:
        """Look again what may be offered and issued."""
        self._changed.set()

    # ------------------------------------------------------------------------------------------------- endpoints

    def add(self, endpoint: InferenceEndpoint, limit: int) -> None:
        """Add an endpoint that runs ``limit`` sequences at a time; it gets work once `serve` names it."""
        self._seats.append(Seat(endpoint, max(limit, self.sampling.n)))

    def retire(self, name: str, on_idle: Callable[[], None]) -> None:
        """Give an endpoint no more work. Once its requests have ended, forget it and call ``on_idle``."""
        for seat in [seat for seat in self._seats if seat.name == name]:
            self._close(seat)
            seat.on_idle = on_idle
            self._forget_if_idle(seat)
        self._note_whether_unserved()

    def serve(self, names: Collection[str], version: int) -> None:
        """Give work to these endpoints, which ``version`` was published to, and to no others."""
        for seat in self._seats:
            if seat.name in names:
                took_work, seat.version = seat.takes_work, version
                self.lost.pop(seat.name, None)
                if seat.takes_work and not took_work:
                    self.scheduler.tell(Joined(self.clock(), seat.name, seat.capacity))
            else:
                self.lose(seat.name, f"it could not be brought to version {version}")
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
        self._note_whether_unserved()

    def _close(self, seat: Seat) -> None:
        if seat.takes_work:
            self.scheduler.tell(Left(self.clock(), seat.name))

    def _note_whether_unserved(self) -> None:
        if any(seat.takes_work for seat in self._seats):
            self.unserved.clear()
        else:
            self.unserved.set()
        self.wake()

    def _forget_if_idle(self, seat: Seat) -> None:
        if seat.on_idle is not None and not seat.running and seat in self._seats:
            self._seats.remove(seat)
            self.lost.pop(seat.name, None)
            seat.on_idle()

    # ----------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Offer and issue until cancelled. Raises `TaskError` if task or reward fail, and what ``on_end`` raises."""
        try:
            while self._failure is None:
                self._changed.clear()
                await self._offer_and_issue()
                await self._changed.wait()
            raise self._failure
        finally:
            running = [*self._scored, *(task for seat in self._seats for task in seat.running)]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _offer_and_issue(self) -> None:
        while self._failure is None:
            decisions = self.scheduler.decide(self.clock())
            for decision in decisions:
                self._carry_out(decision)
            if self.scheduler.num_wanted() > 0 and self.may_issue():
                self._offer()
            elif not decisions:
                return
            await asyncio.sleep(0)  # prompts are made and rendered here

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.wake()

    def _tell(self, event: Event) -> None:
        self.scheduler.tell(event)
        self.wake()

    def settled(self, item: int, *, is_trained: bool) -> None:
        """Tell the scheduler what became of a finished group."""
        self._tell(Settled(self.clock(), item, is_trained))

    def _offer(self) -> None:
        """Take the next item from the ledger, render its prompt, and offer it; drop it if it can never be trained."""
        index = self.ledger.next_item()
        self._num_offered += 1
        try:
            item = self.scoring.item(index)
            prompt_token_ids = self.scoring.prompt_of(item)
        except BaseException as error:
            self.ledger.requeue(index)
            self._fail(error)
            return
        max_tokens = self.sampling.max_tokens or 1
        if len(prompt_token_ids) + max_tokens > self.max_sequence_tokens:
            self._unusable(
                index,
                f"its prompt of {len(prompt_token_ids)} tokens and a completion of {max_tokens} may "
                f"exceed {self.max_sequence_tokens} tokens, which is all that a micro-batch holds: raise "
                "train.max_tokens_per_micro_batch, or lower sampling.max_tokens",
            )
            return
        prompt = hashlib.blake2b(repr(prompt_token_ids).encode(), digest_size=12).hexdigest()
        nothing: list[Completion | None] = [None] * self.sampling.n
        self._open[index] = _OpenGroup(item, self._num_offered, prompt_token_ids, prompt, nothing)
        self._tell(Offered(self.clock(), index, prompt, len(prompt_token_ids), (0,) * self.sampling.n))

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Issue(endpoint, index, completions):
                seat = next(seat for seat in self._seats if seat.name == endpoint)
                self._issue(seat, self._open[index], completions)
            case Abort():
                raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- requests

    def _issue(self, seat: Seat, group: _OpenGroup, completions: tuple[int, ...]) -> None:
        group.num_requests += 1
        if seat.name not in group.endpoints:
            group.endpoints.append(seat.name)
        index = group.item.index
        parts = () if len(completions) == self.sampling.n else (completions[0],)
        sampling = self.sampling.model_copy(update={"n": len(completions), "seed": _seed(self.seed, index, *parts)})
        request_id = f"item-{index}-{group.serial}-{group.num_requests}"
        request = asyncio.ensure_future(seat.sample(request_id, group.prompt_token_ids, sampling))
        seat.running.add(request)
        group.requests[request] = completions

        def ended(request: asyncio.Task[tuple[Completion, ...]]) -> None:
            seat.running.discard(request)
            del group.requests[request]
            if self._open.get(index) is group:  # not if the item has been settled meanwhile
                self._settling(lambda: self._request_ended(seat, group, completions, request))
            self._forget_if_idle(seat)
            self.wake()

        request.add_done_callback(ended)

    def _settling(self, settle: Callable[[], None]) -> None:
        try:
            settle()
        except Exception as error:  # a full disk, say
            self._fail(error)

    def _request_ended(
        self,
        seat: Seat,
        group: _OpenGroup,
        completions: tuple[int, ...],
        request: asyncio.Task[tuple[Completion, ...]],
    ) -> None:
        """Decide what the end of a request means for its item, its endpoint and the run."""
        index = group.item.index
        error = None if request.cancelled() else request.exception()
        if error is None:
            sampled = () if request.cancelled() else request.result()
            if not sampled or any(completion.finish_reason == "abort" for completion in sampled):
                self._give_back(group, completions)
            else:
                self._take(group, completions, sampled)
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
                self._give_back(group, completions)

    def _take(self, group: _OpenGroup, completions: tuple[int, ...], sampled: Sequence[Completion]) -> None:
        index = group.item.index
        for i, completion in zip(completions, sampled, strict=True):
            group.done[i] = completion
            self._tell(Finished(self.clock(), index, i, len(completion.token_ids)))
        done = [completion for completion in group.done if completion is not None]
        if len(done) == len(group.done):
            scoring = asyncio.ensure_future(self.scoring.rewards(group.item, done))
            self._scored.add(scoring)
            scoring.add_done_callback(lambda scored: self._settling(lambda: self._group_scored(group, done, scored)))

    def _give_back(self, group: _OpenGroup, completions: tuple[int, ...]) -> None:
        """Return lost completions to the scheduler, or the whole item to the ledger if nothing else is left of it."""
        if not group.has_part:
            self._requeue(group)
            return
        for i in completions:
            self._tell(Returned(self.clock(), group.item.index, i, 0))

    def _group_scored(
        self, group: _OpenGroup, completions: Sequence[Completion], scored: asyncio.Task[list[float]]
    ) -> None:
        self._scored.discard(scored)
        index = group.item.index
        error = None if scored.cancelled() else scored.exception()
        if scored.cancelled() or error is not None:
            self._requeue(group)
            if error is not None:
                self._fail(error)
            return
        self._num_finished += 1
        self._num_failures.pop(index, None)
        rewards = scored.result()
        self.ledger.finish(index)
        del self._open[index]
        lengths = tuple(len(completion.token_ids) for completion in completions)
        self._tell(Scored(self.clock(), index, group.prompt, lengths, tuple(rewards)))
        rollouts = [
            Rollout(
                prompt_token_ids=group.prompt_token_ids,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                reward=reward,
                temperature=self.sampling.temperature,
            )
            for completion, reward in zip(completions, rewards, strict=True)
        ]
        self.on_end(Group(group.serial, index, rollouts, ",".join(group.endpoints)))

    # -------------------------------------------------------------------------------------------------------- items

    def _unusable(self, index: int, why: str) -> None:
        self._num_unusable += 1
        if self._num_finished == 0 and self._num_unusable >= _NUM_REFUSED:
            self._fail(TaskError(f"none of the first {self._num_unusable} prompts can be used; the last: {why}"))
        self._drop(index, "unusable", why)

    def _drop(self, index: int, reason: str, what_happened: str) -> None:
        self._num_failures.pop(index, None)
        self.ledger.drop(index, reason)
        self._withdraw(index)
        self.on_end(DroppedItem(index, reason, what_happened))

    def _requeue(self, group: _OpenGroup) -> None:
        self.ledger.requeue(group.item.index)
        self._withdraw(group.item.index)
        self.on_end(None)

    def _withdraw(self, index: int) -> None:
        """Forget an item, and end what still runs of it."""
        group = self._open.pop(index, None)
        if group is not None:
            for request in group.requests:
                request.cancel()
            self._tell(Withdrawn(self.clock(), index))


def _seed(seed: int, index: int, *parts: int) -> int:
    """Return a seed for one item of one run, or for a part of it; it does not depend on the order of the items."""
    text = ":".join(map(str, (seed, index, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
