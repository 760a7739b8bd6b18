"""An `InferenceEndpoint` around the plain server: everything that an adapter needs."""

import asyncio
import random

import httpx
from safetensors.torch import save

from inflight.base.requirements import require
from inflight.contracts import InferenceEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.wire import Capabilities, Completion, GenerateResponse, Needs, TensorSpec, VersionSpan


class PlainEndpoint(ReceivingEndpoint, InferenceEndpoint, PausableEngine):
    name = ""

    def __init__(self, url):
        self.name, self.info, self.running, self.slot = url, None, 0, asyncio.Lock()
        self.version = 0  # of the weights that the server has
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    async def open(self):
        self.info = (await self.http.get("/info")).json()
        tensors = self.info["tensors"].items()
        specs = [TensorSpec(name=n, dtype=dtype, shape=tuple(shape)) for n, (dtype, shape) in tensors]
        self.arrived = StagedSink(make_receiver)
        self.declared = Capabilities(
            engine="plain", engine_version="1", model=self.name, dtype=next(iter(self.info["tensors"].values()))[0],
            vocab_size=self.info["vocab"], max_model_len=self.info["context"], max_concurrent_sequences=1, num_ranks=1,
            in_flight_policies=("drain",), transports=("gloo",), version_binding="admission", logprob_kind="processed",
            streaming=False, chat=False,
        )  # fmt: skip
        self.updates = UpdateReceiver(self, self.arrived, specs, self.declared)

    async def capabilities(self):  # waits until the server responds
        if self.info is None:
            await self.open()
        return self.declared

    async def receiver(self):
        await self.capabilities()
        return self.updates

    async def generate(self, request):
        require(await self.capabilities(), Needs.of_request(request), self.name)  # refuses images, for instance
        ask, prompt = request.sampling, request.prompt_token_ids
        longest = self.info["context"] - len(prompt)
        if longest < 1 or (ask.max_tokens or 1) > longest or max(prompt) >= self.info["vocab"]:
            raise InvalidRequestError(f"{len(prompt)} prompt tokens and max_tokens {ask.max_tokens} do not fit")
        options = ask.model_dump(include={"temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos"})
        options |= {"ids": prompt, "stop_ids": ask.stop_token_ids, "max_tokens": ask.max_tokens or longest}
        completions = []
        for index in range(ask.n):
            seed = random.Random(None if ask.seed is None else f"{ask.seed}:{index}").getrandbits(40)
            async with self.slot:
                self.updates.session.refuse_to_sample()
                self.running, version = 1, self.version
                try:
                    answer = (await self.http.post("/generate", json={**options, "seed": seed})).json()
                finally:
                    self.running = 0
            tokens = tuple(answer["ids"])
            completions.append(Completion(
                index=index, token_ids=tokens, logprobs=answer["logprobs"], finish_reason=answer["reason"],
                version_spans=[VersionSpan(version=version, start=0, end=len(tokens))],
            ))  # fmt: skip
        return GenerateResponse(request_id=request.request_id, completions=completions)

    async def chat_completion(self, request):
        raise UnsupportedError("chat is not supported")

    async def num_running(self):
        return self.running

    async def pause(self, update):
        await self.slot.acquire()

    async def apply(self, update):
        (await self.http.post("/weights", content=save(dict(self.arrived.take())))).raise_for_status()
        self.version = update.version
        await self.resume()

    async def resume(self):
        self.slot.release()

    async def fail_requests(self):
        self.slot.release()

    async def aclose(self):
        if self.info is not None:
            await self.updates.aclose()
        await self.http.aclose()
