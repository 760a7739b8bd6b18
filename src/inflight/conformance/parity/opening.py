"""Opens an endpoint and the trainer that it is compared with, and restores the endpoint afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from inflight.conformance.endpoint.opening import open_target
from inflight.conformance.endpoint.pace import Pace
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.parity.pair import Pair
from inflight.conformance.targets import EndpointTarget


@asynccontextmanager
async def open_pair(
    target: EndpointTarget,
    worker_options: Mapping[str, Any],
    *,
    prompts: int,
    tokens: int,
    start_s: float,
    report: Callable[[str], None],
) -> AsyncIterator[Pair]:
    """Yield the pair of a target and a worker.

    If the block ends without an error, a server at a URL then serves its checkpoint's weights again.

    ``prompts`` and ``tokens`` are passed to `Pair`. Errors raised while opening the endpoint propagate.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-pair-") as directory:
        subject = EndpointSubject(target, Path(directory), start_s)
        report(f"waiting for {target.label}")
        async with open_target(target, subject.reference.path, subject.directory, start_s) as subject.opened:
            can = subject.capabilities = await subject.endpoint.capabilities()
            version = (await subject.endpoint.weight_version()).version
            subject.publisher = SteppedPublisher(subject.endpoint, can, version)
            subject.reference.cast(can.dtype)
            subject.pace = Pace()
            with closing(Pair(subject, target.worker, worker_options, prompts, tokens)) as pair:
                try:
                    yield pair
                    if target.url is not None and subject.publisher.touched:
                        await pair.set_weights(subject.reference.weights)
                finally:
                    await subject.leave()
                    subject.publisher.lose_group()
