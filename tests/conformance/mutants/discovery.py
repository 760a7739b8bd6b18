"""Faults in what an endpoint reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import GenerateRequest, GenerateResponse, InFlightPolicy, TransportSpec, WeightVersion
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces, with_capabilities


@replaces("capabilities")
async def reports_free_slots(endpoint: EmbeddedEndpoint, capabilities: Any) -> Any:
    reported = await capabilities()
    num_free = reported.max_concurrent_sequences - endpoint.stats().num_finished
    return reported.model_copy(update={"max_concurrent_sequences": num_free})


def wider_vocabulary(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return with_capabilities(vocab_size=endpoint._engine.limits.vocab_size + 6)(endpoint)


def narrower_vocabulary(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return with_capabilities(vocab_size=endpoint._engine.limits.vocab_size - 2)(endpoint)


def longer_context(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return with_capabilities(max_model_len=endpoint._engine.limits.max_model_len + 1)(endpoint)


def shorter_context(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return with_capabilities(max_model_len=endpoint._engine.limits.max_model_len - 1)(endpoint)


def acknowledging(transport: str) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Support gloo, but acknowledge a group over another transport."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        faulty: Any = endpoint
        join = endpoint.init_process_group

        async def acknowledge(spec: TransportSpec) -> None:
            if spec.transport not in ("gloo", transport):
                raise UnsupportedError(f"{spec.transport} is not supported")
            if spec.transport == "gloo":
                await join(spec)

        faulty.init_process_group = acknowledge
        return with_capabilities(transports=("gloo",))(endpoint)

    return infect


@replaces("chat_completion")
async def refuses_supported_chat(endpoint: EmbeddedEndpoint, _: Any, request: Any) -> Any:
    raise UnsupportedError("no chat here")


def reporting(change: Any) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        weight_version = endpoint.weight_version

        async def faulty() -> WeightVersion:
            version = await weight_version()
            return version.model_copy(update={"num_running": change(endpoint, version.num_running)})

        endpoint.weight_version = faulty
        return endpoint

    return infect


def ever_running() -> Any:
    largest = 0

    def change(_: EmbeddedEndpoint, num_running: int) -> int:
        nonlocal largest
        largest = max(largest, num_running)
        return largest

    return change


def refuses_when_full(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    generate = endpoint.generate
    num_open = 0

    async def faulty(request: GenerateRequest) -> GenerateResponse:
        nonlocal num_open
        if num_open + request.sampling.n > endpoint._engine.scheduler.max_concurrent:
            raise InvalidRequestError("the server is full; try again later")
        num_open += request.sampling.n
        try:
            return await generate(request)
        finally:
            num_open -= request.sampling.n

    endpoint.generate = faulty
    return endpoint


MUTANTS = (
    Mutant(
        "capabilities change",
        "E-01",
        "`max_concurrent_sequences` reports the number of free slots.",
        reports_free_slots,
    ),
    Mutant("vocabulary too wide", "E-02", "The padded size of the vocabulary is reported.", wider_vocabulary),
    Mutant("vocabulary too narrow", "E-02", "Added tokens are not counted in vocab_size.", narrower_vocabulary),
    Mutant("context too long", "E-03", "`max_model_len` is one token larger than the context.", longer_context),
    Mutant(
        "context too short", "E-03", "The engine accepts one token more than `max_model_len` allows.", shorter_context
    ),
    Mutant(
        "unsupported policies accepted",
        "E-04",
        "Only keep is supported, but updates under the other policies are accepted.",
        with_capabilities(in_flight_policies=(InFlightPolicy.KEEP,)),
    ),
    Mutant(
        "unsupported transport accepted",
        "E-05",
        "A group over nccl is acknowledged by an engine that supports gloo.",
        acknowledging("nccl"),
    ),
    Mutant(
        "unsupported device memory accepted",
        "E-05",
        "A group over ipc is acknowledged by an engine that supports gloo.",
        acknowledging("ipc"),
    ),
    Mutant(
        "unsupported chat answered", "E-06", "Chat is not supported, but is answered.", with_capabilities(chat=False)
    ),
    Mutant(
        "unsupported stream",
        "E-06",
        "Streaming is not supported, but requests are streamed.",
        with_capabilities(streaming=False),
    ),
    Mutant("supported chat refused", "E-06", "Chat is supported, but refused.", refuses_supported_chat),
    Mutant(
        "requests counted as sequences",
        "E-07",
        "`num_running` counts requests, regardless of their `n`.",
        reporting(lambda endpoint, _: len(endpoint._engine.scheduler.requests)),
    ),
    Mutant(
        "never at rest",
        "E-07",
        "`num_running` reports the largest number of sequences that ever ran.",
        reporting(ever_running()),
    ),
    Mutant("refuses when full", "E-08", "A request that cannot run at once is refused.", refuses_when_full),
    Mutant(
        "runs more than reported",
        "E-08",
        "`max_concurrent_sequences` is smaller than the number of sequences that run.",
        with_capabilities(max_concurrent_sequences=16),
    ),
    Mutant(
        "unsupported updates accepted",
        "E-09",
        "Staging, encodings and partial updates are not supported, but are accepted.",
        with_capabilities(staging=False, encodings=(), partial_updates=False),
    ),
)
