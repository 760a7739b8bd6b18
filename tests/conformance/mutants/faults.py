"""Faults in the handling of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import TransferError, UpdateRefusedError
from inflight.wire import (
    BucketTransfer,
    EndpointState,
    InFlightPolicy,
    ProcessGroupSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from tests.conformance.mutants.control import end_what_is_open
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import pausing, replaces


@replaces("init_process_group")
async def joins_for_ever(endpoint: EmbeddedEndpoint, own: Any, spec: ProcessGroupSpec) -> None:
    await own(spec.model_copy(update={"timeout_s": 3600.0}))


def receives_within(timeout_s: Callable[[float], float]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        faulty: Any = endpoint

        async def receive(bucket: BucketTransfer) -> None:
            changed = bucket.model_copy(update={"timeout_s": timeout_s(bucket.timeout_s)})
            await EmbeddedEndpoint.receive_weights(endpoint, changed)

        faulty.receive_weights = receive
        return endpoint

    return infect


def with_a_lease_that(
    is_kept: Callable[[ProcessGroupSpec, float], bool],
) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Check the lease every 0.1 s, and drop it once ``is_kept``, called with group and seconds, returns False."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        faulty: Any = endpoint
        specs: list[ProcessGroupSpec] = []
        leases = []

        async def join(spec: ProcessGroupSpec) -> None:
            specs.append(spec)
            await EmbeddedEndpoint.init_process_group(endpoint, spec)

        async def request(update: WeightUpdate) -> None:
            async def end() -> None:
                left_s = update.lease_s
                while left_s > 0:
                    since = time.monotonic()
                    await asyncio.sleep(0.1)
                    left_s -= (passed_s := time.monotonic() - since)
                    if not is_kept(specs[-1], passed_s):
                        return
                if (await endpoint.weight_version()).updating_to == update.version:
                    await EmbeddedEndpoint.abort_weight_update(endpoint, update.ref)

            await EmbeddedEndpoint.request_weight_update(endpoint, update.model_copy(update={"lease_s": 3600.0}))
            leases.append(asyncio.ensure_future(end()))

        faulty.init_process_group, faulty.request_weight_update = join, request
        return endpoint

    return infect


def store_is_there(spec: ProcessGroupSpec, _: float) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((spec.master_address, spec.master_port)) == 0


@replaces("receive_weights")
async def waits_for_the_dead(endpoint: EmbeddedEndpoint, own: Any, bucket: BucketTransfer) -> None:
    try:
        await own(bucket)
    except TransferError as error:
        if "imed out" not in str(error):
            await asyncio.sleep(60)
        raise


def accepts_a_bucket_twice(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    seen: set[BucketTransfer] = set()

    async def receive(bucket: BucketTransfer) -> None:
        if bucket not in seen:
            seen.add(bucket)
            await EmbeddedEndpoint.receive_weights(endpoint, bucket)

    faulty.receive_weights = receive
    return endpoint


@replaces("receive_weights")
async def accepts_buckets_in_any_order(endpoint: EmbeddedEndpoint, own: Any, bucket: BucketTransfer) -> None:
    try:
        await own(bucket)
    except UpdateRefusedError as error:
        if "is next" not in str(error):
            raise


@replaces("commit_weight_update")
async def commits_during_a_drain(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    opened = endpoint._updates._open
    if opened is not None and opened.pausing is not None and not opened.pausing.done():
        opened.pausing = None
    return await own(ref)


@replaces("init_process_group")
async def refuses_a_group(endpoint: EmbeddedEndpoint, own: Any, spec: ProcessGroupSpec) -> None:
    if (await endpoint.weight_version()).updating_to is not None:
        raise UpdateRefusedError("an update is open")
    await own(spec)


def applies_as_they_arrive(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    parameters = dict(faulty._engine.weights.model.named_parameters())

    @torch.no_grad()
    def apply(staged: Any) -> None:
        for name, tensor in staged:
            parameters[name].copy_(tensor)

    async def receive(bucket: BucketTransfer) -> None:
        await EmbeddedEndpoint.receive_weights(endpoint, bucket)
        staged = faulty._sink.take()
        await asyncio.wrap_future(faulty._engine.call(lambda: apply(staged)))

    faulty.receive_weights = receive
    return endpoint


def aborts_after_the_receive(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    pending: set[asyncio.Future[None]] = set()

    async def receive(bucket: BucketTransfer) -> None:
        receiving = asyncio.ensure_future(EmbeddedEndpoint.receive_weights(endpoint, bucket))
        pending.add(receiving)
        receiving.add_done_callback(pending.discard)
        await receiving

    async def abort(ref: UpdateRef) -> WeightVersion:
        if pending:
            await asyncio.wait(pending)
        return await EmbeddedEndpoint.abort_weight_update(endpoint, ref)

    faulty.receive_weights, faulty.abort_weight_update = receive, abort
    return endpoint


def drains_for_nobody(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    ours = []

    async def request(update: WeightUpdate) -> None:
        if update.in_flight is InFlightPolicy.DRAIN:
            update = update.model_copy(update={"deadline_s": 3600.0, "lease_s": 3600.0})
        ours.append(asyncio.ensure_future(EmbeddedEndpoint.request_weight_update(endpoint, update)))
        await asyncio.shield(ours[-1])

    faulty.request_weight_update = request
    return endpoint


def outlives_its_launcher(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    if os.environ.get("LAUNCHED") is None:
        command = [sys.executable, "-m", "tests.conformance.mutants.server", *sys.argv[1:]]
        launched = subprocess.Popen(command, env={**os.environ, "LAUNCHED": "1"}, start_new_session=True)
        signal.signal(signal.SIGTERM, lambda *_: launched.kill())
        os._exit(launched.wait())
    launcher = os.getppid()

    def follow() -> None:
        while os.getppid() == launcher:
            time.sleep(0.2)
        time.sleep(8)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    return endpoint


def acknowledged_under_load(
    engine: Any, pause: Callable[..., None], policy: InFlightPolicy, on_paused: Callable[[], None]
) -> None:
    if len(engine.scheduler.running) <= 4:
        return pause(policy, on_paused)
    threading.Timer(0.5, lambda: engine.call(lambda: pause(policy, lambda: None))).start()
    return on_paused()


@replaces("request_weight_update")
async def looks_and_then_takes(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    is_free = (await endpoint.weight_version()).updating_to is None
    await asyncio.sleep(0.05)
    if is_free:
        await end_what_is_open(endpoint, update.run_id)
    await own(update)


@replaces("abort_weight_update")
async def returns_the_first_version_read(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    before = await endpoint.weight_version()
    after = await own(ref)
    return after.model_copy(update={"version": before.version})


def tires_of_pauses(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    num_pauses = 0

    def pause_once_more(engine: Any, pause: Callable[..., None], policy: InFlightPolicy, on_paused: Any) -> None:
        nonlocal num_pauses
        num_pauses += 1
        pause(InFlightPolicy.ABORT if num_pauses > 12 else policy, on_paused)

    return pausing(pause_once_more)(endpoint)


def deaf_while_paused(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    cancel = engine.scheduler.cancel
    engine.scheduler.cancel = lambda request: None if engine.pauses.paused_since is not None else cancel(request)
    return endpoint


def forgets_waiting_requests_while_paused(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    cancel = engine.scheduler.cancel

    def cancel_if_running(request: Any) -> None:
        is_waiting = any(sequence.request is request for sequence in engine.scheduler.waiting)
        if engine.pauses.paused_since is None or not is_waiting:
            cancel(request)

    engine.scheduler.cancel = cancel_if_running
    return endpoint


@replaces("request_weight_update")
async def compares_versions_of_any_run(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    served = (await endpoint.weight_version()).version
    if update.version < served:
        raise UpdateRefusedError(f"version {served} is already served")
    await own(update)


@replaces("fail_requests")
async def leaves_requests_waiting(endpoint: EmbeddedEndpoint, _: Any) -> None:
    return


@replaces("fail_requests")
async def leaves_scores_waiting(endpoint: EmbeddedEndpoint, _: Any) -> None:
    await endpoint._in_engine(endpoint._engine.scheduler.cancel_all)


def poisoned_in_name_only(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint

    async def fail_requests() -> None:
        await EmbeddedEndpoint.fail_requests(endpoint)
        await EmbeddedEndpoint.resume(endpoint)

    faulty._updates.session.refuse_to_sample = lambda: None
    faulty.fail_requests = fail_requests
    return endpoint


@replaces("_updates.session.abort")
def healed_by_an_abort(endpoint: EmbeddedEndpoint, abort: Any, *, torn: bool = False) -> None:
    was_applying = endpoint._updates.session._open is not None and endpoint._updates.session._open.is_applying
    abort(torn=torn)
    if not was_applying:
        endpoint._updates.session._state = EndpointState.READY


MUTANTS = (
    Mutant("endless join", "U-40", "Joining a group has no timeout.", joins_for_ever),
    Mutant("endless receive", "U-41", "Receiving a bucket has no timeout.", receives_within(lambda _: 3600.0)),
    Mutant(
        "lease lost with the store",
        "U-42",
        "A pause never expires if the group's store no longer exists.",
        with_a_lease_that(store_is_there),
    ),
    Mutant("waits for the dead", "U-43", "The endpoint waits for a sender that has died.", waits_for_the_dead),
    Mutant(
        "impatient", "U-44", "A bucket is awaited for half a second at most.", receives_within(lambda s: min(s, 0.5))
    ),
    Mutant(
        "bucket twice", "U-45", "A bucket that was already requested is acknowledged again.", accepts_a_bucket_twice
    ),
    Mutant(
        "buckets in any order",
        "U-46",
        "A bucket is acknowledged although it is not the next one.",
        accepts_buckets_in_any_order,
    ),
    Mutant("commit during a drain", "U-46", "A commit does not wait for the pause.", commits_during_a_drain),
    Mutant("no group during an update", "U-47", "No group can be formed while an update is open.", refuses_a_group),
    Mutant(
        "resume after a torn load",
        "U-48",
        "Buckets are applied as they arrive, and the endpoint keeps serving after an abort.",
        applies_as_they_arrive,
    ),
    Mutant("abort after the receive", "U-49", "An abort waits for a pending bucket.", aborts_after_the_receive),
    Mutant("pause for nobody", "U-50", "A drain whose caller has disconnected never ends.", drains_for_nobody),
    Mutant(
        "outlives its launcher",
        "U-51",
        "The process that was started is not the process that serves.",
        outlives_its_launcher,
        over_http=True,
    ),
    Mutant(
        "lease lost in sleep",
        "U-52",
        "After the process has been stopped and continued, a lease never expires.",
        with_a_lease_that(lambda _, passed_s: passed_s < 0.8),
        over_http=True,
    ),
    Mutant(
        "early under load",
        "U-53",
        "While many requests run, a pause is acknowledged half a second early.",
        pausing(acknowledged_under_load),
    ),
    Mutant("check, then act", "U-54", "Two concurrent updates both find no open update.", looks_and_then_takes),
    Mutant(
        "outdated answer",
        "U-55",
        "An abort returns the version that was served before the abort took effect.",
        returns_the_first_version_read,
    ),
    Mutant("tired of pauses", "U-56", "The thirteenth pause ends running requests.", tires_of_pauses),
    Mutant("deaf while paused", "U-57", "Requests cannot be cancelled during a pause.", deaf_while_paused),
    Mutant(
        "deaf to waiting requests while paused",
        "U-57",
        "Requests that wait cannot be cancelled during a pause.",
        forgets_waiting_requests_while_paused,
    ),
    Mutant("one count for all runs", "U-58", "Versions are compared across runs.", compares_versions_of_any_run),
    Mutant(
        "requests left waiting",
        "U-37",
        "When loading weights fails, running requests never end.",
        leaves_requests_waiting,
    ),
    Mutant(
        "scores left waiting",
        "U-37",
        "When loading weights fails, waiting score requests never end.",
        leaves_scores_waiting,
    ),
    Mutant(
        "poisoned in name only",
        "U-37",
        "When loading weights fails, the endpoint continues to generate.",
        poisoned_in_name_only,
    ),
    Mutant(
        "healed by an abort",
        "U-37",
        "The abort of a later update makes an endpoint with torn weights READY.",
        healed_by_an_abort,
    ),
)
