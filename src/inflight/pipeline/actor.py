"""The actor: keeps every endpoint full with groups, scores them, and hands finished groups on.

Work goes to the endpoint with the fewest running groups, among those that `Actor.serve` named last. An endpoint that
fails is lost: its groups are issued again elsewhere, and it gets no work before it is named again. Endpoints may be
added, and retired: they finish what they run. Knows nothing of trainers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import InferenceEndpoint, Task
from inflight.errors import EndpointError, InflightError, ProtocolError, TaskError
from inflight.rollouts import Ledger
from inflight.types import Group, Rollout, TaskItem
from inflight.weights.threads import run_abandonable
from inflight.wire import Completion, GenerateRequest, SamplingParams


@dataclass(slots=True, eq=False)
class _Seat:
    """One endpoint, how many groups it may run, and the version that was last published to it."""

    endpoint: InferenceEndpoint
    capacity: int
    version: int | None = None
    """None while it gets no work."""
    takes_seeds: bool | None = None
    """What it declares; None before it was asked."""
    on_idle: Callable[[], None] | None = None
    """Set for a seat that gets no work any more: called once nothing runs there."""
    running: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def takes_work(self) -> bool:
        """Whether work may be issued to it, if it has room."""
        return self.version is not None and self.on_idle is None


class Actor:
    """Issues groups while ``may_issue()`` allows and a seat is free; calls ``on_group`` with each finished one.

    ``tokenizer`` renders prompts (with its chat template, if it has one) and decodes completions.
    """

    def __init__(
        self,
        endpoints: dict[InferenceEndpoint, int],
        task: Task,
        tokenizer: Any,
        sampling: SamplingParams,
        ledger: Ledger,
        *,
        seed: int,
        reward_timeout_s: float,
        may_issue: Callable[[], bool],
        on_group: Callable[[Group], None],
    ) -> None:
        self._seats: list[_Seat] = []
        self._task = task
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._ledger = ledger
        self._seed = seed
        self._reward_timeout_s = reward_timeout_s
        self._may_issue = may_issue
        self._on_group = on_group
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._num_issued = 0
        self.lost: dict[str, str] = {}
        """Endpoints that get no work because they failed, and how."""
        self.unserved = asyncio.Event()
        """Set while no endpoint gets work, from the first loss on."""
        for endpoint, limit in endpoints.items():
            self.add(endpoint, limit)

    @property
    def num_running(self) -> int:
        """Groups that are being generated or scored."""
        return sum(len(seat.running) for seat in self._seats)

    def wake(self) -> None:
        """Look again whether something may be issued."""
        self._changed.set()

    def add(self, endpoint: InferenceEndpoint, limit: int) -> None:
        """Know one more endpoint, of ``limit`` sequences at a time; it gets work once it is served."""
        self._seats.append(_Seat(endpoint, max(1, limit // self._sampling.n)))

    def retire(self, name: str, on_idle: Callable[[], None]) -> None:
        """Give an endpoint no more work; once what runs there has ended it is forgotten, and ``on_idle`` called."""
        for seat in [seat for seat in self._seats if seat.endpoint.name == name]:
            seat.on_idle = on_idle
            self._forget_if_idle(seat)
        self._note_whether_unserved()
        self.wake()

    def serve(self, names: Collection[str], version: int) -> None:
        """From now on work goes to these endpoints, which ``version`` was published to, and to no other."""
        for seat in self._seats:
            if seat.endpoint.name in names:
                seat.version = version
                self.lost.pop(seat.endpoint.name, None)
            else:
                self.lose(seat.endpoint.name, f"it could not be brought to version {version}")
        self._note_whether_unserved()
        self.wake()

    def lose(self, name: str, reason: str) -> None:
        """Give an endpoint no work until it is served again; its groups are issued again elsewhere."""
        for seat in self._seats:
            if seat.endpoint.name == name:
                self.lost.setdefault(name, reason)
                for running in seat.running if seat.version is not None else ():
                    running.cancel()
                seat.version = None
        self._note_whether_unserved()
        self.wake()

    def _note_whether_unserved(self) -> None:
        if any(seat.takes_work for seat in self._seats):
            self.unserved.clear()
        else:
            self.unserved.set()

    def _forget_if_idle(self, seat: _Seat) -> None:
        if seat.on_idle is not None and not seat.running and seat in self._seats:
            self._seats.remove(seat)
            self.lost.pop(seat.endpoint.name, None)
            seat.on_idle()

    async def run(self) -> None:
        """Issue groups for ever; raises what a reward function raised."""
        try:
            while self._failure is None:
                self._changed.clear()
                while (seat := self._free_seat()) is not None and self._may_issue():
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
        index = self._ledger.next_item()
        self._num_issued += 1
        running = asyncio.ensure_future(self._group(seat, index, self._num_issued))
        seat.running.add(running)

        def ended(task: asyncio.Task[None]) -> None:
            seat.running.discard(task)
            if task.cancelled():
                self._ledger.requeue(index)
            elif (error := task.exception()) is not None:
                self._ledger.requeue(index)
                if isinstance(error, EndpointError):
                    self.lose(seat.endpoint.name, error.message)
                else:
                    self._fail(error)
            self._forget_if_idle(seat)
            self.wake()

        running.add_done_callback(ended)

    async def _group(self, seat: _Seat, index: int, serial: int) -> None:
        """Sample and score one group; what it raises says whether the endpoint or the task is to blame."""
        try:
            item = self._task.item(index)
        except Exception as error:  # tasks are user code
            raise TaskError(f"task {self._task.name!r} failed to make item {index}: {error!r}") from error
        prompt_token_ids = self.render(item)
        if seat.takes_seeds is None:
            seat.takes_seeds = (await seat.endpoint.capabilities()).seeds
        request = GenerateRequest(
            request_id=f"item-{index}-{serial}",
            prompt_token_ids=prompt_token_ids,
            sampling=self._sampling.model_copy(update={"seed": _seed(self._seed, index) if seat.takes_seeds else None}),
        )
        version = seat.version
        response = await seat.endpoint.generate(request)
        _check_versions(seat.endpoint.name, version, response.completions)
        if any(completion.finish_reason == "abort" for completion in response.completions):
            self._ledger.requeue(index)
            return
        rewards = await self._rewards(item, response.completions)
        rollouts = [
            Rollout(
                prompt_token_ids=prompt_token_ids,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                reward=reward,
                temperature=self._sampling.temperature,
            )
            for completion, reward in zip(response.completions, rewards, strict=True)
        ]
        self._ledger.finish(index)
        self._on_group(Group(serial, index, rollouts, seat.endpoint.name))

    def render(self, item: TaskItem) -> tuple[int, ...]:
        """Return the prompt of an item as token ids."""
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": item.prompt}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(self._tokenizer(item.prompt)["input_ids"])

    async def _rewards(self, item: TaskItem, completions: tuple[Completion, ...]) -> list[float]:
        """Score in a thread, so that a slow reward function keeps nobody waiting; a hanging one is a `TaskError`."""

        def score() -> list[float]:
            texts = [
                self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
                for completion in completions
            ]
            return [float(self._task.score(item, text)) for text in texts]

        try:
            async with asyncio.timeout(self._reward_timeout_s):
                return await run_abandonable(score, "inflight-reward")
        except TimeoutError as error:
            raise TaskError(
                f"the reward of task {self._task.name!r}, item {item.index}, "
                f"took longer than {self._reward_timeout_s:g} s"
            ) from error
        except InflightError:
            raise
        except Exception as error:  # rewards are user code
            raise TaskError(f"the reward of task {self._task.name!r} raised on item {item.index}: {error!r}") from error


def _check_versions(name: str, version: int | None, completions: Collection[Completion]) -> None:
    """Raise `ProtocolError` for tokens that are older than what was published before they were asked for."""
    oldest = min((span.version for completion in completions for span in completion.version_spans), default=version)
    if version is not None and oldest is not None and oldest < version:
        raise ProtocolError(
            f"version {version} was published to it, it sampled from version {oldest}: another server took its place",
            name,
        )


def _seed(seed: int, index: int) -> int:
    """A seed for one item of one run: the same item of the same run is sampled alike, whatever the order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest())
