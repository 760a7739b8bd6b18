"""The causes of differences between an engine's logprobs and a trainer's, and how experiments identify them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inflight.base.shortened import shortened
from inflight.doctor.experiments import Examination


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause, and how to fix it."""

    number: int
    name: str
    fix: str


CAUSES = {
    cause.number: cause
    for cause in (
        Cause(
            0,
            "the trainer computes something else",
            "compare the trainer with transformers: inflight check worker, inflight check parity",
        ),
        Cause(
            1,
            "a cache outlives the update",
            "reset the prefix cache at every update, or include the version of the weights in its key",
        ),
        Cause(
            2,
            "weights are not loaded",
            "check which names the engine's loader accepts, and that it reports names that it skips",
        ),
        Cause(
            3,
            "the loader changes what it loads",
            "load into untransformed parameters and repeat the engine's own processing after each update",
        ),
        Cause(
            4,
            "tied or fused tensors keep a stale copy",
            "update every copy of a tied tensor, such as a cached or converted head",
        ),
        Cause(
            5,
            "temperature or filters are applied on one side only",
            "make the engine return processed logprobs, and the trainer apply the same temperature and filters",
        ),
        Cause(
            6, "the head computes in lower precision", "compute the head and the log-softmax in float32 on both sides"
        ),
        Cause(
            7,
            "experts are routed differently",
            "replay the engine's routing in the trainer (routed_experts), or compute the router in float32",
        ),
        Cause(
            8,
            "kernels depend on the batch or the position",
            "use batch-invariant kernels, and disable cascade attention and chunked prefill to find the kernel",
        ),
        Cause(
            9,
            "the rollout is quantized",
            "quantize the same values on both sides, and recompute the scales at every update",
        ),
        Cause(
            10,
            "versions or tokens are labelled wrongly",
            "record the version in the step that samples a token, and send token ids instead of texts",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that the experiments identified."""

    cause: Cause
    evidence: str
    where: str = ""
    """The tensor, part or setting, if the experiments identify it."""


def diagnose(found: Examination) -> list[Finding]:
    """Return the causes that explain the results, most likely first; the list is empty if the pair is healthy."""
    findings = list(_findings(found))
    if not findings and found.wrong_spans is not None:  # this check compares logprobs, so other causes affect it too
        findings.append(Finding(CAUSES[10], found.wrong_spans))
    return findings


def _findings(found: Examination) -> Iterator[Finding]:
    limits, same = found.limits, found.same
    differs = limits.exceeded_by(same.same_weights)
    if not differs and limits.exceeded_by(found.before):
        yield Finding(
            CAUSES[3],
            f"logprobs of the weights that the engine was started with differ by {found.before.mean:.3g} nats on "
            f"average; after an update with those of the checkpoint, they differ by {same.same_weights.mean:.3g}: "
            "the engine was started from another checkpoint, or changes it while loading",
            "the initial load",
        )
    if (filters := found.filters) is not None and filters.filtered > limits.mean and not differs:
        kind = "those of the unfiltered distribution" if filters.unfiltered <= limits.mean else "neither"
        yield Finding(
            CAUSES[5],
            f"under top-k, logprobs differ by {filters.filtered:.3g} nats on average from those of the filtered "
            f"distribution; they are {kind}",
            "top-k",
        )
    if limits.exceeded_by(same.other_temperature) and not differs:
        yield Finding(
            CAUSES[5],
            f"at temperature 0.7, logprobs differ by {same.other_temperature.mean:.3g} nats on average; from "
            f"logprobs at temperature 1 they differ by {same.unscaled.mean:.3g}",
            "temperature",
        )
    if differs:
        yield from _constant_difference(found)
        return
    if limits.exceeded_by(same.together) and same.together.mean > 4 * same.same_weights.mean:
        yield Finding(
            CAUSES[8],
            f"when requested concurrently, the same prompts differ by {same.together.mean:.3g} nats on average; one "
            f"after another, they differ by {same.same_weights.mean:.3g}",
            "the batch",
        )
        return
    if limits.exceeded_by(same.after_updates):
        yield Finding(
            CAUSES[3],
            f"after {same.num_updates} updates with unchanged weights, the mean difference is "
            f"{same.after_updates.mean:.3g} nats; after the first one, it is {same.same_weights.mean:.3g}",
        )
        return
    if (prefix := found.prefix) is not None and prefix.is_stale(limits):
        yield Finding(
            CAUSES[1],
            f"after an update, a prompt that was sampled before differs by {prefix.shared:.3g} nats on average; a "
            f"prompt with another first token differs by {prefix.fresh:.3g}",
        )
        return
    if found.lost is not None:
        yield _lost(found)
        return
    if limits.exceeded_by(found.again):
        yield Finding(
            CAUSES[2],
            f"after an update and another back to the checkpoint, logprobs differ by {found.again.mean:.3g} nats on "
            "average: parts of the first update remain",
        )


def _constant_difference(found: Examination) -> Iterator[Finding]:
    """Yield the cause of a difference that appears although both sides have the same weights."""
    limits, same = found.limits, found.same
    size = f"with the same weights, logprobs differ by {same.same_weights.mean:.3g} nats on average"
    engine, trainer = same.engine, same.trainer
    if trainer.from_reference > limits.mean >= engine.from_reference:
        yield Finding(
            CAUSES[0],
            f"{size}; the engine's differ from transformers' by {engine.from_reference:.3g}, the trainer's by "
            f"{trainer.from_reference:.3g}",
        )
        return
    if not limits.exceeded_by(found.before):
        yield Finding(
            CAUSES[3],
            f"{size} after an update with the weights that the engine was started with; before it, by "
            f"{found.before.mean:.3g}",
        )
        return
    if not limits.exceeded_by(same.unscaled):
        yield Finding(CAUSES[5], f"{size}, but not from those at another temperature", "temperature")
        return
    nearest, gap = min(engine.from_rounded.items(), key=lambda it: it[1])
    if gap < engine.from_reference / 4:
        yield Finding(
            CAUSES[6],
            f"{size}; the engine's differ by only {gap:.3g} from transformers' with logits in {nearest}",
            f"the head in {nearest}",
        )
        return
    if found.equal_experts is not None and not limits.exceeded_by(found.equal_experts):
        yield Finding(
            CAUSES[7], f"{size}; with equal experts in each layer, by {found.equal_experts.mean:.3g}", "the router"
        )
        return
    if found.two_levels is not None and found.two_levels.mean < same.same_weights.mean / 4:
        yield Finding(
            CAUSES[9],
            f"{size}; with matrices of two values, which a quantization represents exactly, by "
            f"{found.two_levels.mean:.3g}",
        )
        return
    first, *_, last = same.quarters
    grows = f"; from the first to the last quarter of the completions it grows from {first:.3g} to {last:.3g}"
    yield Finding(CAUSES[8], size + (grows if last > 2 * first else ""), "positions" if last > 2 * first else "")


def _lost(found: Examination) -> Finding:
    """Return the cause if changes of some tensors do not arrive at the endpoint."""
    limits, lost = found.limits, found.lost or ()
    size = f"after an update of every tensor, logprobs differ by {found.changed.mean:.3g} nats on average"
    if not lost or len(lost) == found.num_tensors:
        return Finding(CAUSES[2], f"{size}, although logprobs under the checkpoint agree", "all tensors")
    where = shortened(lost, 3)
    if all(_is_embedding(name) for name in lost):
        return Finding(CAUSES[4], f"{size}; an update of {where} alone does not take full effect", where)
    if found.louder is not None and not limits.exceeded_by(found.louder):
        return Finding(CAUSES[2], f"{size}; only small changes of {where} are lost", where)
    return Finding(CAUSES[2], f"{size}; an update of {where} alone does not take effect", where)


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))
