"""Opens an endpoint and the trainer that it is compared with, and restores the endpoint afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from inflight.conformance.endpoint.opening import open_target
from inflight.conformance.endpoint.pace import Pace
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLOWNESS
from inflight.conformance.parity.pair import Pair
from inflight.conformance.targets import EndpointTarget
from inflight.errors import InflightError
from inflight.wire import WeightVersion

_RESTORE_S = 60.0


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

    If the target is a URL, the checkpoint's weights are published to its server again, however the block ends. If the
    block raises an error and this publish fails too, ``report`` receives the reason, and the server keeps test weights.

    ``prompts`` and ``tokens`` are passed to `Pair`. Errors raised while opening the endpoint propagate.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-pair-") as directory:
        subject = EndpointSubject(target, Path(directory), start_s)
        report(f"waiting for {target.label}")
        async with open_target(target, subject.reference.path, subject.directory, start_s) as subject.opened:
            can = subject.capabilities = await subject.endpoint.capabilities()
            before = await subject.endpoint.weight_version()
            subject.publisher = SteppedPublisher(subject.endpoint, can, before.version)
            subject.reference.cast(can.dtype)
            subject.pace = Pace()
            with closing(Pair(subject, target.worker, worker_options, prompts, tokens)) as pair:
                is_kept = target.url is not None
                try:
                    yield pair
                    if is_kept and subject.publisher.touched:
                        await subject.publisher.publish(subject.reference.weights)
                except BaseException:
                    if is_kept and subject.publisher.touched:
                        await _restore(subject, report, before)
                    raise
                finally:
                    await subject.leave()
                    subject.publisher.lose_group()


async def _restore(subject: EndpointSubject, report: Callable[[str], None], before: WeightVersion) -> None:
    """Publish the checkpoint's weights as the next incarnation, which supersedes an update that is still open.

    ``before`` is what the endpoint reported before the examination.
    """
    report("the checkpoint's weights again, because the examination ended early")
    last = subject.publisher
    last.lose_group()
    subject.publisher = SteppedPublisher(
        subject.endpoint,
        subject.capabilities,
        last.version + 1,
        run_id=last.run_id,
        incarnation=last.incarnation + 1,
    )
    try:
        async with asyncio.timeout(_RESTORE_S * SLOWNESS.get()):
            await subject.publisher.publish(subject.reference.weights)
    except (InflightError, TimeoutError) as error:
        if await _is_unchanged(subject, before):
            report(f"the server still serves the weights that it served before: nothing was published ({error})")
        else:
            report(f"the server may still serve test weights, so restart it: {error or 'no answer'}")


async def _is_unchanged(subject: EndpointSubject, before: WeightVersion) -> bool:
    """Return whether the endpoint reports the run, version and state of ``before``; False if it does not answer."""
    try:
        async with asyncio.timeout(_RESTORE_S):
            now = await subject.endpoint.weight_version()
    except (InflightError, TimeoutError):
        return False
    return (now.run_id, now.version, now.state) == (before.run_id, before.version, before.state)
