"""Level ``weights``: updates that consist of a LoRA."""

from __future__ import annotations

import torch

from inflight.conformance.checks import check, look_at
from inflight.conformance.endpoint.aftermath import require_old_weights
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceWeights
from inflight.weights.encode.lora_tensors import lora_names
from inflight.wire import LoraSpec

LEVEL = "weights"
SPEC = LoraSpec(rank=3, alpha=4.0)
"""Rank and alpha of the LoRAs that checks publish. Their quotient is not an integer."""
_LOWER, _RANK_STABILIZED = LoraSpec(rank=1, alpha=1.5), LoraSpec(rank=3, alpha=3.0, rslora=True)
"""The settings of a LoRA that replaces one of a higher rank, and of one whose scale is alpha divided by the square root
of the rank."""
_FIRST, _SECOND = (".q_proj", ".down_proj"), (".q_proj", ".o_proj")
"""Suffixes of the names of the layers that the two LoRAs of a check change."""


@check("U-64", "updates lora", deadline_s=60)
@look_at(
    "the scale alpha / rank, whether a LoRA is merged into weights without any, and whether layers that the next "
    "LoRA or update omits are as they were without a LoRA"
)
async def loras(subject: EndpointSubject) -> None:
    """After an update that consists of a LoRA, logprobs are those of the weights with the LoRA added; the next LoRA
    replaces it, even with a lower rank, and an update of other tensors removes it."""
    publisher, reference = subject.publisher, subject.reference
    base = reference.perturbed("B")  # the weights of the last update, not those of the checkpoint
    await publisher.publish(base, keep=True)
    for ends, seed, spec in (
        *((_FIRST, 1, SPEC), (_SECOND, 2, SPEC), (_SECOND, 4, _LOWER)),
        (_FIRST, 5, _RANK_STABILIZED),
    ):
        lora = make_lora(base, seed, ends, spec)
        await publisher.publish(lora, lora=spec)
        await subject.require_serves(merge_lora(base, lora, spec), f"after {lora.label} with {spec}")
    whole = reference.with_final_norm(0.5, "A with its final norm halved")  # larger logits round more
    await publisher.publish(whole, keep=True)
    await subject.require_serves(whole, "after an update of all weights that follows a LoRA")
    served = await publisher.publish(whole, keep=True, session_id="base")
    lora = make_lora(base, 3)
    await publisher.publish(lora, lora=SPEC)
    await subject.require_serves(merge_lora(whole, lora), "after a LoRA that follows an update of all weights")
    kept = (await subject.endpoint.weight_version()).kept
    if "delta" in subject.capabilities.encodings and kept is not None and kept == served.kept:
        negated = reference.with_final_norm(-1.0, "A with its final norm halved and negated", whole)
        delta = await publisher.request(negated, encodings=("delta",), base=kept)
        await publisher.send_all(delta, negated, whole)
        await publisher.commit(delta)
        await subject.require_serves(negated, "after a delta to an update that was kept before the LoRA")
    await publisher.publish(reference.weights, keep=True)


@check(
    "U-65", "updates lora", look_at="whether pairs, ranks, names and products are compared before anything is received"
)
async def loras_that_do_not_fit(subject: EndpointSubject) -> None:
    """A LoRA of a layer that the model does not have, of another shape, or without one of its halves is refused when it
    is requested, and the old weights stay in service."""
    base = subject.reference.weights
    good = make_lora(base, 1).tensors
    a, b = list(good)[:2]
    faults = {
        "of a layer that the model does not have": {
            part.replace("_proj.", "_nowhere."): tensor for part, tensor in good.items()
        },
        "of another shape": {**good, a: good[a][:, :-1].contiguous()},
        "without one of its halves": {name: tensor for name, tensor in good.items() if name != b},
    }
    await subject.publisher.form_group()
    for what, tensors in faults.items():
        update = subject.publisher.announcement(ReferenceWeights(f"a LoRA {what}", tensors), lora=SPEC)
        await subject.require_refused(subject.endpoint.request_weight_update(update), f"a LoRA {what}")
        await require_old_weights(subject, f"after a LoRA {what} was refused")


def make_lora(
    base: ReferenceWeights, seed: int, ends: tuple[str, ...] = _FIRST, spec: LoraSpec = SPEC
) -> ReferenceWeights:
    """Return a random LoRA whose changes have about a third of the standard deviation of the changed weights."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in base.tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith(ends) and weight.dim() == 2:
            num_out, num_in = weight.shape
            size = float(weight.double().std()) / (3 * spec.scale * spec.rank**0.5)
            a, b = lora_names(module)
            tensors[a] = torch.randn(spec.rank, num_in, generator=random, dtype=torch.float64).to(weight.dtype)
            tensors[b] = (size * torch.randn(num_out, spec.rank, generator=random, dtype=torch.float64)).to(
                weight.dtype
            )
    return ReferenceWeights(f"a LoRA of {', '.join(end.removeprefix('.') for end in ends)}", tensors)


def merge_lora(base: ReferenceWeights, lora: ReferenceWeights, spec: LoraSpec = SPEC) -> ReferenceWeights:
    """Return the weights with a LoRA added."""
    tensors = dict(base.tensors)
    for name, weight in base.tensors.items():
        a, b = (lora.tensors.get(part) for part in lora_names(name.removesuffix(".weight")))
        if a is not None and b is not None:
            tensors[name] = (weight.double() + spec.scale * (b.double() @ a.double())).to(weight.dtype)
    return ReferenceWeights(f"{base.label} and {lora.label}", tensors)
