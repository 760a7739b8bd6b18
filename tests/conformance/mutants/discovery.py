"""Faults in what is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inflight.engines.embedded.endpoint import LocalEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import GenerateRequest, GenerateResponse, InFlightPolicy, TransportSpec, WeightVersion
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import declaring


def declares_what_is_free(endpoint: LocalEndpoint) -> LocalEndpoint:
    capabilities = endpoint.capabilities

    async def faulty() -> Any:
        declared = await capabilities()
        num_free = declared.max_concurrent_sequences - endpoint.stats().num_finished
        return declared.model_copy(update={"max_concurrent_sequences": num_free})

    endpoint.capabilities = faulty
    return endpoint


def wider_vocabulary(endpoint: LocalEndpoint) -> LocalEndpoint:
    return declaring(vocab_size=endpoint._engine.limits.vocab_size + 6)(endpoint)


def narrower_vocabulary(endpoint: LocalEndpoint) -> LocalEndpoint:
    return declaring(vocab_size=endpoint._engine.limits.vocab_size - 2)(endpoint)


def longer_context(endpoint: LocalEndpoint) -> LocalEndpoint:
    return declaring(max_model_len=endpoint._engine.limits.max_model_len + 1)(endpoint)


def shorter_context(endpoint: LocalEndpoint) -> LocalEndpoint:
    return declaring(max_model_len=endpoint._engine.limits.max_model_len - 1)(endpoint)


def acknowledging(transport: str) -> Callable[[LocalEndpoint], LocalEndpoint]:
    """Gloo is declared, and a group over another transport is not refused."""

    def infect(endpoint: LocalEndpoint) -> LocalEndpoint:
        faulty: Any = endpoint
        join = endpoint.init_process_group

        async def acknowledge(spec: TransportSpec) -> None:
            if spec.transport not in ("gloo", transport):
                raise UnsupportedError(f"{spec.transport} is not declared")
            if spec.transport == "gloo":
                await join(spec)

        faulty.init_process_group = acknowledge
        return declaring(transports=("gloo",))(endpoint)

    return infect


def declares_chat_in_vain(endpoint: LocalEndpoint) -> LocalEndpoint:
    async def faulty(request: Any) -> Any:
        raise UnsupportedError("no chat here")

    endpoint.chat_completion = faulty
    return endpoint


def reporting(change: Any) -> Any:
    def infect(endpoint: LocalEndpoint) -> LocalEndpoint:
        weight_version = endpoint.weight_version

        async def faulty() -> WeightVersion:
            version = await weight_version()
            return version.model_copy(update={"num_running": change(endpoint, version.num_running)})

        endpoint.weight_version = faulty
        return endpoint

    return infect


def ever_running() -> Any:
    largest = 0

    def change(_: LocalEndpoint, num_running: int) -> int:
        nonlocal largest
        largest = max(largest, num_running)
        return largest

    return change


def refuses_when_full(endpoint: LocalEndpoint) -> LocalEndpoint:
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
        "max_concurrent_sequences is what is free at present.",
        declares_what_is_free,
    ),
    Mutant("vocabulary too wide", "E-02", "The padded size of the vocabulary is declared.", wider_vocabulary),
    Mutant("vocabulary too narrow", "E-02", "Added tokens are not counted in vocab_size.", narrower_vocabulary),
    Mutant("context too long", "E-03", "max_model_len counts a token that does not fit.", longer_context),
    Mutant("context too short", "E-03", "One token more than max_model_len is served.", shorter_context),
    Mutant(
        "undeclared policies accepted",
        "E-04",
        "Only keep is declared, and updates under the other policies are accepted.",
        declaring(in_flight_policies=(InFlightPolicy.KEEP,)),
    ),
    Mutant(
        "undeclared transport accepted",
        "E-05",
        "A group over nccl is acknowledged by an engine that declares gloo.",
        acknowledging("nccl"),
    ),
    Mutant(
        "undeclared device memory accepted",
        "E-05",
        "A group over ipc is acknowledged by an engine that declares gloo.",
        acknowledging("ipc"),
    ),
    Mutant("undeclared chat answered", "E-06", "Chat is not declared, and is answered.", declaring(chat=False)),
    Mutant("undeclared stream", "E-06", "Streaming is not declared, and is done.", declaring(streaming=False)),
    Mutant("declared chat refused", "E-06", "Chat is declared, and is refused.", declares_chat_in_vain),
    Mutant(
        "requests counted as sequences",
        "E-07",
        "num_running counts requests, whatever their n.",
        reporting(lambda endpoint, _: len(endpoint._engine.scheduler.requests)),
    ),
    Mutant(
        "never at rest",
        "E-07",
        "num_running is the largest number of sequences that ever ran.",
        reporting(ever_running()),
    ),
    Mutant("refuses when full", "E-08", "A request for which there is no room now is refused.", refuses_when_full),
    Mutant(
        "runs more than declared",
        "E-08",
        "Fewer concurrent sequences are declared than run.",
        declaring(max_concurrent_sequences=16),
    ),
    Mutant(
        "undeclared updates accepted",
        "E-09",
        "Staging, encodings and partial updates are not declared, and are done.",
        declaring(staging=False, encodings=(), partial_updates=False),
    ),
)
