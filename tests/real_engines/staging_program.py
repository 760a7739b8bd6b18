"""Print which calls vLLM's engine core answers while it samples: ``python staging_program.py``, in vLLM's environment.

No thread takes calls from the queue of the engine core, as if a step of the model never ended. For each case, the
program prints a line of JSON with the calls that were answered and those that are waiting in the queue.
"""

from __future__ import annotations

import json
import queue
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from inflight_vllm import engine_core
from inflight_vllm.updates import COMMIT, STAGE, STATUS

METHODS = (STATUS, STAGE, COMMIT, "get_model")


class Engine:
    """A stand-in for the transfer engine of a worker that is receiving a bucket."""

    def __init__(self, *, can_stage: bool) -> None:
        self.can_stage_while_sampling = can_stage
        self.work: Future[None] = Future()
        self.phase = "busy"

    def status(self) -> dict[str, Any]:
        return {"phase": self.phase}


class Worker:
    """A stand-in for the worker of an executor."""

    def __init__(self, engine: Engine) -> None:
        self.weight_transfer_engine = engine

    def inflight_status(self) -> dict[str, Any]:
        return self.weight_transfer_engine.status()

    def inflight_stage(self) -> dict[str, Any]:
        return self.weight_transfer_engine.status()


def core_of(executor: type[Any], engine: Engine) -> Any:
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    core.model_executor = executor.__new__(executor)
    core.model_executor.driver_worker = Worker(engine)
    return core


def answers(core: Any) -> list[Any]:
    """Return the method and the answer of each call that was answered since the previous call of this function."""
    found = []
    while not core.output_queue.empty():
        _, outputs = core.output_queue.get_nowait()
        output = outputs.utility_output
        found.append([METHODS[output.call_id], output.result.result])
    return found


def show(case: str, core: Any) -> None:
    waiting = [call[1][3][0] for call in list(core.input_queue.queue)]
    print(json.dumps({"case": case, "answered": answers(core), "waiting": waiting}), flush=True)


def main() -> None:
    def read(core: Any, methods: tuple[str, ...]) -> None:
        for i, method in enumerate(methods):
            core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, i, "collective_rpc", (method,))))

    EngineCoreProc.process_input_sockets = read
    engine_core.register()
    engine = Engine(can_stage=True)
    core = core_of(UniProcExecutor, engine)
    core.process_input_sockets(METHODS)
    show("a worker in this process", core)
    engine.phase = "done"
    engine.work.set_result(None)
    show("its bucket is staged", core)
    core = core_of(UniProcExecutor, Engine(can_stage=False))
    core.process_input_sockets(METHODS)
    show("a worker that must not be disturbed", core)
    core = core_of(MultiprocExecutor, Engine(can_stage=True))
    core.process_input_sockets(METHODS)
    show("workers in other processes", core)


if __name__ == "__main__":
    main()
