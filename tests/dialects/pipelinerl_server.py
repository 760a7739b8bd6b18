"""Stands in for a server of PipelineRL, in a process of its own: its routes, and its half of the broadcasts.

    python -m tests.dialects.pipelinerl_server '{"model": ..., "port": ..., "group_port": ...}'

Written after ``vllm1.py``: it joins the group before it listens, receives one broadcast for each parameter and loads
each as it comes, resumes whatever happened, and answers ``{"status": "ok"}`` or status 500. Behind it, transformers
samples in the place of vLLM. Nothing of inflight is imported. Unlike PipelineRL's, it can be told to leave a tensor out
of what it knows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.dialects.pipelinerl_trainer import init_extra_process_group


class Server:
    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(told["model"])
        self.parameters = dict(self.model.named_parameters())
        self.group = init_extra_process_group(told["group_port"], 2, rank=1) if "group_port" in told else None
        self.lock = asyncio.Lock()  # taken by a step, and by an update

    async def receive_weight_update(self, request: Request) -> JSONResponse:
        message = await request.json()
        assert message["kind"] == "weight_update_request"
        async with self.lock:
            await asyncio.to_thread(self.receive, message)
        return JSONResponse({"status": "ok"})

    def receive(self, message: dict[str, Any]) -> None:
        for info in message["parameters_info"]:
            dtype = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[info["dtype"]]
            buffer = torch.empty(tuple(info["shape"]), dtype=dtype)
            self.group.broadcast(buffer, 0).wait()
            if info["name"] not in self.parameters or info["name"] == self.told.get("unknown"):
                raise ValueError(f"model {info['name']} not found in model state dict")
            with torch.no_grad():
                self.parameters[info["name"]].copy_(buffer)

    async def sample(self, body: dict[str, Any], ids: list[int]) -> tuple[list[int], list[float]]:
        tokens, logprobs, cache, new = list(ids), [], None, list(ids)
        for _ in range(body["max_tokens"]):
            async with self.lock:
                with torch.no_grad():
                    answer = self.model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
                logits, cache = answer.logits[0, -1], answer.past_key_values
                distribution = torch.log_softmax(logits / max(body["temperature"], 1e-6), -1)
                tokens.append(int(torch.multinomial(distribution.exp(), 1)))
                logprobs.append(float(distribution[tokens[-1]]))
                new = tokens[-1:]
            await asyncio.sleep(self.told.get("step_s", 0.0))
        return tokens[len(ids) :], logprobs

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        sampled, logprobs = await self.sample(body, body["prompt"])
        named = [f"token_id:{token}" for token in sampled]
        choice = {"index": 0, "finish_reason": "length", "text": self.tokenizer.decode(sampled)}
        choice["logprobs"] = {"tokens": named, "token_logprobs": logprobs}
        return JSONResponse({"choices": [choice]})

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled, logprobs = await self.sample(body, ids)
        content = [{"token": f"token_id:{t}", "logprob": p} for t, p in zip(sampled, logprobs, strict=True)]
        message = {"role": "assistant", "content": self.tokenizer.decode(sampled)}
        choice = {"index": 0, "finish_reason": "length", "message": message, "logprobs": {"content": content}}
        return JSONResponse({"choices": [choice], "prompt_token_ids": ids})

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "root": self.told["model"], "max_model_len": 1024}]})

    async def openapi(self, _: Request) -> JSONResponse:
        return JSONResponse({"paths": {route.path: {} for route in self.routes()}})

    def routes(self) -> list[Route]:
        return [
            Route("/health", lambda _: JSONResponse({}), methods=["GET"]),
            Route("/version", lambda _: JSONResponse({"version": "0.18.1"}), methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/receive_weight_update", self.receive_weight_update, methods=["POST"]),
        ]


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    server = Server(told)
    uvicorn.run(Starlette(routes=server.routes()), host="127.0.0.1", port=told["port"], log_level="error", ws="none")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
