"""A plug-in of vLLM that notes when its processes step, pause, load and resume, for `vllm_pauses`.

It appends lines of JSON to the file that ``VLLM_STEPS`` names: what was done, and when it began and ended by the clock
that all processes of a machine share.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

CORE = {
    "_process_engine_step": "step",
    "pause_scheduler": "pause",
    "set_weight_version": "label",
    "resume_scheduler": "resume",
}
SERVER = {
    "pause_generation": "pause route",
    "finish_weight_update": "load route",
    "resume_generation": "resume route",
}

_NOTES: list[str] = []
_NUM_HELD = 20


def register() -> None:
    """Wrap what vLLM calls. vLLM calls this in each of its processes."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.gpu_worker import Worker

    for method, name in CORE.items():
        setattr(EngineCoreProc, method, _noted(getattr(EngineCoreProc, method), name))
    for method, name in SERVER.items():
        setattr(AsyncLLM, method, _noted_async(getattr(AsyncLLM, method), name))
    Worker.finish_weight_update = _noted(Worker.finish_weight_update, "load")


def _note(name: str, started: float) -> None:
    _NOTES.append(json.dumps([name, started, time.monotonic()]))
    # Writing lets other threads run, so it must not happen within a pause.
    if name == "resume route" or (name == "step" and len(_NOTES) >= _NUM_HELD):
        with open(os.environ["VLLM_STEPS"], "a") as file:
            file.write("".join(f"{line}\n" for line in _NOTES))
        _NOTES.clear()


def _noted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        answer = call(*args, **kwargs)
        if name != "step" or answer:  # a step that runs no model samples nothing
            _note(name, started)
        return answer

    return noted


def _noted_async(call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        answer = await call(*args, **kwargs)
        _note(name, started)
        return answer

    return noted
