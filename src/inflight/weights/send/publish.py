"""Publishing: gather from the workers, move, commit on the endpoints, and report what each of them serves.

This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from inflight.base.requirements import require
from inflight.contracts import InferenceEndpoint, MergingLoraSource, WeightSource
from inflight.errors import ConfigError, PublishError
from inflight.types import PublishReport
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.send.gathering import announcement, as_announced, exhaust
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.send.session import publish
from inflight.wire import Capabilities, InFlightPolicy, Needs

__all__ = ["WeightPublisher", "publish_weights"]


def publish_weights(
    worker: WeightSource,
    publisher: WeightPublisher,
    *,
    endpoints: Mapping[InferenceEndpoint, Capabilities] | None = None,
    in_flight: InFlightPolicy | Literal["keep", "recompute", "drain", "abort"] = InFlightPolicy.KEEP,
    deadline_s: float = 60.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    quorum: int | None = None,
    keep_base: bool = False,
) -> PublishReport:
    """Bring every endpoint to the worker's present weights, between two token steps; return what each serves.

    Rank 0 calls it while every other rank calls `gather_only`. The version is ``worker.version``. ``endpoints`` maps
    the endpoints to publish to onto what each declares; None means the endpoints that ``publisher`` was connected to.

    Endpoints that declare staging keep sampling until every bucket has arrived everywhere; the others are paused once
    the first bucket is gathered. Each bucket is gathered while the one before travels. The call ends within
    ``deadline_s`` seconds plus the time that gathering takes, and a few seconds to clean up.

    ``quorum`` is how many endpoints have to apply the update, None for all of them. With a transport that is not
    collective, an endpoint that fails is left behind while the others go on. With a collective transport, a failure
    before the commit ends the publish for all.

    ``keep_base`` makes endpoints keep these weights in host memory. Engines that fuse tensors need them if a later
    update is a LoRA or leaves some weights out, unless the weights are those of their checkpoint.

    A LoRA goes to endpoints that declare ``lora``. If one of them declares partial updates only, a `MergingLoraSource`
    sends the weights that its LoRA changes to all of them, from then on.

    Raises `PublishError` if fewer endpoints applied the update; its report names each endpoint's state. `ConfigError`
    and `UnsupportedError` mean that no endpoint was asked for anything, `FencedError` that another trainer has taken
    this one's place. Errors of gathering pass through. Whatever is raised, the collective gather was completed on every
    rank, and no endpoint stays paused: reachable endpoints were told to abort, the others resume by themselves when
    their lease ends.
    """
    source = _source(worker, publisher, endpoints, bucket_bytes)
    gathered = source.gather_weights(plan_buckets(source.parameter_specs(), bucket_bytes))
    try:
        if worker.rank != 0:
            raise ConfigError(f"publish_weights is for rank 0; rank {worker.rank} calls gather_only(worker)")
        endpoints = publisher.endpoints if endpoints is None else endpoints
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, not {deadline_s}")
        if quorum is not None and not quorum >= 1:
            raise ConfigError(f"quorum must be at least 1, not {quorum}")
        if in_flight not in list(InFlightPolicy):
            raise ConfigError(f"in_flight must be one of {', '.join(InFlightPolicy)}, not {in_flight!r}")
        update = announcement(
            source,
            run_id=publisher.run_id,
            incarnation=publisher.incarnation,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            in_flight=InFlightPolicy(in_flight),
            encoding=publisher.encoding,
            keep=keep_base,
        )
        needs = replace(Needs.of_update(update), encodings=tuple(publisher.encodings), staging=False)
        for endpoint, can in endpoints.items():
            require(can, needs, endpoint.name)
        num_needed = len(endpoints) if quorum is None else quorum
        report = publish(publisher, endpoints, update, as_announced(gathered, update), deadline_s, num_needed)
    finally:
        exhaust(gathered)
    if not report.succeeded:
        whom = "every endpoint" if quorum is None else f"{quorum} endpoints"
        raise PublishError(f"the publish did not reach {whom}: {report.summary()}", report)
    return report


def _source(
    worker: WeightSource,
    publisher: WeightPublisher,
    endpoints: Mapping[InferenceEndpoint, Capabilities] | None,
    bucket_bytes: int,
) -> WeightSource:
    """Return the worker, or the merged weights of its LoRA if an endpoint takes no LoRA but partial updates.

    Once merged weights have been published they are the base of any LoRA that follows, so they are published from then
    on.
    """
    if not isinstance(worker, MergingLoraSource) or worker.rank != 0:
        return worker
    declared = (publisher.endpoints if endpoints is None else endpoints).values()
    if not publisher.merges_lora and all(can.lora for can in declared):
        return worker
    if not all(can.partial_updates for can in declared):
        return worker
    publisher.merges_lora = True
    return worker.merged(bucket_bytes)
