"""An endpoint of inflight around an engine of your own.

inflight check endpoint my_engine:MyEndpoint
inflight serve MODEL_DIR --engine my_engine:MyEndpoint
"""

import asyncio
import random

import torch

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InvalidRequestError, UnsupportedError
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.wire import Capabilities, Completion, GenerateResponse, TensorSpec, VersionSpan

from .engine import Sequence, TinyEngine

NUM_SLOTS = 8


class MyEndpoint(ReceivingEndpoint, InferenceEndpoint, PausableEngine):
    """Samples one token at a time under a lock, so that weights can change between any two tokens."""

    name = ""

    def __init__(self, model):
        self.name = str(model)
        try:
            self.engine = TinyEngine(model)
        except ValueError as error:  # not a text model, or a mixture of experts
            raise ConfigError(f"{model} cannot be served: {error}") from error
        self.version = 0  # of the weights that the engine computes with
        self.lock = asyncio.Lock()  # whoever holds it may use the engine
        self.slots = asyncio.Semaphore(NUM_SLOTS)
        self.request_ids, self.running = set(), 0
        self.declared = Capabilities(
            engine="my_engine",
            engine_version="0.1.0",
            model=self.name,
            dtype=str(self.engine.model.dtype)[6:],
            vocab_size=self.engine.vocab_size,
            max_model_len=self.engine.max_model_len,
            max_concurrent_sequences=NUM_SLOTS,
            num_ranks=1,
            in_flight_policies=("recompute",),
            transports=("gloo",),
            version_binding="spans",
            logprob_kind="processed",
            streaming=False,
            chat=False,
        )
        parameters = self.engine.parameters.items()
        specs = [TensorSpec(name=n, dtype=str(p.dtype)[6:], shape=tuple(p.shape)) for n, p in parameters]
        self.arrived = StagedSink(make_receiver)  # keeps the tensors of an update until its commit
        self.updates = UpdateReceiver(self, self.arrived, specs, self.declared)

    async def capabilities(self):
        return self.declared

    async def receiver(self):
        return self.updates

    # -- generation

    async def generate(self, request):
        ask, prompt = request.sampling, request.prompt_token_ids
        room = self.engine.max_model_len - len(prompt)
        if room < 1 or (ask.max_tokens or 1) > room:
            raise InvalidRequestError(f"{len(prompt)} prompt tokens and max_tokens {ask.max_tokens} do not fit")
        if max(prompt) >= self.engine.vocab_size:
            raise InvalidRequestError(f"token {max(prompt)} is not in the vocabulary of {self.engine.vocab_size}")
        if request.images or request.routed_experts:
            raise UnsupportedError("images and routed experts are not supported")
        if request.request_id in self.request_ids:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use")
        self.request_ids.add(request.request_id)
        try:
            draws = [asyncio.ensure_future(self.complete(index, prompt, ask, room)) for index in range(ask.n)]
            try:
                completions = await asyncio.gather(*draws)
            finally:
                for draw in draws:
                    draw.cancel()
        finally:
            self.request_ids.remove(request.request_id)
        return GenerateResponse(request_id=request.request_id, completions=completions)

    async def complete(self, index, prompt, ask, room):
        """Sample one completion, and note which version sampled each token."""
        seed = random.Random(None if ask.seed is None else f"{ask.seed}:{index}").getrandbits(40)
        filters = ask.model_dump(include={"temperature", "top_k", "top_p", "min_p"})
        sequence = Sequence(ids=list(prompt), generator=torch.Generator().manual_seed(seed), **filters)
        versions, reason = [], "length"
        async with self.slots:
            self.running += 1
            try:
                while len(versions) < (ask.max_tokens or room):
                    async with self.lock:
                        self.updates.session.refuse_to_sample()  # raises if the weights are torn
                        await finish(asyncio.to_thread(self.engine.sample_token, sequence))
                        versions.append(self.version)
                    if self.ends(sequence.ids[len(prompt) :], ask):
                        reason = "stop"
                        break
            finally:
                self.running -= 1
        return Completion(
            index=index,
            token_ids=tuple(sequence.ids[len(prompt) :]),
            logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
            version_spans=spans(versions),
        )

    def ends(self, tokens, ask):
        if tokens[-1] in ask.stop_token_ids or (tokens[-1] in self.engine.eos_token_ids and not ask.ignore_eos):
            return True
        return bool(ask.stop) and any(text in self.engine.tokenizer.decode(tokens) for text in ask.stop)

    async def chat_completion(self, request):
        raise UnsupportedError("chat is not supported")

    # -- weights: the receiver calls these in order, and handles leases, retries and aborts

    async def num_running(self):
        return self.running

    async def pause(self, update):
        await self.lock.acquire()

    async def apply(self, update):
        await asyncio.to_thread(self.engine.load, self.arrived.take())
        self.version = update.version
        await self.resume()

    async def resume(self):
        self.lock.release()

    async def fail_requests(self):
        self.lock.release()  # refuse_to_sample ends them

    async def aclose(self):
        await self.updates.aclose()


async def finish(step):
    """Wait for a step of the engine even if the caller is cancelled, because a thread cannot be stopped."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def spans(versions):
    """Return the version spans of tokens that were sampled from these versions."""
    edges = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*edges[1:], len(versions)]
    return tuple(VersionSpan(version=versions[a], start=a, end=b) for a, b in zip(edges, ends, strict=True))
