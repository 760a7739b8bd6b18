"""The embedded engine: continuous batching over a transformers causal LM whose weights change between token steps.

One thread runs the loop: apply commands, admit waiting sequences, run one forward (a token for each running sequence
and the prompts of new ones), draw, deliver. Only this thread touches the model and the sequences. A step that raises is
repeated in halves until the sequence that causes the error runs alone, and its request ends. The engine knows nothing
of HTTP, process groups or runs.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from inflight.engines.embedded.decoding import Compiler, Decoder
from inflight.engines.embedded.forwards import Forwards, Prompt
from inflight.engines.embedded.parameters import HOST, exchange, move, overwrite
from inflight.engines.embedded.sampler import sample
from inflight.engines.embedded.sequences import Request, Sequence
from inflight.engines.embedded.slots import Slot, SlotStore, token_bytes_of
from inflight.engines.embedded.speculation import Drawn, Speculation
from inflight.engines.embedded.stored_parameters import StoredTensors
from inflight.errors import BusyError, EndpointError, InflightError, InvalidRequestError
from inflight.model.checkpoints import stored_names
from inflight.model.routing import RoutingRecorder, routers_of
from inflight.rollouts.drafts import DraftSource
from inflight.types import EngineStats
from inflight.wire import Completion, FinishReason, GenerateRequest, InFlightPolicy, PromptImage

T = TypeVar("T")

_MAX_PREFILL_TOKENS = 4096
"""Most prompt tokens in one forward: more would make running sequences wait."""


class Engine:
    """Runs ``model`` (built with `ATTENTION_NAME`) for up to ``max_concurrent`` sequences. Call `start`, then `close`.

    Keys and values take at most ``kv_cache_bytes``; None allows ``max_concurrent`` sequences of full length. A sequence
    starts when there is room for its longest completion. If one sequence of ``max_model_len`` does not fit,
    ``max_model_len`` is lowered. ``decode`` turns token ids into text, for stop strings only. ``eos_token_ids`` end a
    completion. Completions are drafted from ``drafts``, if given; a draft changes how many steps they take, and nothing
    else.

    With a ``compiler`` the decode step is compiled, and all memory of keys and values is allocated at once: each
    sequence takes as much as one of ``max_model_len``. Parameters then keep their addresses.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_concurrent: int,
        eos_token_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        kv_cache_bytes: int | None = None,
        compiler: Compiler | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        parameter = next(model.parameters())
        self._model = model.eval()
        stored = stored_names(model)
        self.stored = StoredTensors(model)
        self.parameters = {stored[name]: parameter for name, parameter in model.named_parameters()}
        self.replaced: list[torch.Tensor] = []
        self._head = model.get_output_embeddings()
        self._device = parameter.device
        self.keeps_addresses = compiler is not None
        config = model.config.get_text_config()
        per_token = token_bytes_of(config, parameter.dtype)
        limit = max_concurrent * max_model_len * per_token if kv_cache_bytes is None else kv_cache_bytes
        self._shortened = limit // per_token < max_model_len
        max_model_len = min(max_model_len, limit // per_token)
        num_fixed = min(max_concurrent, limit // (max_model_len * per_token)) if compiler is not None else 0
        self._store = SlotStore(config, max_model_len, parameter.dtype, parameter.device, limit, num_fixed)
        decoder = None if compiler is None else Decoder(model, self._store.arenas[0], compiler)
        self._forwards = Forwards(model, self._store, parameter.device, decoder)
        routers = routers_of(model) if compiler is None else None
        self._recorder = None if routers is None else RoutingRecorder(routers)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self.speculation = Speculation(drafts)
        self.max_model_len = max_model_len
        self.max_concurrent = max_concurrent
        self.vocab_size = int(self._head.weight.shape[0])
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Slot, Sequence] = {}
        self._requests: dict[str, Request] = {}
        self._version = 0
        self._admitting = True
        self._paused_since: float | None = None
        self._paused_s = 0.0
        self._resumed_at: float | None = None
        self.first_token_s: float | None = None
        self._on_drained: Callable[[], None] | None = None
        self._num_steps = self._num_tokens = self._num_prompt_tokens = self._num_finished = self._num_updates = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)

    # ------------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort all requests, end the thread and wait for it."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def records_routing(self) -> bool:
        """Whether requests may ask for their experts: the model has some, and the decode step is not compiled."""
        return self._recorder is not None

    @property
    def failure(self) -> EndpointError | None:
        """The error that ended the engine's thread; None while it runs, or after `close`."""
        if self._failure is None:
            return None
        return EndpointError(f"the engine failed ({self._failure!r}); restart the server")

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run ``command`` in the engine's thread, between two token steps, unless the future is cancelled first."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except BaseException as error:  # the caller gets it, whatever it is
                future.set_exception(error)

        with self._wake:
            if self._closing:
                future.set_exception(self.failure or InflightError("the engine is closed"))
                return future
            self._commands.append(run)
            self._wake.notify()
        return future

    def submit(
        self,
        request: GenerateRequest,
        on_finished: Callable[[list[Completion]], None],
        on_failed: Callable[[InflightError], None],
        on_token: Callable[[Sequence], None] | None = None,
        image_tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[Request, Future[None]]:
        """Queue a request; ``image_tensors`` are what the model's processor made of its images.

        Raises `InvalidRequestError` if it does not fit; the future raises it if its id is in use.

        The engine's thread removes the request from the engine, then calls exactly one callback once: ``on_finished``
        when every completion has a finish reason, ``on_failed`` if a step of this request raises even when it runs
        alone.
        """
        admitted = Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            self._max_tokens(request),
            on_finished,
            on_failed,
            on_token,
            request.num_continued,
            images=request.images,
            image_tensors=image_tensors,
            routed_experts=request.routed_experts,
        )
        return admitted, self.call(lambda: self._add(admitted))

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters, which may be one step old."""
        paused_since = self._paused_since
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_finished=self._num_finished,
            num_updates=self._num_updates,
            paused_s=self._paused_s + (time.monotonic() - paused_since if paused_since is not None else 0.0),
            num_drafted=self.speculation.num_drafted,
            num_accepted=self.speculation.num_accepted,
            num_verifications=self.speculation.num_verifications,
        )

    def _max_tokens(self, request: GenerateRequest) -> int:
        """Return the most tokens a completion may have. Raises `InvalidRequestError` if the request does not fit."""
        num_prompt = len(request.prompt_token_ids)
        why = f" (as many as {self._store.limit_bytes} bytes of keys and values hold)" if self._shortened else ""
        if num_prompt >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, the context {self.max_model_len}{why}: shorten the prompt"
            )
        max_tokens = request.sampling.max_tokens or self.max_model_len - num_prompt
        if num_prompt + max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt's {num_prompt} tokens and max_tokens={max_tokens} exceed the context of "
                f"{self.max_model_len}{why}: ask for at most {self.max_model_len - num_prompt} tokens"
            )
        if (largest := max(request.prompt_token_ids)) >= self.vocab_size:
            raise InvalidRequestError(
                f"prompt token id {largest} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if request.sampling.stop and self._decode is None:
            raise InvalidRequestError("stop strings need a tokenizer, and this server has none; use stop_token_ids")
        return max_tokens

    # -------------------------------------------------------------------------------------------- engine's thread

    def _add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running; choose another id")
        params = request.sampling
        for index in range(params.n):
            seed = f"{params.seed}:{index}" if params.seed is not None else None
            request.sequences.append(Sequence(request, index, random.Random(seed).random))
            self.speculation.begin(request.sequences[-1])
        self._requests[request.request_id] = request
        self._waiting.extend(request.sequences)

    def cancel(self, request: Request) -> None:
        """End a request, unless it has ended, with its tokens so far and reason ``abort``. Engine's thread only."""
        if self._requests.get(request.request_id) is request:
            self._waiting = deque(s for s in self._waiting if s.request is not request)
            for sequence in request.sequences:
                self._finish(sequence, "abort")

    def abort(self, request_ids: Iterable[str]) -> None:
        """`cancel` the requests with these ids. Engine's thread only."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self.cancel(request)

    def cancel_all(self) -> None:
        """End every request with its tokens so far. Engine's thread only."""
        self.abort(list(self._requests))

    def pause(self, policy: InFlightPolicy, on_paused: Callable[[], None]) -> None:
        """Stop sampling under a policy, and call ``on_paused`` once no further token will be sampled.

        Under ``drain`` that is after the last running sequence has finished. Engine's thread only.
        """
        self._admitting = False
        if policy is InFlightPolicy.ABORT:
            started = [*self._running.values(), *(s for s in self._waiting if s.token_ids)]
            for request in dict.fromkeys(s.request for s in started):
                self.cancel(request)

        def stop_sampling() -> None:
            if self._paused_since is None:
                self._paused_since = time.monotonic()
            on_paused()

        if policy is InFlightPolicy.DRAIN and self._has_started():
            self._on_drained = stop_sampling
        else:
            stop_sampling()

    def load(self, ready: Iterable[tuple[str, torch.Tensor]], version: int, policy: InFlightPolicy) -> None:
        """Load weights that `made_ready` returned. Engine's thread only, while paused.

        They become the parameters' memory, or are copied into it if addresses must stay. Memory that was replaced is in
        ``replaced`` until the caller clears it. If it raises, the model is torn.
        """
        if self.keeps_addresses:
            overwrite(self.parameters, ready)
        else:
            self.replaced += exchange(self.parameters, ready)
        self._version = version
        self._num_updates += 1
        if policy is InFlightPolicy.RECOMPUTE:
            for sequence in reversed(self._running.values()):
                assert sequence.slot is not None
                self._store.close(sequence.slot)
                sequence.slot = None
                self._waiting.appendleft(sequence)  # in front, since `_may_admit` looks only at the first
            self._running.clear()

    def free_memory(self) -> None:
        """Give up the memory of keys and values, and move the parameters to the host. Engine's thread only.

        Raises `BusyError` if there is a request, and changes nothing. Nothing may be submitted until `take_memory`.
        """
        if self._requests:
            raise BusyError(f"{len(self._requests)} requests run or wait: memory can be released once they have ended")
        self._store.free()
        move(self.parameters, HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep what was freed for itself

    def take_memory(self) -> None:
        """Move the parameters back. Engine's thread only; after an error it may be called again."""
        move(self.parameters, self._device)

    def resume(self) -> float:
        """Sample again, and return for how many seconds sampling was paused. Engine's thread only; idempotent."""
        self._on_drained = None
        self._admitting = True
        if self._paused_since is None:
            return 0.0
        paused_s = time.monotonic() - self._paused_since
        self._paused_s += paused_s
        self._paused_since = None
        self._resumed_at = time.monotonic()
        self.first_token_s = None
        return paused_s

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._closing or self._has_work()):
                        self._wake.wait()
                    if self._closing:
                        break
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                if self._has_work():
                    self._step()
                if self._on_drained is not None and not self._has_started():
                    on_drained, self._on_drained = self._on_drained, None
                    on_drained()
        except BaseException as error:  # later callers get it, and the server reports itself unhealthy
            self._failure = error
            raise
        finally:
            self._end_everything()

    def _end_everything(self) -> None:
        with self._wake:
            self._closing = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        for sequence in self._running.values():
            sequence.slot = None  # the store itself may have failed
        self._running.clear()
        self.cancel_all()

    def _has_work(self) -> bool:
        return self._paused_since is None and (bool(self._running) or self._may_admit())

    def _has_started(self) -> bool:
        """Return whether some sequence has started: it runs, or waits in front to be computed again."""
        return bool(self._running) or bool(self._waiting and self._waiting[0].token_ids)

    def _may_admit(self) -> bool:
        """Return whether the first waiting sequence may run now; while draining, only if it has already started."""
        return bool(self._waiting) and (self._admitting or bool(self._waiting[0].token_ids))

    def _step(self) -> None:
        """Sample for every sequence that runs or can start: a token, and those of its draft that are accepted.

        Requests that fail end.
        """
        failed: list[tuple[Request, Exception]] = []
        wanted = {slot: 1 + self.speculation.propose(sequence) for slot, sequence in self._running.items()}
        self._store.expect(wanted.items())
        for slot, sequence in list(self._running.items()):
            if sequence.slot is slot:  # not if another sequence of its request has failed
                try:
                    self._store.reserve(slot, wanted[slot])
                except Exception as error:  # such as too little memory
                    failed.append((self._removed(sequence.request), error))
        new = self._admit(failed)
        self._advance([[sequence] for sequence in self._running.values()] + new, failed)
        if not failed:
            return
        broken = self._broken()
        for request, why in failed:
            request.on_failed(self._failure_of(request, broken or why, is_engine=broken is not None))
        if broken is not None:
            raise broken from failed[0][1]

    def _advance(self, groups: list[list[Sequence]], failed: list[tuple[Request, Exception]]) -> None:
        """Sample for each sequence of these groups. Requests that fail alone are removed and put in ``failed``.

        A group is one running sequence, or new sequences with the same ids. A failed step can be repeated in halves,
        because it changes nothing before its tokens are drawn.
        """
        groups = [opened for group in groups if (opened := [s for s in group if s.slot is not None])]
        if not groups:
            return
        try:
            drawn = self._forward(groups)
        except Exception as error:  # models, filters and memory may raise anything
            if len(groups) == 1:
                (group,) = groups
                groups = [[s for s in group if s.request is it] for it in {s.request: None for s in group}]
            if len(groups) == 1:
                failed.append((self._removed(groups[0][0].request), error))
                return
            self._advance(groups[: len(groups) // 2], failed)
            self._advance(groups[len(groups) // 2 :], failed)
            return
        for it in drawn:
            if it.sequence.slot is None:
                continue  # another sequence of its request has failed
            try:
                reason = self._append(it)
            except Exception as error:  # a tokenizer that cannot decode these tokens
                failed.append((self._removed(it.sequence.request), error))
                continue
            if reason is not None:
                self._finish(it.sequence, reason)
            elif it.sequence.request.on_token is not None:
                it.sequence.request.on_token(it.sequence)

    def _forward(self, groups: list[list[Sequence]]) -> list[Drawn]:
        """Run one forward, which stores keys and values; return what it brings each sequence."""
        running = {s.slot: s for (s, *_) in groups if s.slot is not None and s.slot in self._running}
        new = [group for group in groups if group[0].slot not in self._running]
        prompts = [
            Prompt(leader.slot, leader.all_ids(), len(group), leader.request.image_rows(), leader.request.image_tensors)
            for group in new
            if (leader := group[0]).slot is not None
        ]
        decoded = {slot: (s.token_ids[-1], *s.draft) for slot, s in running.items()}
        recorder = self._recorder if any(s.request.routed_experts for group in groups for s in group) else None
        with contextlib.nullcontext() if recorder is None else recorder.recording():
            slots, logits_BV = self._forwards.logits(decoded, prompts)
        drawing = [running[slot] for slot in slots] + [sequence for group in new for sequence in group]
        rows = [sequence for sequence in drawing for _ in range(1 + len(sequence.draft))]
        uniforms = [number for sequence in drawing for number in sequence.draw(1 + len(sequence.draft))]
        drawn = self.speculation.verify(drawing, *sample(logits_BV, [s.request.sampling for s in rows], uniforms))
        if recorder is not None:
            experts_TLK = recorder.take()
            for slot, it in zip(slots, drawn, strict=False):
                it.sequence.note_routed(slot.length, experts_TLK[: len(it.token_ids)].copy())
                experts_TLK = experts_TLK[len(decoded[slot]) :]
            for group, prompt in zip(new, prompts, strict=True):
                for sequence in group:
                    sequence.note_routed(0, experts_TLK[: len(prompt.token_ids)])
                experts_TLK = experts_TLK[len(prompt.token_ids) :]
        for slot, it in zip(slots, drawn, strict=False):
            slot.length += len(it.token_ids)
        for prompt in prompts:
            prompt.slot.length = len(prompt.token_ids)
        for leader, *followers in new:
            assert leader.slot is not None
            self._running[leader.slot] = leader
            for follower in followers:
                assert follower.slot is not None
                self._store.copy(leader.slot, follower.slot)
                self._running[follower.slot] = follower
        self._num_steps += 1
        self._num_prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts)
        if self._resumed_at is not None:
            self.first_token_s = time.monotonic() - self._resumed_at
            self._resumed_at = None
        return drawn

    def _broken(self) -> Exception | None:
        """Return what a prompt of one token raises. None means that the requests, not the engine, caused a failure."""
        try:
            slot = self._store.open(1, 1)
            try:
                _, logits_BV = self._forwards.logits({}, [Prompt(slot, [0])])
                logits_BV.cpu()  # a GPU reports its errors only now
            finally:
                self._store.close(slot)
        except Exception as error:
            return error
        return None

    def _admit(self, failed: list[tuple[Request, Exception]]) -> list[list[Sequence]]:
        """Open slots for waiting sequences, in order; return them, grouped by equal ids and images.

        The first of a group is prefilled, and the others get copies of its keys and values. A sequence without room
        waits, and so do those behind it. A request whose slot cannot be allocated, although the limit allows it, is
        removed and put in ``failed``.
        """
        groups: dict[tuple[tuple[int, ...], tuple[PromptImage, ...]], list[Sequence]] = {}
        num_tokens, num_open = 0, len(self._running)
        while self._may_admit() and num_open < self.max_concurrent and self._store.fits(self._waiting[0].request.most):
            sequence = self._waiting[0]
            ids = tuple(sequence.all_ids())
            same = (ids, sequence.request.images)
            if same not in groups and groups and num_tokens + len(ids) > _MAX_PREFILL_TOKENS:
                break
            try:
                sequence.slot = self._store.open(len(ids), sequence.request.most)
            except Exception as error:  # such as too little memory
                failed.append((self._removed(sequence.request), error))
                continue
            self._waiting.popleft()
            num_tokens += len(ids) if same not in groups else 0
            groups.setdefault(same, []).append(sequence)
            num_open += 1
        return list(groups.values())

    def _removed(self, request: Request) -> Request:
        del self._requests[request.request_id]
        self._waiting = deque(s for s in self._waiting if s.request is not request)
        for sequence in request.sequences:
            sequence.end(sequence.finish_reason or "abort")
            self._close_slot(sequence)
        return request

    def _failure_of(self, request: Request, error: Exception, *, is_engine: bool) -> InflightError:
        what = f"{type(error).__name__}: {error}"
        if is_engine:
            return EndpointError(f"the engine failed ({what}); restart the server")
        num_tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
        return InvalidRequestError(
            f"request {request.request_id!r} was ended after {num_tokens} tokens, since it fails in the engine even "
            f"when it runs alone ({what}); other requests go on"
        )

    def _close_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._running.pop(sequence.slot, None)
            self._store.close(sequence.slot)
            sequence.slot = None

    def _append(self, drawn: Drawn) -> FinishReason | None:
        """Add tokens to a sequence until one ends it; return why it ends, or None if it goes on."""
        sequence = drawn.sequence
        if not sequence.spans or sequence.spans[-1][0] != self._version:
            sequence.spans.append((self._version, len(sequence.token_ids)))
        for i, (token, logprob) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True), 1):
            sequence.append(token, logprob)
            self._num_tokens += 1
            if (reason := self._end_of(sequence)) is not None:
                sequence.num_accepted -= max(0, len(drawn.token_ids) - 1 - i)  # accepted, and not in the completion
                return reason
        return None

    def _end_of(self, sequence: Sequence) -> FinishReason | None:
        """Return why a sequence ends with its last token, or None if it goes on."""
        request, token = sequence.request, sequence.token_ids[-1]
        params = request.sampling
        if (
            token in params.stop_token_ids
            or (token in self._eos_token_ids and not params.ignore_eos)
            or (params.stop and self._hit_stop_string(sequence))
        ):
            return "stop"
        return "length" if len(sequence.token_ids) >= request.max_tokens else None

    def _hit_stop_string(self, sequence: Sequence) -> bool:
        assert self._decode is not None
        longest = max(len(stop.encode()) for stop in sequence.request.sampling.stop)
        tail = self._decode(sequence.token_ids[-(longest + 4) :])
        return any(stop in tail for stop in sequence.request.sampling.stop)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is not None:
            return
        sequence.end(reason)
        self._close_slot(sequence)
        request = sequence.request
        if request.on_token is not None:
            request.on_token(sequence)
        self._num_finished += 1
        if all(s.finish_reason is not None for s in request.sequences):
            del self._requests[request.request_id]
            request.on_finished([s.completion() for s in request.sequences])
