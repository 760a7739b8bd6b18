"""An `InferenceEndpoint` around an engine that runs in its own thread of this process."""

import asyncio
import queue
import random
import threading
from concurrent.futures import Future

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.base.requirements import require
from inflight.contracts import InferenceEndpoint
from inflight.errors import InvalidRequestError, PoisonedError, UnsupportedError
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.wire import Capabilities, Completion, GenerateResponse, Needs, TensorSpec, VersionSpan


def make(model_dir, *, name="threaded", max_concurrent=8, max_model_len=192):
    """Create the endpoint. The kit and `inflight serve` call this with a model directory and options."""
    return ThreadedEndpoint(model_dir, name, max_concurrent, max_model_len)


class Sequence:
    """One completion that is being sampled."""

    def __init__(self, prompt, ask, index):
        self.ids, self.num_prompt, self.ask, self.logprobs, self.versions = list(prompt), len(prompt), ask, [], []
        seed = random.Random(None if ask.seed is None else f"{ask.seed}:{index}").getrandbits(40)  # seeds have 64 bits
        self.random, self.cache = torch.Generator().manual_seed(seed), None
        filters = [TemperatureLogitsWarper(ask.temperature)] if ask.temperature else []
        filters += [TopKLogitsWarper(ask.top_k)] if ask.top_k else []
        filters += [TopPLogitsWarper(ask.top_p)] if ask.top_p < 1 else []
        filters += [MinPLogitsWarper(ask.min_p)] if ask.min_p else []
        self.filters = LogitsProcessorList(filters if ask.temperature else [])
        self.ended = Future()  # its result is the finish reason
        self.ended.set_running_or_notify_cancel()  # so that a caller that stops waiting cannot cancel it

    def completion(self, index, reason):
        starts = [i for i, v in enumerate(self.versions) if i == 0 or v != self.versions[i - 1]]
        spans = [
            VersionSpan(version=self.versions[start], start=start, end=end)
            for start, end in zip(starts, [*starts[1:], len(self.versions)], strict=True)
        ]
        tokens = self.ids[self.num_prompt :]
        return Completion(
            index=index, token_ids=tokens, logprobs=self.logprobs, finish_reason=reason, version_spans=spans
        )


class ThreadedEndpoint(ReceivingEndpoint, InferenceEndpoint, PausableEngine):
    name = ""

    def __init__(self, model_dir, name, max_concurrent, max_model_len):
        self.name, self.max_concurrent, self.max_model_len = name, max_concurrent, max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.parameters, self.config = dict(self.model.named_parameters()), self.model.config
        if hasattr(self.config, "num_experts"):  # transformers merges matrices that updates send one by one
            raise UnsupportedError("mixtures of experts are not supported")
        ends = self.model.generation_config.eos_token_id  # one id, or several
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.dtype = str(self.model.dtype)[6:]
        specs = [TensorSpec(name=n, dtype=self.dtype, shape=tuple(p.shape)) for n, p in self.parameters.items()]
        self.arrived = StagedSink(make_receiver)
        self.declared = Capabilities(
            engine="threaded", engine_version="1", model=self.name, dtype=self.dtype, num_ranks=1,
            vocab_size=self.config.vocab_size, max_model_len=self.max_model_len,
            max_concurrent_sequences=self.max_concurrent, in_flight_policies=("recompute",), transports=("gloo",),
            staging=True, version_binding="spans", logprob_kind="processed", streaming=False, chat=False,
        )  # fmt: skip
        self.updates = UpdateReceiver(self, self.arrived, specs, self.declared)
        self.request_ids = set()
        # Only the engine's thread uses these.
        self.calls, self.sequences, self.is_paused, self.version = queue.SimpleQueue(), [], False, 0
        threading.Thread(target=self.work, daemon=True).start()

    # ------------------------------------------------------------------------------------- in the engine's thread

    def work(self):
        while True:
            while self.is_paused or not self.sequences or not self.calls.empty():
                if (call := self.calls.get()) is None:
                    return
                call()
            for sequence in self.sequences[: self.max_concurrent]:
                try:
                    reason = self.sample(sequence)
                except Exception as error:  # fails only this request
                    self.end(sequence, error)
                else:
                    if reason:
                        self.end(sequence, reason)

    @torch.no_grad()
    def sample(self, it):
        """Sample one token. Return the finish reason if the completion ends."""
        ids = torch.tensor([it.ids if it.cache is None else it.ids[-1:]])
        output = self.model(input_ids=ids, past_key_values=it.cache, use_cache=True)
        it.cache = output.past_key_values
        return self.add_token(it, output.logits[:, -1].float())

    def add_token(self, it, logits):
        """Draw one token. Return the finish reason if the sequence ends with it."""
        logprobs = it.filters(None, logits).log_softmax(-1)[0]
        drawn = logprobs.argmax() if not it.ask.temperature else logprobs.exp().multinomial(1, generator=it.random)
        token = int(drawn)
        it.ids.append(token)
        it.logprobs.append(min(0.0, logprobs[token].item()))
        it.versions.append(self.version)
        text = self.tokenizer.decode(it.ids[it.num_prompt :]) if it.ask.stop else ""
        is_eos = token in self.ends and not it.ask.ignore_eos
        if is_eos or token in it.ask.stop_token_ids or any(word in text for word in it.ask.stop):
            return "stop"
        longest = it.ask.max_tokens or self.max_model_len - it.num_prompt
        return "length" if len(it.versions) == longest else None

    def end(self, sequence, outcome):
        if sequence in self.sequences:
            self.sequences.remove(sequence)
            failed = isinstance(outcome, Exception)
            sequence.ended.set_exception(outcome) if failed else sequence.ended.set_result(outcome)

    def end_all(self):
        for sequence in [*self.sequences]:
            self.end(sequence, PoisonedError("the weights are torn"))

    def stop_sampling(self):
        self.is_paused = True

    def sample_again(self):
        self.is_paused = False

    @torch.no_grad()
    def load(self, tensors, version):
        for name, tensor in tensors:
            self.parameters[name].copy_(tensor)
        for sequence in self.sequences:
            sequence.cache = None  # recompute: the next step is a prefill under the new weights
        self.version, self.is_paused = version, False  # change the label with the weights, before the next token

    # ----------------------------------------------------------------------------------------- in the event loop

    async def in_engine(self, call):
        done = Future()

        def run():
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self.calls.put(run)
        await asyncio.shield(asyncio.wrap_future(done))  # the call runs even if the caller stops waiting

    async def pause(self, update):
        try:
            await self.in_engine(self.stop_sampling)
        except asyncio.CancelledError:
            self.calls.put(self.sample_again)  # queued after the pause, which may still be pending
            raise

    async def apply(self, update):
        arrived = self.arrived.take()
        await self.in_engine(lambda: self.load(arrived, update.version))

    async def resume(self):
        await self.in_engine(self.sample_again)

    async def fail_requests(self):
        await self.in_engine(self.end_all)  # the engine stays paused, so that nothing samples from torn weights

    async def num_running(self):
        return min(len(self.sequences), self.max_concurrent)

    async def generate(self, request):
        require(self.declared, Needs.of_request(request), self.name)  # refuses what is not supported, such as images
        self.updates.session.refuse_to_sample()
        ask, prompt = request.sampling, request.prompt_token_ids
        room = self.max_model_len - len(prompt)
        if room < 1 or (ask.max_tokens or 1) > room or max(prompt) >= self.config.vocab_size:
            raise InvalidRequestError(f"{len(prompt)} prompt tokens and max_tokens {ask.max_tokens} do not fit")
        if request.request_id in self.request_ids:
            raise InvalidRequestError(f"request {request.request_id!r} is running")
        self.request_ids.add(request.request_id)
        sequences = [Sequence(prompt, ask, index) for index in range(ask.n)]
        self.calls.put(lambda: self.sequences.extend(sequences))
        try:
            reasons = [await asyncio.wrap_future(sequence.ended) for sequence in sequences]
        finally:  # answered, failed or cancelled: the engine stops working on it
            self.request_ids.remove(request.request_id)
            self.calls.put(lambda: [self.end(sequence, "abort") for sequence in sequences])
        completions = [s.completion(i, reason) for i, (s, reason) in enumerate(zip(sequences, reasons, strict=True))]
        return GenerateResponse(request_id=request.request_id, completions=completions)

    async def capabilities(self):
        return self.declared

    async def chat_completion(self, request):
        raise UnsupportedError("chat is not supported")

    async def receiver(self):
        return self.updates

    async def aclose(self):
        await self.updates.aclose()
        await self.in_engine(self.end_all)
        self.calls.put(None)
