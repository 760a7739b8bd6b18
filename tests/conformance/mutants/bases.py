"""Faults in what updates are added to: bases of deltas and LoRAs, encodings, and torn weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import inflight.engines.embedded.parameters
import inflight.http.server
import inflight.weights.receive.base_weights
import inflight.weights.receive.staging
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import (
    WeightUpdate,
)
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


def preparing(change: Callable[[EmbeddedEndpoint, WeightUpdate, list[Any]], list[Any]]) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        sink: Any = endpoint._sink
        own = sink._prepare
        sink._prepare = lambda update, arrived: own(update, change(endpoint, update, arrived))
        return endpoint

    return infect


vectors_rounded = preparing(
    lambda e, u, a: [
        (n, t.to(torch.float8_e4m3fn).to(t.dtype) if t.dim() == 1 and "float8" in u.encodings else t) for n, t in a
    ]
)


def noting(change: Callable[[Any, Any, Any], None]) -> Any:
    """Change what is kept once an update was committed: receives the sink, what was kept before, and the staging."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        sink: Any = endpoint._sink
        own = sink.note_committed

        def faulty() -> None:
            before, staging = sink._kept, sink._staging
            own()
            if before is not None and staging is not None:
                change(sink, before, staging)

        sink.note_committed = faulty
        return endpoint

    return infect


def _first_base(sink: Any, before: Any, staging: Any) -> None:
    if sink._kept is not None and staging.update.base is not None:
        sink._kept = dataclasses.replace(sink._kept, flats=before.flats)


def _moved_base(sink: Any, before: Any, staging: Any) -> None:
    if sink._kept is None:
        same = [f.numel() for f in staging._flats] == [f.numel() for f in before.flats]
        sink._kept = dataclasses.replace(before, flats=staging._flats) if same else before


def whole_scale(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(base: Any, a: Any, b: Any, lora: Any) -> torch.Tensor:
        scale = lora.scale if lora.rslora else float(lora.alpha // lora.rank)
        dtype = torch.promote_types(base.dtype, torch.float32)
        return (base.to(dtype) + scale * (b.to(dtype) @ a.to(dtype))).to(base.dtype)

    inflight.weights.receive.base_weights.merge_lora = faulty
    return endpoint


def lora_on_checkpoint(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    weights: Any = endpoint._engine.weights
    names = list(weights.by_name)
    first = {name: weights.stored.view(name, weights.by_name).detach().clone() for name in names}
    own = endpoint._adapted.prepare

    def faulty(manifest: Any, arrived: Any, present: Any) -> Any:
        if manifest.lora is not None:
            base, endpoint._adapted._base = (
                endpoint._adapted._base,
                {n: first[n] for n in endpoint._adapted._base if n in first},
            )
            try:
                return own(manifest, arrived, lambda n: first[n] if n in first else present(n))
            finally:
                endpoint._adapted._base = base
        return own(manifest, arrived, present)

    endpoint._adapted.prepare = faulty
    return endpoint


def unchecked_if(is_exempt: Callable[[WeightUpdate, Any], bool]) -> Any:
    """Ignore the checksums of some buckets: ``is_exempt`` receives the update and the transfer."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        staging: Any = inflight.weights.receive.staging.Staging
        own = staging._receive_checked

        def faulty(self: Any, receiver: Any, sent: Any, *others: Any, **named: Any) -> Any:
            if is_exempt(self.update, sent):
                sent = sent.model_copy(update={"checksum": None})
            return own(self, receiver, sent, *others, **named)

        staging._receive_checked = faulty
        return endpoint

    return infect


def experts_in_place(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Assemble the matrices of experts in the memory of the served ones."""
    stored: Any = inflight.engines.embedded.parameters.StoredTensors
    own = stored.assemble

    def faulty(self: Any, tensors: Any, present: Any) -> Any:
        assembled = own(self, tensors, present)
        return [
            (owner, whole if self._parts[owner] == (owner,) else present(owner).detach().copy_(whole))
            for owner, whole in assembled
        ]

    stored.assemble = faulty
    return endpoint


def receives_ahead_without_the_lease(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Wait for the next bucket only for the timeout of one transfer after the arrival of the previous bucket."""
    staging: Any = inflight.weights.receive.staging.Staging
    own = staging._receive_ahead

    def faulty(self: Any, receiver: Any, index: int, timeout_s: float, *others: Any) -> None:
        own(self, receiver, index, timeout_s - self.update.lease_s, *others)

    staging._receive_ahead = faulty
    return endpoint


@replaces("_updates._session._reason_to_refuse")
def unknown_frozen_accepted(endpoint: EmbeddedEndpoint, reason: Any, update: WeightUpdate) -> Any:
    manifest = update.manifest
    known = {t.name for t in endpoint._manifest.tensors}
    frozen = tuple(n for n in manifest.frozen if n in known)
    changed = update.model_copy(update={"manifest": manifest.model_copy(update={"frozen": frozen})})
    return reason(changed)


@replaces("_updates._session._reason_to_refuse")
def torn_takes_lora(endpoint: EmbeddedEndpoint, reason: Any, update: WeightUpdate) -> Any:
    text = reason(update)
    return None if text is not None and "a LoRA needs intact weights" in text else text


@replaces("_updates._session._makes_whole")
def torn_takes_parts(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> bool:
    return True


def delta_kept_early(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """An update is reported as kept as soon as it is requested."""
    own = endpoint.weight_version

    async def faulty() -> Any:
        found = await own()
        update = endpoint._updates.session.update
        return found.model_copy(update={"kept": update.ref}) if update is not None and update.keep else found

    endpoint.weight_version = faulty
    return endpoint


def lora_counts_as_kept(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """A LoRA that is committed drops the base of deltas, which is still reported."""
    sink: Any = endpoint._sink
    own = sink.note_committed

    def faulty() -> None:
        kept, staging = sink._kept, sink._staging
        own()
        if staging is not None and staging.update.manifest.lora is not None and kept is not None:
            sink._kept = dataclasses.replace(kept, flats=[torch.zeros_like(f) for f in kept.flats])

    sink.note_committed = faulty
    return endpoint


def stale_ranks(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Copy each LoRA into slots of the largest rank so far, without clearing them."""
    own, slots = endpoint._adapted.prepare, dict[str, torch.Tensor]()

    def in_slot(name: str, tensor: torch.Tensor) -> torch.Tensor:
        old, rank = slots.get(name), 0 if ".lora_A." in name else 1
        if old is not None and old.shape[rank] > tensor.shape[rank]:
            num = tensor.shape[rank]
            tensor = torch.cat([tensor, old.narrow(rank, num, old.shape[rank] - num)], dim=rank)
        slots[name] = tensor
        return tensor

    def faulty(manifest: Any, arrived: Any, present: Any) -> Any:
        if manifest.lora is not None:
            arrived = [(name, in_slot(name, tensor)) for name, tensor in arrived]
        return own(manifest, arrived, present)

    endpoint._adapted.prepare = faulty
    return endpoint


def some_experts_in_place(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Write the matrices of experts of an update in part into the served ones as they arrive."""
    stored: Any = endpoint._engine.weights.stored
    right = stored.assemble

    def faulty(tensors: Any, present: Callable[[str], torch.Tensor]) -> Any:
        sent = list(tensors)
        names = {name for name, _ in sent}
        assembled = right(sent, present)
        for owner, whole in assembled:
            if not set(stored._parts[owner]) <= names:
                present(owner).detach().copy_(whole)
        return assembled

    stored.assemble = faulty
    return endpoint


def experts_by_name(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    parts = endpoint._engine.weights.stored._parts
    parts.update({name: tuple(sorted(stored)) for name, stored in parts.items()})
    return endpoint


MUTANTS = (
    Mutant(
        "encoded buckets not compared",
        "U-14",
        "Checksums of encoded buckets are not compared.",
        unchecked_if(lambda _, sent: sent.encoding != "raw"),
    ),
    Mutant(
        "staged buckets not compared",
        "U-14",
        "Checksums of staged updates are not compared.",
        unchecked_if(lambda update, _: update.staged),
    ),
    Mutant(
        "deltas not compared",
        "U-14",
        "Checksums of deltas are not compared.",
        unchecked_if(lambda _, sent: sent.encoding == "delta"),
    ),
    Mutant(
        "LoRAs not compared",
        "U-14",
        "Checksums of LoRAs are not compared.",
        unchecked_if(lambda update, _: update.manifest.lora is not None),
    ),
    Mutant(
        "unknown frozen tensors accepted",
        "U-15",
        "Frozen tensors that the model does not have are ignored.",
        unknown_frozen_accepted,
    ),
    Mutant(
        "vectors rounded",
        "U-17",
        "After an update in float8, tensors of one dimension are rounded too.",
        vectors_rounded,
    ),
    Mutant(
        "first base of deltas", "U-18", "Every delta is applied to the update that was kept first.", noting(_first_base)
    ),
    Mutant(
        "base moved by others",
        "U-18",
        "An update that is not kept replaces the bytes of the one that is reported as kept.",
        noting(_moved_base),
    ),
    Mutant(
        "some experts in place",
        "U-76",
        "An update of some experts is written to the served ones before the commit.",
        some_experts_in_place,
    ),
    Mutant(
        "experts in order of their names",
        "U-76",
        "Updates arrange the experts of a layer by their numbers as text.",
        experts_by_name,
    ),
    Mutant(
        "experts in place",
        "U-76",
        "Matrices of experts are assembled in the memory of the served ones before the commit.",
        experts_in_place,
    ),
    Mutant(
        "next bucket awaited briefly",
        "U-44",
        "The receiver waits for a bucket that it receives ahead only for the timeout of the previous transfer.",
        receives_ahead_without_the_lease,
    ),
    Mutant("kept before the commit", "U-18", "An update is reported as kept while it is open.", delta_kept_early),
    Mutant(
        "base of deltas lost by a LoRA",
        "U-64",
        "A LoRA loses the base of deltas, which is still reported.",
        lora_counts_as_kept,
    ),
    Mutant("scale rounded down", "U-64", "The scale of a LoRA is alpha // rank.", whole_scale),
    Mutant(
        "LoRA added to the checkpoint",
        "U-64",
        "A LoRA is added to the checkpoint instead of the last update.",
        lora_on_checkpoint,
    ),
    Mutant("LoRA on torn weights", "U-37", "Torn weights accept a LoRA.", torn_takes_lora),
    Mutant("part on torn weights", "U-37", "Torn weights accept an update in part.", torn_takes_parts),
    Mutant(
        "ranks left over", "U-64", "Ranks of an earlier LoRA stay in use when one of a lower rank follows.", stale_ranks
    ),
)
