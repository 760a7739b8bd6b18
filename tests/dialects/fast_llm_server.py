"""Stands in for a server of PipelineRL in its fast-llm mode, in a process of its own.

    python -m tests.dialects.fast_llm_server '{"model": ..., "port": ..., "redis": PORT, "group_port": ...}'

Written after ``vllm1.py`` of PipelineRL's branch ``fast-llm``, with gloo in the place of NCCL: it joins the group
before it listens, follows the event stream from its first entry, pauses for each update but the first, unpickles each
header, loads each tensor as it comes, and only logs what fails. transformers samples in the place of vLLM. Nothing of
inflight is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import redis
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from tests.dialects.fast_llm_trainer import broadcast, form_group, receive_object
from tests.dialects.pipelinerl_server import Server


class FastLlmServer(Server):
    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__({key: value for key, value in told.items() if key != "group_port"})
        print("forming the group", flush=True)
        self.model_update_group = form_group(told["group_port"], 1, 2)
        self.events: list[str] = []

    def receive_weight_update_fast_llm(self) -> None:
        while (meta := receive_object(self.model_update_group)) is not None:
            shard_name, name, shape, dtype = meta
            buffer = torch.empty(tuple(shape), dtype=dtype)
            broadcast(buffer, self.model_update_group)
            if shard_name != "weights":
                continue
            if name not in self.parameters or name == self.told.get("unknown"):
                raise ValueError(f"Parameter {name} not found in vLLM model state dict")
            with torch.no_grad():
                self.parameters[name].copy_(buffer)

    async def paused_update(self) -> None:
        async with self.lock:
            await asyncio.to_thread(self.receive_weight_update_fast_llm)

    def monitor(self, loop: asyncio.AbstractEventLoop) -> None:
        client = redis.Redis(port=self.told["redis"])
        last_id: Any = "0-0"
        is_first = True
        while True:
            for _, messages in client.xread({"fast_llm_events": last_id}, count=1, block=1000):
                for last_id, fields in messages:  # noqa: B007
                    event = json.loads(fields[b"event"])
                    print(json.dumps(event), flush=True)
                    if event["type"] == "training_finished":
                        self.model_update_group.shutdown()
                        print("left the group", flush=True)
                        return
                    try:
                        if is_first:
                            is_first = False
                            self.receive_weight_update_fast_llm()
                        else:
                            asyncio.run_coroutine_threadsafe(self.paused_update(), loop).result()
                    except Exception as error:  # it is logged, and nothing else
                        print(f"Error receiving weight update: {error}", flush=True)

    def routes(self) -> list[Route]:
        return [route for route in super().routes() if route.path != "/receive_weight_update"]


async def serve(told: dict[str, Any]) -> None:
    server = FastLlmServer(told)
    threading.Thread(target=server.monitor, args=(asyncio.get_running_loop(),), daemon=True).start()
    app = Starlette(routes=server.routes())
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=told["port"], log_level="error", ws="none")).serve()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(json.loads(sys.argv[1])))
