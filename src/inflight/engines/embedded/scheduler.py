"""Decides which sequences of the embedded engine wait and which run, in the engine's thread."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

from inflight.engines.embedded.counters import EngineCounters
from inflight.engines.embedded.sequences import EngineRequest, Sequence
from inflight.engines.embedded.slots import Slot, SlotStore
from inflight.engines.embedded.speculation import Speculation
from inflight.errors import BusyError, InvalidRequestError
from inflight.wire import FinishReason, PromptImage

_MAX_PREFILL_TOKENS = 4096
"""Maximum number of prompt tokens in one forward pass: more would delay running sequences."""
_MAX_WAITING = 16 * 1024
"""Maximum number of waiting completions. Each takes about a kilobyte, and a request of a hundred bytes can ask for
1,024 of them.
"""


def _uniforms(seed: str | None) -> Callable[[], float]:
    """Return a function that draws numbers from [0, 1). The first draw creates its state of 2.5 kB."""
    draw: Callable[[], float] | None = None

    def next_one() -> float:
        nonlocal draw
        draw = draw or random.Random(seed).random
        return draw()

    return next_one


class SequenceScheduler:
    """The requests of an engine, and the slots of their sequences. Engine's thread only.

    A sequence starts when ``store`` can hold it at its maximum length and fewer than ``max_concurrent`` are running.
    """

    def __init__(
        self, store: SlotStore, speculation: Speculation, counters: EngineCounters, max_concurrent: int
    ) -> None:
        self.store = store
        self.max_concurrent = max_concurrent
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Slot, Sequence] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.starts_new = True
        """Whether sequences without tokens may start. Sequences with tokens, which have run before, always may."""
        self._speculation = speculation
        self._counters = counters

    def add(self, request: EngineRequest) -> None:
        """Queue a request's sequences. Raises `InvalidRequestError` if its id is in use."""
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running; choose another id")
        params = request.sampling
        if len(self.waiting) + params.n > _MAX_WAITING:
            raise BusyError(
                f"{len(self.waiting)} completions are waiting and {params.n} more are requested, but at most "
                f"{_MAX_WAITING} may wait: send the request again later"
            )
        for index in range(params.n):
            seed = f"{params.seed}:{index}" if params.seed is not None else None
            request.sequences.append(Sequence(request, index, _uniforms(seed)))
            self._speculation.begin(request.sequences[-1])
        self.requests[request.request_id] = request
        self.waiting.extend(request.sequences)

    def has_work(self) -> bool:
        """Return whether a sequence is running or may start."""
        return bool(self.running) or self._may_start()

    def has_started(self) -> bool:
        """Return whether any sequence has started: it is running, or at the front of the queue to be recomputed."""
        return bool(self.running) or bool(self.waiting and self.waiting[0].token_ids)

    def _may_start(self) -> bool:
        """Return whether the first waiting sequence may start now."""
        return bool(self.waiting) and (self.starts_new or bool(self.waiting[0].token_ids))

    def start_waiting(self, failed: list[tuple[EngineRequest, Exception]]) -> list[list[Sequence]]:
        """Open slots for waiting sequences, in order. Return the sequences, grouped by equal token ids and images.

        The first sequence of a group is prefilled, and the others get copies of its keys and values. A sequence that
        does not fit waits, and so do the sequences after it. A request whose slot cannot be allocated, although the
        limit allows it, is removed and put in ``failed``.
        """
        groups: dict[tuple[tuple[int, ...], tuple[PromptImage, ...]], list[Sequence]] = {}
        num_tokens, num_open = 0, len(self.running)
        while self._may_start() and num_open < self.max_concurrent and self.store.fits(self.waiting[0].request.most):
            sequence = self.waiting[0]
            ids = tuple(sequence.all_ids())
            same = (ids, sequence.request.images)
            if same not in groups and groups and num_tokens + len(ids) > _MAX_PREFILL_TOKENS:
                break
            try:
                sequence.slot = self.store.open(len(ids), sequence.request.most)
            except Exception as error:  # such as insufficient memory
                failed.append((self.remove(sequence.request), error))
                continue
            self.waiting.popleft()
            num_tokens += len(ids) if same not in groups else 0
            groups.setdefault(same, []).append(sequence)
            num_open += 1
        return list(groups.values())

    def recompute_running(self) -> None:
        """Drop the keys and values of all running sequences, and queue the sequences, in front, to be recomputed."""
        for sequence in reversed(self.running.values()):
            assert sequence.slot is not None
            self.store.close(sequence.slot)
            sequence.slot = None
            self.waiting.appendleft(sequence)  # in front, since `_may_start` looks only at the first
        self.running.clear()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, unless it has ended already. After a request's last sequence, call `on_finished`."""
        if sequence.finish_reason is not None:
            return
        sequence.end(reason)
        self._close_slot(sequence)
        request = sequence.request
        if request.on_token is not None:
            request.on_token(sequence)
        self._counters.num_finished += 1
        if all(s.finish_reason is not None for s in request.sequences):
            del self.requests[request.request_id]
            request.on_finished([s.completion() for s in request.sequences])

    def remove(self, request: EngineRequest) -> EngineRequest:
        """End a failed request without calling `on_finished`, and return the request."""
        del self.requests[request.request_id]
        self.waiting = deque(s for s in self.waiting if s.request is not request)
        for sequence in request.sequences:
            sequence.end(sequence.finish_reason or "abort")
            self._close_slot(sequence)
        return request

    def _close_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.running.pop(sequence.slot, None)
            self.store.close(sequence.slot)
            sequence.slot = None

    def cancel(self, request: EngineRequest) -> None:
        """End a request, unless it has ended already, with the tokens so far and the finish reason ``abort``."""
        if self.requests.get(request.request_id) is request:
            self.waiting = deque(s for s in self.waiting if s.request is not request)
            for sequence in request.sequences:
                self.finish(sequence, "abort")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the requests with these ids, as `cancel` does."""
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self.cancel(request)

    def cancel_started(self) -> None:
        """End every request of which at least one sequence has started or even finished, as `cancel` does."""
        running = {sequence.request for sequence in self.running.values()}
        for request in list(self.requests.values()):
            if request in running or any(sequence.token_ids for sequence in request.sequences):
                self.cancel(request)

    def cancel_all(self) -> None:
        """End every request, as `cancel` does."""
        self.abort(list(self.requests))

    def cancel_all_without_store(self) -> None:
        """End every request like `cancel_all`, but close no slots, because the engine's store may have failed."""
        for sequence in self.running.values():
            sequence.slot = None
        self.running.clear()
        self.cancel_all()
