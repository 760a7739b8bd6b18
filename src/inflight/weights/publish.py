"""Publishing: gather from the workers, move, commit on the endpoints, and a statement of who serves what.

This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from inflight.contracts import WeightSource
from inflight.errors import ConfigError, PublishError, UnsupportedError
from inflight.types import PublishReport, WeightBucket
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.outgoing import announcement, as_announced
from inflight.weights.publish_session import publish
from inflight.weights.publisher import WeightPublisher
from inflight.wire import InFlightPolicy, WeightUpdate

__all__ = ["WeightPublisher", "publish_weights"]


def publish_weights(
    worker: WeightSource,
    publisher: WeightPublisher | None,
    *,
    in_flight: InFlightPolicy | Literal["keep", "recompute", "drain", "abort"] = InFlightPolicy.KEEP,
    deadline_s: float = 60.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    quorum: int | None = None,
    keep_base: bool = False,
) -> PublishReport | None:
    """Bring every endpoint to the worker's present weights, between two token steps; returns who serves what.

    Every rank calls it: rank 0 with a connected publisher, the others with None, which gather and return None. The
    version is ``worker.version``. Endpoints that declare staging sample on until every bucket has arrived everywhere;
    the others are held once the first bucket is gathered. Later buckets are gathered while the one before travels. Ends
    within ``deadline_s`` seconds plus the time that gathering takes, and a few seconds to clean up.

    ``quorum`` is how many endpoints have to apply the update, None for all of them. With a transport that is not
    collective, one that fails is left behind while the others go on; with one that is, its failure before the commit
    ends the publish for all.

    ``keep_base`` has endpoints keep what they are sent, in host memory. Engines that fuse tensors need that of weights
    that are not their checkpoint's, if a later update leaves some of them out, or is an adapter.

    Raises `PublishError` on rank 0 if fewer applied the update; its report names each endpoint's state. `ConfigError`
    and `UnsupportedError` mean that no endpoint was asked for anything, `FencedError` that another trainer has taken
    this one's place; what gathering raises is raised. Whatever is raised, the collective gather was completed on every
    rank, and no endpoint is left held: those that can be reached were told to abort, the others release themselves when
    their lease ends.
    """
    gathered = worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes))
    if worker.rank != 0:
        _exhaust(gathered)
        return None
    try:
        if publisher is None:
            raise ConfigError("publish_weights needs a WeightPublisher on rank 0")
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, not {deadline_s}")
        if quorum is not None and not quorum >= 1:
            raise ConfigError(f"quorum must be at least 1, not {quorum}")
        update = announcement(
            worker,
            run_id=publisher.run_id,
            epoch=publisher.epoch,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            in_flight=_policy(in_flight),
            encodings=() if publisher.encoding == "raw" else (publisher.encoding,),
            keep=keep_base,
        )
        _require_declared(update, publisher)
        num_needed = len(publisher.members) if quorum is None else quorum
        report = publish(publisher, update, as_announced(gathered, update), deadline_s, num_needed)
    finally:
        _exhaust(gathered)
    if not report.succeeded:
        raise PublishError(f"the publish did not reach {_who(quorum)}: {report.summary()}", report)
    return report


def _who(quorum: int | None) -> str:
    return "every endpoint" if quorum is None else f"{quorum} endpoints"


def _exhaust(gathered: Iterator[WeightBucket]) -> None:
    for _ in gathered:
        pass


def _policy(name: str) -> InFlightPolicy:
    if name not in list(InFlightPolicy):
        raise ConfigError(f"in_flight must be one of {', '.join(InFlightPolicy)}, not {name!r}")
    return InFlightPolicy(name)


def _require_declared(update: WeightUpdate, publisher: WeightPublisher) -> None:
    """Raise `UnsupportedError` unless every endpoint declares what the update asks for."""
    for name, can in publisher.capabilities.items():
        lack = can.lacks(
            in_flight=update.in_flight,
            encodings=publisher.encodings,
            partial_updates=bool(update.manifest.frozen),
            adapters=update.manifest.adapter is not None,
        )
        if lack is not None and name in publisher.endpoints:
            raise UnsupportedError(f"{name} does not declare {lack}")
