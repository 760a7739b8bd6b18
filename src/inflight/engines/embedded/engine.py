"""The embedded engine: continuous batching over a transformers causal LM whose weights change between token steps.

One thread runs the loop: apply commands, start waiting sequences, run one forward pass (one token for each running
sequence, and the prompts of new ones), draw tokens and deliver them. Only this thread touches the model and the
sequences.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from inflight.engines.embedded.context_limits import ContextLimits
from inflight.engines.embedded.counters import EngineCounters
from inflight.engines.embedded.decoding import Compiler, Decoder
from inflight.engines.embedded.forwards import Forwards
from inflight.engines.embedded.parameters import PreparedParameters, ServedParameters
from inflight.engines.embedded.sampling_pauses import SamplingPauses
from inflight.engines.embedded.scheduler import SequenceScheduler
from inflight.engines.embedded.scoring import ScoringQueue
from inflight.engines.embedded.sequences import EngineRequest, Sequence
from inflight.engines.embedded.slots import SlotStore, token_bytes_of
from inflight.engines.embedded.speculation import Speculation
from inflight.engines.embedded.stepping import StepRunner
from inflight.errors import BusyError, EndpointError, InflightError
from inflight.model.routing import RoutingRecorder, routers_of
from inflight.rollouts.drafts import DraftSource
from inflight.types import EngineStats
from inflight.wire import Completion, GenerateRequest, InFlightPolicy

T = TypeVar("T")


class Engine:
    """Runs ``model`` (built with `ATTENTION_NAME`) for up to ``max_concurrent`` sequences, from `start` to `close`.

    The KV cache uses at most ``kv_cache_bytes``; if that is None, ``max_concurrent`` sequences of full length fit. If
    one sequence of ``max_model_len`` does not fit, ``max_model_len`` is lowered. ``decode`` turns token ids into text,
    for stop strings only. ``eos_token_ids`` end a completion. ``drafts``, if given, proposes tokens (speculative
    decoding), which only changes how many steps a completion takes.

    With a ``compiler``, the decode step is compiled, and the whole KV cache is allocated in advance: each sequence uses
    as much memory as one of ``max_model_len`` tokens. Parameters then keep their addresses.

    The methods of ``scheduler``, ``pauses``, ``steps`` and ``scoring`` may only be called in the engine's thread
    (`call`).
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
        self.weights = ServedParameters(model.eval(), keeps_addresses=compiler is not None)
        dtype, device = self.weights.dtype, self.weights.device
        config = model.config.get_text_config()
        per_token = token_bytes_of(config, dtype)
        limit = max_concurrent * max_model_len * per_token if kv_cache_bytes is None else kv_cache_bytes
        longest = min(max_model_len, limit // per_token)
        self.limits = ContextLimits(
            longest,
            int(model.get_output_embeddings().weight.shape[0]),
            has_tokenizer=decode is not None,
            shortened_to_bytes=limit if longest < max_model_len else None,
        )
        num_fixed = min(max_concurrent, limit // (longest * per_token)) if compiler is not None else 0
        store = SlotStore(config, longest, dtype, device, limit, num_fixed)
        decoder = None if compiler is None else Decoder(model, store.arenas[0], compiler)
        routers = routers_of(model) if compiler is None else None
        self.counters = EngineCounters()
        self.speculation = Speculation(drafts, self.counters)
        self.scheduler = SequenceScheduler(store, self.speculation, self.counters, max_concurrent)
        self.pauses = SamplingPauses(self.scheduler)
        self.steps = StepRunner(
            self.scheduler,
            self.pauses,
            Forwards(model, store, device, decoder),
            self.speculation,
            self.counters,
            recorder=None if routers is None else RoutingRecorder(routers),
            eos_token_ids=eos_token_ids,
            decode=decode,
        )
        self.scoring = ScoringQueue(model, device, self.counters)
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)

    # ------------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort all requests, and wait until the thread has ended."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def records_routing(self) -> bool:
        """Whether requests may ask for routed experts: the model has experts, and the decode step is not compiled."""
        return self.steps.recorder is not None

    @property
    def failure(self) -> EndpointError | None:
        """The error that ended the engine's thread; None while the thread runs, or after `close`."""
        if self._failure is None:
            return None
        return EndpointError(f"the engine failed ({self._failure!r}); restart the server")

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run ``command`` in the engine's thread between two token steps, unless the future is cancelled first."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except BaseException as error:  # any error is raised in the caller
                future.set_exception(error)

        with self._wake:
            if self._closing:
                future.set_exception(
                    self.failure or InflightError("the engine is closed: it no longer accepts requests")
                )
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
    ) -> tuple[EngineRequest, Future[None]]:
        """Queue a request; ``image_tensors`` are the outputs of the model's processor for the request's images.

        Raises `InvalidRequestError` if the request does not fit. The future raises the same error if the request's id
        is in use.

        The engine's thread removes the request from the engine, and then calls exactly one of two callbacks:
        ``on_finished`` when every completion has a finish reason, or ``on_failed`` if a step of this request raises an
        error even when the request runs alone.
        """
        admitted = EngineRequest(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            self.limits.max_tokens_of(request),
            on_finished,
            on_failed,
            on_token,
            request.num_continued,
            images=request.images,
            image_tensors=image_tensors,
            routed_experts=request.routed_experts,
        )
        return admitted, self.call(lambda: self.scheduler.add(admitted))

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters, which may be one step old."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            paused_s=self.pauses.paused_s,
            **dataclasses.asdict(self.counters),
        )

    # -------------------------------------------------------------------------------------------- engine's thread

    def load(self, ready: PreparedParameters, version: int, policy: InFlightPolicy) -> None:
        """Load the weights that `ServedParameters.prepare` returned. Engine's thread only, while paused.

        If it raises, the model is torn.
        """
        self.weights.load(ready)
        self.steps.version = version
        self.counters.num_updates += 1
        if policy is InFlightPolicy.RECOMPUTE:
            self.scheduler.recompute_running()

    def free_memory(self) -> None:
        """Release the memory of the KV cache, and move the parameters to the host. Engine's thread only.

        If a request is running or waiting, raises `BusyError` and changes nothing. Nothing may be submitted until
        `take_memory`.
        """
        if num_requests := len(self.scheduler.requests) + len(self.scoring):
            raise BusyError(
                f"{num_requests} requests are running or waiting: memory can be released only after they have ended"
            )
        self.scheduler.store.free()
        self.weights.move_to_host()

    def take_memory(self) -> None:
        """Move the parameters back to their device. Engine's thread only. After an error, it may be called again."""
        self.weights.move_back()

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
                    if self.scheduler.has_work():
                        self.steps.step()
                    if self.scoring:
                        self.scoring.score_next(self.steps.version)
                self.pauses.complete_drain()
        except BaseException as error:  # later callers receive it, and the server reports that it is unhealthy
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
        self.scheduler.cancel_all_without_store()
        self.scoring.fail_all(self.failure or InflightError("the engine is closed: it no longer accepts requests"))

    def _has_work(self) -> bool:
        return self.pauses.paused_since is None and (self.scheduler.has_work() or bool(self.scoring))
