"""The actor: keeps every endpoint full with groups, scores them, and hands finished groups on.

Work goes to the least loaded of the endpoints that `Actor.serve` named last. A refused request costs only its item; so
does one that is too slow on a healthy endpoint. Knows nothing of trainers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pydantic

from inflight.contracts import InferenceEndpoint, Task
from inflight.errors import (
    DeadlineError,
    EndpointError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    TaskError,
)
from inflight.rollouts import Ledger
from inflight.types import Group, Rollout, TaskItem
from inflight.weights.threads import run_abandonable
from inflight.wire import Completion, EndpointState, GenerateRequest, GenerateResponse, SamplingParams, WeightVersion

_MAX_TRIES = 3
"""After this many failed requests an item is dropped."""
_NUM_REFUSED = 32
"""The run ends after this many unusable prompts if no group has finished by then."""
_WELL_S = 5.0
"""How long an endpoint may take to report that it is healthy."""


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that the actor gave up before it had all its completions."""

    index: int
    reason: str
    """``unusable`` or ``failed``, as the ledger counts it."""
    what_happened: str


class _UnusableItem(Exception):  # noqa: N818 - an outcome, not an error
    """No endpoint will sample this item; the message says why."""


class _SlowRequest(Exception):  # noqa: N818 - an outcome, not an error
    """The request took too long on a healthy endpoint."""


@dataclass(slots=True, eq=False)
class _Seat:
    """One endpoint, how many groups it may run, and the version that was last published to it."""

    endpoint: InferenceEndpoint
    capacity: int
    version: int | None = None
    """None while the endpoint gets no work."""
    takes_seeds: bool | None = None
    """As the endpoint declares; None until it has been asked."""
    on_idle: Callable[[], None] | None = None
    """Set once the seat is retired; called when nothing runs there any more."""
    running: set[asyncio.Task[Group | None]] = field(default_factory=set)

    @property
    def takes_work(self) -> bool:
        """Whether it may be given groups, if it has room."""
        return self.version is not None and self.on_idle is None


@dataclass(eq=False)
class Actor:
    """Issues groups while ``may_issue()`` allows and a seat is free, and settles each of them in the ledger.

    ``on_end`` is called when a group has ended: with the finished group, with the item if it was dropped, or with None
    if it will be issued again. An item is dropped if its prompt and completion together may exceed
    ``max_sequence_tokens``, if an endpoint refuses it, or if it fails repeatedly. ``tokenizer`` renders prompts (with
    its chat template, if it has one) and decodes completions.
    """

    task: Task
    tokenizer: Any
    sampling: SamplingParams
    ledger: Ledger
    _: KW_ONLY
    seed: int
    reward_timeout_s: float
    max_sequence_tokens: int
    may_issue: Callable[[], bool]
    on_end: Callable[[Group | DroppedItem | None], None]
    lost: dict[str, str] = field(default_factory=dict, init=False)
    """Endpoints that get no work because they failed, with the reason."""
    unserved: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no endpoint gets work, from the first loss on."""
    _seats: list[_Seat] = field(default_factory=list, init=False)
    _num_failures: Counter[int] = field(default_factory=Counter, init=False)
    """Failed requests of each item that is not settled yet."""
    _num_issued: int = field(default=0, init=False)
    _num_finished: int = field(default=0, init=False)
    _num_unusable: int = field(default=0, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: BaseException | None = field(default=None, init=False)

    @property
    def num_running(self) -> int:
        """Groups that are being generated or scored."""
        return sum(len(seat.running) for seat in self._seats)

    def wake(self) -> None:
        """Check again whether a group may be issued."""
        self._changed.set()

    def add(self, endpoint: InferenceEndpoint, limit: int) -> None:
        """Add an endpoint that runs ``limit`` sequences at a time; it gets work once `serve` names it."""
        self._seats.append(_Seat(endpoint, max(1, limit // self.sampling.n)))

    def retire(self, name: str, on_idle: Callable[[], None]) -> None:
        """Give an endpoint no more work. Once its groups have ended, forget it and call ``on_idle``."""
        for seat in [seat for seat in self._seats if seat.endpoint.name == name]:
            seat.on_idle = on_idle
            self._forget_if_idle(seat)
        self._note_whether_unserved()

    def serve(self, names: Collection[str], version: int) -> None:
        """Give work to these endpoints, which ``version`` was published to, and to no others."""
        for seat in self._seats:
            if seat.endpoint.name in names:
                seat.version = version
                self.lost.pop(seat.endpoint.name, None)
            else:
                self.lose(seat.endpoint.name, f"it could not be brought to version {version}")
        self._note_whether_unserved()

    def lose(self, name: str, reason: str) -> None:
        """Give an endpoint no work until `serve` names it again; its groups are issued again elsewhere."""
        for seat in self._seats:
            if seat.endpoint.name == name:
                self.lost.setdefault(name, reason)
                for running in seat.running if seat.version is not None else ():
                    running.cancel()
                seat.version = None
        self._note_whether_unserved()

    def _note_whether_unserved(self) -> None:
        if any(seat.takes_work for seat in self._seats):
            self.unserved.clear()
        else:
            self.unserved.set()
        self.wake()

    def _forget_if_idle(self, seat: _Seat) -> None:
        if seat.on_idle is not None and not seat.running and seat in self._seats:
            self._seats.remove(seat)
            self.lost.pop(seat.endpoint.name, None)
            seat.on_idle()

    async def run(self) -> None:
        """Issue groups until cancelled. Raises `TaskError` if task or reward fail, and what ``on_end`` raises."""
        try:
            while self._failure is None:
                self._changed.clear()
                while (seat := self._free_seat()) is not None and self.may_issue():
                    self._issue(seat)
                await self._changed.wait()
            raise self._failure
        finally:
            running = [task for seat in self._seats for task in seat.running]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.wake()

    def _free_seat(self) -> _Seat | None:
        free = [seat for seat in self._seats if seat.takes_work and len(seat.running) < seat.capacity]
        return min(free, key=lambda seat: len(seat.running) / seat.capacity, default=None)

    def _issue(self, seat: _Seat) -> None:
        index = self.ledger.next_item()
        self._num_issued += 1
        running = asyncio.ensure_future(self._group(seat, index, self._num_issued))
        seat.running.add(running)

        def ended(task: asyncio.Task[Group | None]) -> None:
            seat.running.discard(task)
            try:
                self.on_end(self._settle(seat, index, task))
            except Exception as error:  # a full disk, say
                self._fail(error)
            self._forget_if_idle(seat)
            self.wake()

        running.add_done_callback(ended)

    def _settle(self, seat: _Seat, index: int, task: asyncio.Task[Group | None]) -> Group | DroppedItem | None:
        """Decide what the end of a group means for its item, its endpoint and the run."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            group = None if task.cancelled() else task.result()
            if group is None:
                self.ledger.requeue(index)
                return None
            self._num_finished += 1
            self._num_failures.pop(index, None)
            self.ledger.finish(index)
            return group
        if isinstance(error, _UnusableItem):
            self._num_unusable += 1
            if self._num_finished == 0 and self._num_unusable >= _NUM_REFUSED:
                self._fail(TaskError(f"none of the first {self._num_unusable} prompts can be used; the last: {error}"))
            return self._drop(index, "unusable", str(error))
        if not isinstance(error, EndpointError | _SlowRequest):
            self.ledger.requeue(index)
            self._fail(error)
            return None
        # When an endpoint fails, only the request that failed first is charged: `lose` cancels the others.
        is_charged = isinstance(error, _SlowRequest) or seat.version is not None
        self._num_failures[index] += is_charged
        if isinstance(error, EndpointError):
            self.lose(seat.endpoint.name, error.message)
        if self._num_failures[index] >= _MAX_TRIES:
            return self._drop(index, "failed", f"{error} ({_MAX_TRIES} tries)")
        self.ledger.requeue(index)
        return None

    def _drop(self, index: int, reason: str, what_happened: str) -> DroppedItem:
        self._num_failures.pop(index, None)
        self.ledger.drop(index, reason)
        return DroppedItem(index, reason, what_happened)

    async def _group(self, seat: _Seat, index: int, serial: int) -> Group | None:
        """Sample and score one group; None if the endpoint aborted it.

        The class of an error tells whether the item, the endpoint or the task is to blame.
        """
        try:
            item = self.task.item(index)
        except Exception as error:  # tasks are user code
            raise TaskError(f"task {self.task.name!r} failed to make item {index}: {error!r}") from error
        prompt_token_ids = self.render(item)
        max_tokens = self.sampling.max_tokens or 1
        if len(prompt_token_ids) + max_tokens > self.max_sequence_tokens:
            raise _UnusableItem(
                f"its prompt of {len(prompt_token_ids)} tokens and a completion of {max_tokens} may "
                f"exceed {self.max_sequence_tokens} tokens, which is all that a micro-batch holds: raise "
                "train.max_tokens_per_micro_batch, or lower sampling.max_tokens"
            )
        version = seat.version
        response = await self._generate(seat, f"item-{index}-{serial}", prompt_token_ids, index)
        _check_versions(seat.endpoint.name, version, response.completions)
        if any(completion.finish_reason == "abort" for completion in response.completions):
            return None
        rewards = await self._rewards(item, response.completions)
        rollouts = [
            Rollout(
                prompt_token_ids=prompt_token_ids,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                reward=reward,
                temperature=self.sampling.temperature,
            )
            for completion, reward in zip(response.completions, rewards, strict=True)
        ]
        return Group(serial, index, rollouts, seat.endpoint.name)

    async def _generate(
        self, seat: _Seat, request_id: str, prompt_token_ids: tuple[int, ...], index: int
    ) -> GenerateResponse:
        """Sample one group.

        Raises `_UnusableItem` if the request is refused, `_SlowRequest` if it is late and the endpoint is healthy, and
        `EndpointError` for anything else.
        """
        try:
            request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=self.sampling)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise _UnusableItem(
                f"its prompt does not make a valid request: {problem['loc']}: {problem['msg']}"
            ) from error
        try:
            if seat.takes_seeds is None:
                seat.takes_seeds = (await seat.endpoint.capabilities()).seeds
            if seat.takes_seeds:
                sampling = self.sampling.model_copy(update={"seed": _seed(self.seed, index)})
                request = request.model_copy(update={"sampling": sampling})
            return await seat.endpoint.generate(request)
        except InvalidRequestError as error:
            raise _UnusableItem(f"the request was refused: {error}") from error
        except DeadlineError as error:
            answer = await version_of(seat.endpoint, _WELL_S)
            if answer is not None and answer.state is not EndpointState.POISONED:
                raise _SlowRequest(str(error)) from error
            raise
        except EndpointError:
            raise
        except Exception as error:  # endpoints may be anybody's code
            raise EndpointError(f"generate failed: {type(error).__name__}: {error}", seat.endpoint.name) from error

    def render(self, item: TaskItem) -> tuple[int, ...]:
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": item.prompt}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(self.tokenizer(item.prompt)["input_ids"])

    async def _rewards(self, item: TaskItem, completions: tuple[Completion, ...]) -> list[float]:
        """Score in a thread, so that a slow reward function does not block the loop; `TaskError` if it hangs."""

        def score() -> list[float]:
            texts = [
                self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
                for completion in completions
            ]
            return [float(self.task.score(item, text)) for text in texts]

        try:
            async with asyncio.timeout(self.reward_timeout_s):
                return await run_abandonable(score, "inflight-reward")
        except TimeoutError as error:
            raise TaskError(
                f"the reward of task {self.task.name!r}, item {item.index}, "
                f"took longer than {self.reward_timeout_s:g} s"
            ) from error
        except InflightError:
            raise
        except Exception as error:  # rewards are user code
            raise TaskError(f"the reward of task {self.task.name!r} raised on item {item.index}: {error!r}") from error


async def version_of(endpoint: InferenceEndpoint, timeout_s: float) -> WeightVersion | None:
    """Return which version an endpoint serves; None if it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await endpoint.weight_version()
    except (TimeoutError, InflightError):
        return None


def _check_versions(name: str, version: int | None, completions: Collection[Completion]) -> None:
    """Raise `ProtocolError` if a token is older than the version published before the request."""
    oldest = min((span.version for completion in completions for span in completion.version_spans), default=version)
    if version is not None and oldest is not None and oldest < version:
        raise ProtocolError(
            f"version {version} was published to it, but it sampled from version {oldest}: another server took its "
            "place",
            name,
        )


def _seed(seed: int, index: int) -> int:
    """Return a seed for one item of one run; it does not depend on the order of the items."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest())
