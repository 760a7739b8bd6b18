"""The commit of an update in vLLM's engine core, which alone can pause, label and resume. Only vLLM loads this module.

vLLM has a separate route for each of these steps. With a client's round trip between every two calls, and the 20 ms
that ``/pause`` sleeps, a model that loads in 5 ms is paused for 100 ms. Here the steps run one after another in the
sampling thread, in one call of ``collective_rpc``, the only vLLM route that accepts arbitrary methods.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from inflight_vllm.updates import COMMIT

Answer = list[dict[str, float]]


def register() -> None:
    """Make the engine core handle the method `COMMIT` itself, and pass all other methods on to its workers."""
    passed_on = EngineCoreProc.collective_rpc
    if hasattr(passed_on, COMMIT):
        return

    @functools.wraps(passed_on)
    def collective_rpc(
        core: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return commit(core, **kwargs) if method == COMMIT else passed_on(core, method, timeout, args, kwargs)

    setattr(collective_rpc, COMMIT, commit)
    EngineCoreProc.collective_rpc = collective_rpc


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
    core.model_executor.collective_rpc("finish_weight_update")
    loaded = time.monotonic()
    core.set_weight_version(label)
    if resumes:
        core.resume_scheduler()
    return [{"load_s": loaded - started, "paused_s": time.monotonic() - stopped}]
