"""The kinds of update that an endpoint may support; what must hold after an update must hold after every kind.

Updates other than LoRAs change all tensors except the query projections. Query projections keep the checkpoint's
values, so a partial update may freeze them at any time. LoRAs do change query projections, and a partial update must
remove that change. Every kind changes keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inflight.conformance.endpoint.encodings import rounded_to_float8
from inflight.conformance.endpoint.loras import make_lora, merge_lora
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceWeights
from inflight.wire import Encoding, InFlightPolicy, LoraSpec, UpdateRef, WeightUpdate


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """How an update is sent, and which part of the weights it contains."""

    name: str
    """The name with an article, for use in messages."""
    staged: bool = False
    is_partial: bool = False
    encoding: Encoding | None = None
    lora: LoraSpec | None = None
    num_senders: int = 1


_PLAIN, _RANK_STABILISED = LoraSpec(rank=3, alpha=6.0), LoraSpec(rank=3, alpha=3.0, rslora=True)
_DECODED: dict[Encoding, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda tensor: tensor.bfloat16().to(tensor.dtype),
    "float8": rounded_to_float8,
}
"""Functions that return what an endpoint loads for a tensor that is rounded in transit, by encoding."""
_KINDS = (
    UpdateKind("an update of all weights"),
    UpdateKind("a delta", encoding="delta"),
    UpdateKind("a LoRA", lora=_PLAIN),
    UpdateKind("an update in part", is_partial=True),
    UpdateKind("a rank-stabilized LoRA", lora=_RANK_STABILISED),
    UpdateKind("a staged update of all weights", staged=True),
    UpdateKind("a staged delta", staged=True, encoding="delta"),
    UpdateKind("a staged LoRA", staged=True, lora=_PLAIN),
    UpdateKind("a staged update in part", staged=True, is_partial=True),
    UpdateKind("a LoRA in bfloat16", encoding="bfloat16", lora=_PLAIN),
    UpdateKind("an update in bfloat16", encoding="bfloat16"),
    UpdateKind("a staged update in float8", staged=True, encoding="float8"),
    UpdateKind("an update of two senders", num_senders=2),
)
"""Ordered so that LoRAs are followed by partial and full updates, staged and unstaged, which must remove them."""


def supported_kinds(subject: EndpointSubject, turn: int = 0) -> list[UpdateKind]:
    """Return the kinds of update that the endpoint supports, in an order in which they can follow one another.

    For a slow endpoint, only every third kind is returned, beginning with the one at index ``turn``, and the evidence
    lists them. Checks pass different turns, so that together they cover all kinds.
    """
    can = subject.capabilities
    kinds = [
        kind
        for kind in _KINDS
        if (not kind.staged or can.staging)
        and (not kind.is_partial or can.partial_updates)
        and (kind.encoding is None or kind.encoding in can.encodings)
        and (kind.lora is None or can.lora)
        and (kind.num_senders == 1 or can.sharded)
    ]
    if subject.pace.is_slow:
        kinds = kinds[turn % min(3, len(kinds)) :: 3]
        subject.note(**{f"kinds of update (turn {turn}), because the endpoint is slow": [kind.name for kind in kinds]})
    return kinds


@dataclass(frozen=True, slots=True)
class OpenUpdate:
    """An update that has been sent completely, and the weights after its commit."""

    kind: UpdateKind
    update: WeightUpdate
    publisher: SteppedPublisher
    base: ReferenceWeights
    """The weights without a LoRA."""
    served: ReferenceWeights


class UpdateChain:
    """A sequence of updates of any kinds in one run, and the weights that the endpoint serves after each update.

    Before the first update, it serves the checkpoint's weights.
    """

    def __init__(self, subject: EndpointSubject) -> None:
        self._subject = subject
        self._senders: dict[int, SteppedPublisher] = {1: subject.publisher}
        self._num_sent = 0
        self._kept: tuple[UpdateRef, ReferenceWeights] | None = None
        """The update to which a delta may be relative, and its weights."""
        self.base = self.served = subject.reference.weights
        self.published = {subject.publisher.version: self.served}
        """The weights of each version that was served."""

    async def publish(self, kind: UpdateKind, policy: InFlightPolicy) -> ReferenceWeights:
        """Update the endpoint; return the weights that it serves now."""
        return await self.commit(await self.send(kind, policy))

    async def send(self, kind: UpdateKind, policy: InFlightPolicy) -> OpenUpdate:
        """Announce an update of new weights, and send all of it."""
        if kind.encoding == "delta" and not await self._has_base():
            await self.publish(_KINDS[0], policy)
        publisher = self._publisher(kind.num_senders)
        weights = self._weights(f"version {publisher.version + 1} ({kind.name})")
        fields: dict[str, Any] = {"session_id": f"sent-{self._num_sent}", "in_flight": policy}
        fields["staged"] = kind.staged and policy is not InFlightPolicy.DRAIN  # publishers do not stage a drain
        sent, base, delta_base = weights, weights, None
        if kind.lora is not None:
            sent, base = make_lora(self.base, self._num_sent, spec=kind.lora), self.base
            weights = merge_lora(self.base, _decoded(sent, kind), kind.lora)
            fields["lora"] = kind.lora
        else:
            fields |= {"keep": True, "bucket_bytes": weights.size_bytes // 3}
        if kind.is_partial:
            changed = {name: tensor for name, tensor in weights.tensors.items() if _changes(name)}
            fields["frozen"] = tuple(name for name in weights.tensors if name not in changed)
            sent = ReferenceWeights(weights.label, changed)
        if kind.lora is None:
            # Tensors that are not sent keep their values, even if an earlier update has rounded them.
            weights = base = ReferenceWeights(weights.label, {**self.base.tensors, **_decoded(sent, kind).tensors})
        if kind.encoding == "delta":
            assert self._kept is not None
            fields["base"], delta_base = self._kept
        if kind.encoding is not None:
            fields["encodings"] = (kind.encoding,)
        update = await publisher.request(sent, **fields)
        await publisher.send_all(update, sent, delta_base)
        return OpenUpdate(kind, update, publisher, base, weights)

    async def commit(self, sent: OpenUpdate) -> ReferenceWeights:
        """Commit an update; return the weights that the endpoint serves now."""
        await sent.publisher.commit(sent.update)
        for publisher in self._senders.values():
            publisher.version = sent.update.version
        self.base, self.served = sent.base, sent.served
        self.published[sent.update.version] = sent.served
        is_whole = sent.kind.lora is None and not sent.kind.is_partial and sent.kind.encoding in (None, "delta")
        self._kept = (sent.update.ref, sent.base) if is_whole and sent.kind.num_senders == 1 else None
        return self.served

    async def _has_base(self) -> bool:
        """Return whether the endpoint has kept an update to which a delta may be relative."""
        kept = (await self._subject.endpoint.weight_version()).kept
        return self._kept is not None and self._kept[0] == kept

    def _publisher(self, num_senders: int) -> SteppedPublisher:
        """Return the publisher with this many senders.

        It forms a new group if another publisher was used last.
        """
        if num_senders not in self._senders:
            run_id = self._subject.publisher.run_id
            self._senders[num_senders] = self._subject.another_publisher(run_id=run_id, num_senders=num_senders)
        for num, publisher in self._senders.items():
            if num != num_senders:
                publisher.lose_group()
        return self._senders[num_senders]

    def _weights(self, label: str) -> ReferenceWeights:
        """Return new weights, whose keys and values differ from those of all weights that this chain has used."""
        self._num_sent += 1
        reference = self._subject.reference
        changed = reference.perturbed(label, seed=100 + self._num_sent).tensors
        kept = reference.weights.tensors
        return ReferenceWeights(label, {n: changed[n] if _changes(n) else kept[n] for n in kept})


def _decoded(sent: ReferenceWeights, kind: UpdateKind) -> ReferenceWeights:
    """Return what an endpoint loads for tensors that were sent."""
    if kind.encoding not in _DECODED:
        return sent
    return ReferenceWeights(sent.label, {name: _DECODED[kind.encoding](it) for name, it in sent.tensors.items()})


def _changes(name: str) -> bool:
    return ".q_proj." not in name
