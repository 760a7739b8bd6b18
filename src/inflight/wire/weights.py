"""Messages of weight updates: manifests, buckets, sessions, versions and the state of an endpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from inflight.wire.fields import Items, Natural, RunId, Seconds, WireModel, is_empty

DTYPE_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes of weights, with the size of one element in bytes."""


TransportName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""How weights are sent: the name of an `inflight.contracts.Transport`, such as ``gloo``."""


Encoding = Literal["raw", "bfloat16", "float8", "delta"]
"""How the tensors of a bucket are encoded as bytes; see `inflight.weights.encode.bucket_bytes`."""


class InFlightPolicy(StrEnum):
    """How running requests are treated when weights change."""

    KEEP = "keep"
    """Running requests pause, then continue with the KV cache that older weights computed."""
    RECOMPUTE = "recompute"
    """Running requests pause, then their KV cache is recomputed under the new weights."""
    DRAIN = "drain"
    """Running requests finish under the old weights; no request starts until the new weights are served."""
    ABORT = "abort"
    """Running requests end immediately with the tokens sampled so far and the finish reason ``abort``."""


class EndpointState(StrEnum):
    """States of an endpoint; `inflight.weights.receive.states` holds the transitions."""

    JOINING = "joining"
    READY = "ready"
    STAGING = "staging"
    """An update arrives while sampling continues from the old weights."""
    PAUSED = "paused"
    UPDATING = "updating"
    RELEASED = "released"
    """The endpoint's memory is released. It keeps its weights, but neither samples nor accepts updates until the memory
    is restored.
    """
    POISONED = "poisoned"


class TensorSpec(WireModel):
    """One tensor to load: its name in the checkpoint, dtype (a key of `DTYPE_SIZES`) and full unsharded shape.

    ``uint8`` is for the bytes of a whole bucket, which a transport moves as one tensor.
    """

    name: str = Field(min_length=1, max_length=1024)
    dtype: Literal["float64", "float32", "bfloat16", "float16", "uint8"]
    shape: Items[Natural] = Field(max_length=64)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the tensor on the wire, in bytes."""
        return self.num_elements * DTYPE_SIZES.get(self.dtype, 1)


class LoraSpec(WireModel):
    """A LoRA: each adapted weight is its base plus `scale` times B A.

    The base comes from the endpoint's last update that was not a LoRA, or else from the checkpoint that the endpoint
    was started from. The tensors of module M are named as PEFT saves them, ``base_model.model.M.lora_A.weight`` [rank,
    in] and ``base_model.model.M.lora_B.weight`` [out, rank], and change ``M.weight`` [out, in].
    """

    rank: int = Field(ge=1, le=2**31 - 1)
    alpha: float = Field(gt=0, le=1e6)
    rslora: bool = False
    """Whether the scale is divided by the square root of the rank (arXiv 2312.03732) instead of the rank."""

    @property
    def scale(self) -> float:
        """The factor by which the product of the two matrices is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


Range = tuple[Natural, Natural]
Box = Annotated[Items[Range], Field(max_length=64)]
"""A part of a tensor: where it starts and stops in each dimension."""
_MAX_BOXES = 1024
_MAX_SHARDINGS = 512
_MAX_COMPARED = 5_000
"""Maximum number of pairs of boxes that are compared for a tensor. Only boxes that share rows are compared, so this
suffices for 100 boxes that each span all rows.
"""


class Sharding(WireModel):
    """The boxes of a tensor that each sender sends. Together they cover each element of the tensor exactly once."""

    senders: Items[Items[Box]] = Field(min_length=2, max_length=_MAX_BOXES)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Return why the boxes do not cover a tensor of this shape exactly once; None if they do."""
        boxes = sorted(box for boxes in self.senders for box in boxes)
        for box in boxes:
            if len(box) != len(shape) or any(not a < b <= size for (a, b), size in zip(box, shape, strict=False)):
                return f"the box {list(box)} is empty or outside its shape {list(shape)}"
        num_compared = 0
        beside: list[Box] = []
        """The earlier boxes whose range in the first dimension overlaps that of the next box."""
        for box in boxes:
            beside = [other for other in beside if box and other[0][1] > box[0][0]]
            num_compared += len(beside)
            if num_compared > _MAX_COMPARED:
                return f"it is divided into too many boxes, {len(boxes)}"
            for other in beside:
                if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                    return f"the boxes {list(other)} and {list(box)} overlap"
            beside.append(box)
        num_sent, num_elements = sum(map(box_size, boxes)), math.prod(shape)
        if num_sent != num_elements:
            return f"its boxes cover {num_sent} of its {num_elements} elements"
        return None


def box_size(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


class Manifest(WireModel):
    """Every tensor of one update, in transfer order, and the names of the model's tensors that the update omits."""

    tensors: Items[TensorSpec] = Field(min_length=1)
    shardings: Items[Sharding] = Field(default=(), max_length=_MAX_SHARDINGS, exclude_if=is_empty)
    """How tensors are divided among several senders; if empty, one sender sends whole tensors."""
    sharding_of: Items[Natural] = Field(default=(), exclude_if=is_empty)
    """The index in ``shardings`` of each tensor's sharding."""
    lora: LoraSpec | None = None
    """Set if the tensors are those of a LoRA, which replaces the previous LoRA; None if they are the model's own."""
    frozen: Items[Annotated[str, Field(max_length=1024)]] = ()
    """Tensors of the model that are not sent because they are the same as in the checkpoint that every server was
    started from.
    """

    @model_validator(mode="after")
    def _lora_freezes_nothing(self) -> Manifest:
        if self.lora is not None and self.frozen:
            raise ValueError("a LoRA omits every other tensor: frozen must be empty")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Manifest:
        names = [*(tensor.name for tensor in self.tensors), *self.frozen]
        if len(set(names)) != len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"tensor names appear twice in the manifest: {twice[:5]}")
        return self

    @model_validator(mode="after")
    def _senders_send_every_element_once(self) -> Manifest:
        num_senders = {len(sharding.senders) for sharding in self.shardings}
        if len(num_senders) > 1:
            raise ValueError(f"shardings have different numbers of senders: {sorted(num_senders)}")
        if len(self.sharding_of) != (len(self.tensors) if self.shardings else 0):
            raise ValueError(
                f"sharding_of has {len(self.sharding_of)} entries for {len(self.tensors)} tensors and "
                f"{len(self.shardings)} shardings"
            )
        checked: set[tuple[int, tuple[int, ...]]] = set()
        for tensor, index in zip(self.tensors, self.sharding_of, strict=False):
            if index >= len(self.shardings):
                raise ValueError(f"{tensor.name} refers to sharding {index}, but there are only {len(self.shardings)}")
            if (index, tensor.shape) not in checked:
                if problem := self.shardings[index].problem(tensor.shape):
                    raise ValueError(f"{tensor.name} is not sent exactly once: {problem}")
                checked.add((index, tensor.shape))
        return self

    @property
    def num_senders(self) -> int:
        """The number of senders, each of which sends a part of every bucket."""
        return len(self.shardings[0].senders) if self.shardings else 1

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def digest(self) -> str:
        """SHA-256 over names, dtypes and shapes in order: equal digests mean equal layouts."""
        text = json.dumps([[t.name, t.dtype, list(t.shape)] for t in self.tensors], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class BucketSpec(WireModel):
    """Tensors ``start <= i < stop`` of the manifest, sent as one message of ``size_bytes`` bytes.

    The bytes are the tensors in manifest order, row-major, without gaps.
    """

    index: Natural
    start: Natural
    stop: Natural
    size_bytes: Natural


class TransportSpec(WireModel):
    """How weights reach one endpoint. Each transport adds the fields that its receivers need.

    ``incarnation`` is the number of times that a run's trainer was started: calls from a replaced incarnation are
    refused. ``others`` are the specs of additional senders, each of which sends a part of every bucket, see
    `Manifest.shardings`.
    """

    run_id: RunId
    incarnation: Natural = 0
    transport: TransportName
    timeout_s: Seconds
    others: Items[Self] = Field(default=(), max_length=_MAX_BOXES, exclude_if=is_empty)

    @model_validator(mode="after")
    def _others_have_no_others(self) -> Self:
        if any(other.others for other in self.others):
            raise ValueError("a sender in others cannot have others itself")
        return self

    @property
    def group(self) -> str:
        """The name that an engine gives to the group that it joined."""
        return f"{self.transport} of {self.run_id}"


class TransportBody(TransportSpec):
    """Body of ``/init_process_group``: how weights reach this endpoint from now on.

    Its other fields depend on the transport, whose `inflight.contracts.Transport.spec_type` defines them.
    """

    model_config = ConfigDict(extra="allow")


class UpdateMessage(WireModel):
    """The fields that every message about an update has."""

    run_id: RunId
    version: Natural
    session_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")

    @property
    def ref(self) -> UpdateRef:
        return UpdateRef(run_id=self.run_id, version=self.version, session_id=self.session_id)


class UpdateRef(UpdateMessage):
    """Identifies one update session: the target version, the run that owns it, and the attempt.

    A ``session_id`` makes every call of the session idempotent: a repeated or late call has no effect.
    Without a ``session_id``, only run and version distinguish updates.
    """


class WeightUpdate(UpdateMessage):
    """Announces an update before anything is sent. It is the only message that an endpoint may refuse.

    ``deadline_s`` limits the preparation on the endpoint (such as draining). ``lease_s`` is how long the endpoint keeps
    the update open without a call from the publisher. After that, the endpoint itself ends the update, and keeps the
    old weights if no byte was applied. If ``staged`` is false, sampling is paused when the update is accepted; if it is
    true, only the commit pauses sampling, so that sampling continues while buckets arrive. ``encodings`` lists the
    encodings that may be used in addition to ``raw``. ``delta`` is relative to the weights of the update ``base``,
    which the endpoint must have kept. ``keep`` asks the endpoint to keep the weights of this update for a later delta.
    """

    incarnation: Natural = 0
    manifest: Manifest
    buckets: Items[BucketSpec] = Field(min_length=1)
    in_flight: InFlightPolicy
    staged: bool = False
    encodings: Items[Encoding] = Field(default=(), max_length=64)
    base: UpdateRef | None = None
    keep: bool = False
    deadline_s: Seconds
    lease_s: Seconds

    @model_validator(mode="after")
    def _buckets_cover_the_manifest(self) -> WeightUpdate:
        edges = [0, *(bucket.stop for bucket in self.buckets)]
        if edges[-1] != len(self.manifest.tensors) or any(
            bucket.index != i or bucket.start != edges[i] or bucket.stop <= bucket.start
            for i, bucket in enumerate(self.buckets)
        ):
            raise ValueError("buckets must cover the manifest's tensors in order, without gap or overlap")
        for bucket in self.buckets:
            size_bytes = sum(t.size_bytes for t in self.manifest.tensors[bucket.start : bucket.stop])
            if size_bytes != bucket.size_bytes:
                raise ValueError(
                    f"bucket {bucket.index} announces {bucket.size_bytes} bytes, but its tensors have {size_bytes}"
                )
        return self

    @model_validator(mode="after")
    def _delta_has_a_base(self) -> WeightUpdate:
        if ("delta" in self.encodings) != (self.base is not None):
            raise ValueError("encoding delta requires a base, and a base requires encoding delta")
        return self


class SentBytes(WireModel):
    """One sender's part of a bucket.

    ``size_bytes`` is the number of bytes sent; None means the bucket's own size (``raw``). ``checksum`` is the XXH3-128
    of these bytes in hexadecimal digits, or ``sums64:`` and 32 hexadecimal digits for bytes that are sent from GPU to
    GPU; None if no checksum is compared. The checksum of a part also covers its place in the bucket, see
    `inflight.weights.encode.parts.places_of`.
    """

    encoding: Encoding = "raw"
    size_bytes: Natural | None = None
    checksum: str | None = Field(default=None, pattern=r"^(sums64:)?[0-9a-f]{32}$")


class BucketTransfer(UpdateMessage, SentBytes):
    """Asks the endpoint to receive one bucket now. The call returns once the bucket has arrived and been verified.

    If several senders send the bucket, ``parts`` describes what each of them sends, and ``encoding``, ``size_bytes``
    and ``checksum`` are not used.
    """

    bucket_index: Natural
    parts: Items[SentBytes] = Field(default=(), max_length=_MAX_BOXES, exclude_if=is_empty)
    timeout_s: Seconds


class UpdateTimings(WireModel):
    """The durations of the last committed update on this endpoint, in seconds."""

    paused_s: float = Field(ge=0)
    """From the moment sampling stopped until it was allowed again."""
    load_s: float = Field(ge=0)
    """The time it took to apply the received tensors to the model."""
    first_token_s: float | None = None
    """From the end of the pause to the first token of the new version; None until one is sampled."""


class WeightVersion(WireModel):
    """The weights that an endpoint serves, and the state of its updates."""

    state: EndpointState
    version: Natural
    """Version of the served weights; 0 if they are those of the checkpoint that the endpoint was started from."""
    run_id: str | None = None
    """Run that published the served version; None while the endpoint serves its checkpoint."""
    session_id: str = ""
    """Session that sent the served version; empty if the session had no id or has been forgotten."""
    owner_run_id: str | None = None
    """Run whose updates the endpoint accepts, or accepted most recently."""
    incarnation: Natural = 0
    """Highest incarnation of ``owner_run_id`` that the endpoint has seen."""
    incarnations: dict[str, Natural] = Field(default_factory=dict)
    """Highest incarnation of each of the 16 runs that called most recently, so that a run that returns after another
    one can begin a higher incarnation."""
    kept: UpdateRef | None = None
    """Update whose weights were kept as the base of a delta."""
    updating_to: Natural | None = None
    """Version of the open update; None if there is none."""
    num_running: Natural = 0
    """Number of sequences that are being sampled."""
    last_update: UpdateTimings | None = None
    """Durations of the last committed update; None if there was none or they were not measured."""
