"""Requests of real engines that are aborted and continued again and again, while weights change all the time."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from inflight.contracts import AbortingEndpoint, InferenceEndpoint
from inflight.rollouts import continuation, joined
from inflight.wire import AbortRequests, Completion, GenerateRequest
from tests.gates import until
from tests.real_engines.servers import RealEngine, muted, publish, request, run
from tests.real_engines.test_updates import assert_spans_are_true

NUM_REQUESTS = 8
PARTS_S = (0.15, 0.05, 0.015)
"""How long a part is sampled, in turn: a fast engine samples all tokens in two of the first."""
MAX_VERSIONS = 400


async def sampled_in_parts(
    endpoint: InferenceEndpoint, whole: GenerateRequest, part_s: float
) -> tuple[Completion, int]:
    """Return a completion that was aborted after every ``part_s`` seconds, and the number of its parts.

    It is continued once another version is served.
    """
    assert isinstance(endpoint, AbortingEndpoint)
    found, asked, num_parts = None, whole, 0
    while True:
        answer = asyncio.ensure_future(endpoint.generate(asked))
        await asyncio.wait({answer}, timeout=part_s)
        if not answer.done():
            await endpoint.abort_requests(AbortRequests(request_ids=(asked.request_id,)))
        (part,) = (await answer).completions
        num_parts += 1
        found = part if found is None else joined(found, part)
        if part.finish_reason != "abort":
            return found, num_parts
        asked = continuation(asked, part, f"{whole.request_id}-{num_parts}")
        aborted_at = (await endpoint.weight_version()).version
        await until(lambda served=aborted_at: is_served_no_longer(endpoint, served), "no other version came")


async def is_served_no_longer(endpoint: InferenceEndpoint, version: int) -> bool:
    return (await endpoint.weight_version()).version != version


def test_spans_are_true_over_parts_and_over_updates_within_and_between_them(engine: RealEngine) -> None:
    attached = threading.Event()

    async def sample(endpoint: InferenceEndpoint) -> list[tuple[Completion, int]]:
        await endpoint.capabilities()
        attached.set()
        for part_s in PARTS_S:
            requests = [request(300, temperature=1.0) for _ in range(NUM_REQUESTS)]
            found = await asyncio.gather(*(sampled_in_parts(endpoint, it, part_s) for it in requests))
            if min(len(completion.version_spans) for completion, _ in found) >= 3:
                break
        return found

    with engine.publisher() as publisher, ThreadPoolExecutor() as threads:
        publish(publisher, engine.tensors, 1)
        sampling = threads.submit(run, engine.endpoint(generate_timeout_s=150.0), sample)
        assert attached.wait(60)
        version = 1
        while not sampling.done() and version < MAX_VERSIONS:
            time.sleep(0.2)
            version += 1
            publish(publisher, muted(engine.tensors) if version % 2 == 0 else engine.tensors, version)
        found = sampling.result()
        publish(publisher, engine.tensors, version + 1)
    for completion, _ in found:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 300)
        assert_spans_are_true(completion)
    assert min(len(completion.version_spans) for completion, _ in found) >= 3
    assert min(num_parts for _, num_parts in found) >= 2
