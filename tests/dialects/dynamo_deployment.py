"""Stands in for a deployment of Dynamo, in a process of its own: a frontend, the RL listener, and two workers.

    python -m tests.dialects.dynamo_deployment '{"model": ..., "ports": [frontend, listener, worker, worker]}'

Workers answer as ``components/src/dynamo/vllm/handlers.py``: status 200 with ``{"status": "ok"}`` or ``"error"``, and
no load unless paused. A worker with an id in "broken" fails its loads. Nothing of inflight is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.dialects.pipelinerl_server import Server

ROUTES = ("get_weight_version", "liveness_probe", "pause_generation", "resume_generation", "update_weights_from_disk")


class Worker(Server):
    def __init__(self, told: dict[str, Any], number: int) -> None:
        super().__init__(told)
        self.number = number
        self.version = "initial"
        self.resumed = asyncio.Event()
        self.resumed.set()

    async def engine(self, request: Request) -> JSONResponse:
        route, body = request.path_params["route"], await request.json()
        if route not in ROUTES:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse(await getattr(self, route)(body))

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("mode", "keep") not in ("keep", "wait", "abort"):
            return {"status": "error", "message": f"Invalid mode {body['mode']!r}; expected keep|wait|abort"}
        self.resumed.clear()
        return {"status": "ok", "message": "Engine paused"}

    async def resume_generation(self, _: dict[str, Any]) -> dict[str, Any]:
        self.resumed.set()
        return {"status": "ok", "message": "Engine resumed"}

    async def get_weight_version(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": self.version}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.resumed.is_set():
            return {
                "status": "error",
                "message": "Worker must be paused via pause_generation() before updating weights.",
            }
        if self.number in self.told.get("broken", ()):
            return {"status": "error", "message": "weights do not fit"}
        with torch.no_grad():
            for name, tensor in load_file(f"{body['model_path']}/model.safetensors").items():
                self.parameters[name].copy_(tensor)
        self.version = body.get("weight_version", "unknown")
        return {"status": "ok", "version": self.version}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.resumed.wait()
        sampled, logprobs = await self.sample(body, body["prompt"])
        choice = {"index": 0, "finish_reason": "length", "logprobs": {"token_logprobs": logprobs}}
        return {"choices": [choice], "nvext": {"completion_token_ids": sampled}}


async def main(told: dict[str, Any]) -> None:
    frontend, listener, *ports = told["ports"]
    workers = [Worker(told, number) for number in range(len(ports))]
    num_asked = 0

    async def completions(request: Request) -> JSONResponse:
        nonlocal num_asked
        num_asked += 1
        return JSONResponse(await workers[num_asked % len(workers)].complete(await request.json()))

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def discovered(_: Request) -> JSONResponse:
        listed = [
            {"instance_id": 100 + i, "system_url": f"http://127.0.0.1:{port}", "routes": list(ROUTES)}
            for i, port in enumerate(ports)
        ]
        return JSONResponse({"protocol_version": 1, "namespace": "dynamo", "workers": listed})

    def serve(port: int, *routes: tuple[str, str, Callable[[Request], Awaitable[Any]]]) -> Awaitable[None]:
        app = Starlette(routes=[Route(path, call, methods=[method]) for method, path, call in routes])
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
        return uvicorn.Server(config).serve()

    await asyncio.gather(
        *(serve(port, ("POST", "/engine/{route}", worker.engine)) for port, worker in zip(ports, workers, strict=True)),
        serve(listener, ("GET", "/v1/rl/workers", discovered)),
        serve(frontend, ("POST", "/v1/completions", completions), ("GET", "/v1/models", models)),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(json.loads(sys.argv[1])))
