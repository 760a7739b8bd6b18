"""Gathering: the message that announces a worker's weights, and the role of each rank in publishing or storing them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from inflight.base.shortened import shortened
from inflight.base.validation import describe_problems
from inflight.contracts import LoraSource, PartialWeightSource, ShardedWeightSource, WeightSource
from inflight.errors import ConfigError, TrainerError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.encode.parts import part_specs
from inflight.wire import InFlightPolicy, Manifest, TensorSpec, WeightUpdate

_LEASE_SLACK_S = 5.0
"""How long after the deadline, in seconds, an endpoint keeps an update open if the publisher makes no call."""
_PREPARATION_SHARE = 0.9
"""Share of the time until the deadline within which endpoints must prepare. A longer drain would leave no time to send
the weights.
"""


def weight_update_of(
    worker: WeightSource,
    *,
    run_id: str,
    incarnation: int,
    bucket_bytes: int,
    deadline_s: float,
    in_flight: InFlightPolicy = InFlightPolicy.KEEP,
    encoding: Rounding = "raw",
    keep: bool = False,
    version: int | None = None,
    sharded: bool = False,
) -> WeightUpdate:
    """Return the message that announces the worker's current weights as a new session.

    If ``version`` is None, the worker's version is used. ``sharded`` announces that every rank sends its own part of
    each bucket. Raises `ConfigError` if the message would be invalid, for example because a version is negative.
    """
    specs = tuple(worker.parameter_specs())
    frozen = tuple(worker.frozen_names()) if isinstance(worker, PartialWeightSource) else ()
    lora = worker.lora_spec() if isinstance(worker, LoraSource) else None
    of_tensors = worker.shardings() if sharded and isinstance(worker, ShardedWeightSource) else ()
    shardings = tuple(dict.fromkeys(of_tensors))
    index_of = {sharding: index for index, sharding in enumerate(shardings)}
    try:
        return WeightUpdate(
            run_id=run_id,
            version=worker.version if version is None else version,
            session_id=uuid.uuid4().hex[:16],
            incarnation=incarnation,
            manifest=Manifest(
                tensors=specs,
                frozen=frozen,
                lora=lora,
                shardings=shardings,
                sharding_of=tuple(index_of[sharding] for sharding in of_tensors),
            ),
            buckets=plan_buckets(specs, bucket_bytes),
            in_flight=in_flight,
            encodings=() if encoding == "raw" else (encoding,),
            keep=keep,
            deadline_s=deadline_s * _PREPARATION_SHARE,
            lease_s=deadline_s + _LEASE_SLACK_S,
        )
    except ValidationError as error:
        raise ConfigError(f"these weights cannot be published: {describe_problems(error)}") from error


def gather_only(worker: WeightSource, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
    """Take part in gathering a version that rank 0 publishes or stores. Every other rank calls this.

    ``bucket_bytes`` must be the same as on rank 0. Raises the errors of gathering.
    """
    gather_rest(worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes)))


def gather_rest(gathered: Iterator[WeightBucket]) -> None:
    """Gather the remaining buckets, because the other ranks are waiting for them."""
    for _ in gathered:
        pass


def require_announced(gathered: Iterator[WeightBucket], update: WeightUpdate) -> Iterator[WeightBucket]:
    """Yield the gathered buckets. Raises `TrainerError` if they do not match ``update``."""
    num_gathered = 0
    for bucket in gathered:
        if bucket.index != num_gathered or bucket.index >= len(update.buckets):
            raise TrainerError(
                f"the worker yielded bucket {bucket.index}, but bucket {num_gathered} of {len(update.buckets)} is next"
            )
        announced = update.buckets[bucket.index]
        specs: Sequence[TensorSpec] = update.manifest.tensors[announced.start : announced.stop]
        if update.manifest.shardings:
            specs = part_specs(update.manifest, announced, 0)
        found = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in bucket.tensors]
        wanted = [(spec.shape, str(spec.dtype)) for spec in specs]
        if found != wanted:
            raise TrainerError(
                f"bucket {bucket.index} contains the tensors {shortened(found)}, but parameter_specs announced "
                f"{shortened(wanted)}"
            )
        num_gathered += 1
        yield bucket
    if num_gathered != len(update.buckets):
        raise TrainerError(f"the worker yielded {num_gathered} buckets, but {len(update.buckets)} were requested")
