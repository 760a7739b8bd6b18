"""The parts of an update that run in vLLM's engine core. Only vLLM loads this module.

vLLM handles calls to its routes in the sampling thread, between two steps, so each call waits for a step. This module
changes how the engine core handles two kinds of calls to ``collective_rpc``, the only vLLM route that accepts arbitrary
methods:

- The commit. vLLM has a separate route for each of its steps. With a client's round trip between every two calls, and
  the 20 ms that ``/pause`` sleeps, a model that loads in 5 ms is paused for 100 ms. Here the steps run one after
  another in the sampling thread.
- Staging, which does not change the model. If the worker runs in the process of the engine core, these calls are
  handled in the thread that reads them, while the model is sampling, and the call for a bucket is answered once the
  bucket is staged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from inflight_vllm.updates import COMMIT, STAGE, STATUS

Answer = list[dict[str, Any]]


def register() -> None:
    """Make the engine core execute `COMMIT` itself, and handle `STAGE` and `STATUS` during sampling where it can."""
    passed_on = EngineCoreProc.collective_rpc
    if hasattr(passed_on, COMMIT):
        return

    @functools.wraps(passed_on)
    def collective_rpc(
        core: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if method == COMMIT:
            return commit(core, **kwargs)
        answer = passed_on(core, method, timeout, args, kwargs)
        return _when_staged(core, answer) if method == STAGE else answer

    setattr(collective_rpc, COMMIT, commit)
    EngineCoreProc.collective_rpc = collective_rpc
    EngineCoreProc.process_input_sockets = _with_staging(EngineCoreProc.process_input_sockets)


def _with_staging(read_calls: Callable[..., None]) -> Callable[..., None]:
    """Return ``read_calls``, wrapped so that calls that can be handled during sampling are not put into the queue."""

    @functools.wraps(read_calls)
    def process_input_sockets(core: Any, *args: Any, **kwargs: Any) -> None:
        put = core.input_queue.put_nowait

        def put_or_handle(call: tuple[Any, Any]) -> None:
            if _is_staging(core, *call):
                core._handle_client_request(*call)
            else:
                put(call)

        core.input_queue.put_nowait = put_or_handle
        read_calls(core, *args, **kwargs)

    return process_input_sockets


def _is_staging(core: Any, kind: Any, request: Any) -> bool:
    """Return whether a call can be handled while the model is sampling."""
    if kind != EngineCoreRequestType.UTILITY:
        return False
    _, _, method, args = request
    if method != "collective_rpc" or not args or args[0] not in (STAGE, STATUS):
        return False
    engine = _engine_in_process(core)
    return engine is not None and engine.can_stage_while_sampling


def _engine_in_process(core: Any) -> Any:
    """Return the weight transfer engine of the only worker if it runs in this process, otherwise None."""
    executor = core.model_executor
    return executor.driver_worker.weight_transfer_engine if isinstance(executor, UniProcExecutor) else None


def _when_staged(core: Any, answer: Answer) -> Answer | Future[Answer]:
    """Return the answer to `STAGE`, or a future of it if its work is still in progress in this process."""
    engine = _engine_in_process(core)
    if engine is None:
        return answer
    later: Future[Answer] = Future()
    engine.work.add_done_callback(lambda _: later.set_result([engine.status()]))
    return later


def commit(core: Any, *, label: str, pauses: bool, resumes: bool) -> Answer | Future[Answer]:
    """Load the weights that the workers have staged, label them, and return how many seconds that took.

    With ``pauses``, sampling is paused first, as under the policy ``keep``; if a step is in progress, the answer is
    delayed until it ends. With ``resumes``, sampling resumes immediately afterwards. After any error, sampling stays
    paused.
    """
    started = time.monotonic()
    paused = core.pause_scheduler("keep", False) if pauses else None
    if paused is None:
        return _switch_weights(core, label, started, resumes=resumes)
    answer: Future[Answer] = Future()

    def switch(paused: Future[None]) -> None:
        try:
            paused.result()
            answer.set_result(_switch_weights(core, label, time.monotonic(), resumes=resumes))
        except Exception as error:  # vLLM sends it to the client
            answer.set_exception(error)

    paused.add_done_callback(switch)
    return answer


def _switch_weights(core: Any, label: str, stopped: float, *, resumes: bool) -> Answer:
    started = time.monotonic()
    core.model_executor.collective_rpc("inflight_load")
    loaded = time.monotonic()
    core.set_weight_version(label)
    if resumes:
        core.resume_scheduler()
    return [{"load_s": loaded - started, "paused_s": time.monotonic() - stopped}]
