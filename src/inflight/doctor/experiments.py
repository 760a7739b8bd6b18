"""Experiments on a live pair of endpoint and trainer, using only what the contract provides.

Each experiment publishes known weights and compares logprobs, which separates the causes of a difference. Meanwhile,
the endpoint serves test weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from inflight.conformance.checks import CheckFailed
from inflight.conformance.endpoint.versions import check_spans, publish_next
from inflight.conformance.parity.figures import Figures, Limits, figures_of
from inflight.conformance.parity.measuring import PairMeasurements, measure
from inflight.conformance.parity.pair import Pair
from inflight.conformance.parity.served import check_served
from inflight.conformance.reference import ReferenceWeights, chosen, distribution
from inflight.wire import InFlightPolicy

NUM_UPDATES = 6
"""Number of updates with unchanged weights."""
_NUM_SPAN_UPDATES = 3
_MAX_PUBLISHES = 40
"""Maximum number of updates in the search for tensors whose changes do not arrive."""
_NUM_LOST_PARTS = 8
"""If there are at least this many parts and the changes of none arrive, the changes of all are considered lost."""
_RUNNING_S, _LEAST_TOKENS, _MOST_TOKENS = 5.0, 48, 600
"""How many seconds completions run while weights change, and their minimum and maximum number of tokens."""
_TOP_K = 8
_PREFIX_TOKENS = 192


@dataclass(frozen=True, slots=True)
class PrefixGap:
    """Mean differences, in nats, of two completions after an update: that of a prompt that was also sampled before the
    update, and that of a prompt that differs from it only in the first token."""

    shared: float
    fresh: float

    def is_stale(self, limits: Limits) -> bool:
        """Return whether ``shared`` is large because its prompt was also sampled before the update."""
        return self.shared > limits.mean and self.shared > 4 * self.fresh


@dataclass(frozen=True, slots=True)
class FilterGap:
    """Mean differences, in nats, between the logprobs of completions under top-k and reference logprobs with and
    without that filter."""

    filtered: float
    unfiltered: float


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of the experiments on one pair. None stands for an experiment that could not or need not be run."""

    dtype: str
    before: Figures
    """Differences before anything was published, compared with transformers (X0)."""
    same: PairMeasurements
    """Differences with the same weights on both sides, after one and after several publishes of them (X1)."""
    changed: Figures
    """Differences after an update that changes every tensor (X2)."""
    again: Figures
    """Differences after an update back to the checkpoint (X2)."""
    lost: Sequence[str] | None = None
    """Tensors whose changes do not arrive (X5); empty if the search did not isolate any."""
    num_tensors: int = 0
    louder: Figures | None = None
    """Differences after an update whose only change is that the first lost tensor is multiplied by eight."""
    filters: FilterGap | None = None
    prefix: PrefixGap | None = None
    equal_experts: Figures | None = None
    """Differences with equal experts and a router of zeros in each layer, so that routing cannot matter."""
    two_levels: Figures | None = None
    """Differences with matrices of two values, which every quantization represents exactly."""
    wrong_spans: str | None = None
    """What is wrong with the versions that tokens reported while weights changed (X12)."""

    @property
    def limits(self) -> Limits:
        """The limits, raised only by differences that appear both with the initial and with the published weights."""
        return Limits.of(self.dtype, self.before, self.same.same_weights)


async def examine(pair: Pair, report: Callable[[str], None]) -> Examination:
    """Return the results of the experiments, each of which is run only if earlier results call for it.

    Afterwards the endpoint serves test weights. Errors from the endpoint and the worker propagate. Before anything is
    published, the errors of `check_served` may be raised as well.
    """
    subject = pair.subject
    weights = subject.reference.weights
    report("the weights that it was started with")
    started = time.monotonic()
    before = await check_served(pair)
    token_s = (time.monotonic() - started) / max(1, before.num_tokens)
    same = await measure(pair, NUM_UPDATES, bisect=False, report=report)
    limits = Limits.of(same.dtype, before, same.same_weights)
    filters = await _filter_gap(pair)
    is_bad = limits.exceeded_by(same.same_weights)
    prefix = None if is_bad else await _prefix_gap(pair, report)
    report("an update of every tensor, and back")
    other = subject.reference.perturbed("B")
    changed = await _figures(pair, other)
    again = await _figures(pair, weights)
    lost: Sequence[str] | None = None
    louder = None
    if not is_bad and not (prefix is not None and prefix.is_stale(limits)) and limits.exceeded_by(changed):
        lost = await _lost_tensors(pair, other, limits, report)
        if lost and len(lost) < len(weights.tensors):
            name = lost[0]
            tensors = {**weights.tensors, name: weights.tensors[name] * 8}
            louder = await _figures(pair, ReferenceWeights("louder", tensors))
    equal_experts = two_levels = None
    if is_bad:
        if (equal := _with_equal_experts(weights)) is not None:
            report("equal experts")
            equal_experts = await _figures(pair, equal)
        report("matrices of two values")
        two_levels = await _figures(pair, _with_two_levels(weights))
    wrong_spans = None if is_bad or limits.exceeded_by(changed) else await _wrong_spans(pair, token_s, report)
    return Examination(
        dtype=same.dtype,
        before=before,
        same=same,
        changed=changed,
        again=again,
        lost=lost,
        num_tensors=len(weights.tensors),
        louder=louder,
        filters=filters,
        prefix=prefix,
        equal_experts=equal_experts,
        two_levels=two_levels,
        wrong_spans=wrong_spans,
    )


async def _figures(pair: Pair, weights: ReferenceWeights) -> Figures:
    await pair.set_weights(weights)
    return (await pair.sample()).figures


async def _lost_tensors(
    pair: Pair, other: ReferenceWeights, limits: Limits, report: Callable[[str], None]
) -> Sequence[str]:
    """Return the tensors whose changes do not arrive even when they are sent alone.

    A group of tensors that could not be divided further within `_MAX_PUBLISHES` updates is returned whole.
    """
    weights = pair.subject.reference.weights
    num_publishes = 0

    async def is_lost(names: Collection[str]) -> bool:
        nonlocal num_publishes
        num_publishes += 1
        report(f"an update that changes {len(names)} of {len(weights.tensors)} tensors")
        tensors = {name: (other if name in names else weights).tensors[name] for name in weights.tensors}
        return limits.exceeded_by(await _figures(pair, ReferenceWeights(f"part-{num_publishes}", tensors)))

    parts = [list(weights.tensors)]
    while any(len(names) > 1 for names in parts) and num_publishes < _MAX_PUBLISHES:
        halves = [half for names in parts for half in _halves(names)]
        lost = [half for half in halves if half in parts or await is_lost(set(half))]
        if len(lost) == len(halves) >= _NUM_LOST_PARTS:
            break  # no update arrives, wherever it is
        parts = lost
    return [name for names in parts for name in names]


def _halves(names: list[str]) -> list[list[str]]:
    return [half for half in (names[: len(names) // 2], names[len(names) // 2 :]) if half]


async def _filter_gap(pair: Pair) -> FilterGap | None:
    """Compare completions under top-k with the reference; return None if no token can be compared."""
    subject, gaps = pair.subject, []
    weights = subject.reference.weights
    for seed in range(4):
        request, completion = await subject.ask(subject.prompt(seed=seed), max_tokens=24, top_k=_TOP_K, seed=seed)
        logits_TV = subject.reference.logits(weights, request.prompt_token_ids, completion.token_ids)
        found_T = torch.tensor(completion.logprobs, dtype=torch.float64)
        filtered_T, full_T = (
            chosen(distribution(logits_TV, sampling), completion.token_ids) for sampling in (request.sampling, None)
        )
        kept_T = filtered_T.isfinite()  # rounding moves tokens at the edge of the filter to its other side
        if not bool(kept_T.any()):
            continue
        both = [(found_T - it)[kept_T].abs().mean() for it in (filtered_T, full_T)]
        gaps.append([float(torch.nan_to_num(gap, nan=99.0, posinf=99.0)) for gap in both])
    if not gaps:
        return None
    filtered, unfiltered = (sum(column) / len(gaps) for column in zip(*gaps, strict=True))
    return FilterGap(filtered, unfiltered)


async def _prefix_gap(pair: Pair, report: Callable[[str], None]) -> PrefixGap:
    """Sample a long prompt before and after an update, and another prompt only after the update (X7)."""
    subject = pair.subject
    report("a prompt before and after an update")
    await pair.set_weights(subject.reference.weights)
    length = min(_PREFIX_TOKENS, subject.capabilities.max_model_len // 2)
    prompt = subject.prompt(length, seed=11)
    fresh = ((prompt[0] + 1) % subject.capabilities.vocab_size, *prompt[1:])
    other = subject.reference.perturbed("B")
    await subject.generate(prompt, max_tokens=4)
    await pair.set_weights(other)
    gaps = []
    for asked in (prompt, fresh):
        request, completion = await subject.ask(asked, max_tokens=8)
        expected_T = subject.reference.logprobs(other, request.prompt_token_ids, completion.token_ids, request.sampling)
        gaps.append(figures_of(expected_T, torch.tensor(completion.logprobs, dtype=torch.float64)).mean)
    return PrefixGap(*gaps)


async def _wrong_spans(pair: Pair, token_s: float, report: Callable[[str], None]) -> str | None:
    """Return what is wrong with the versions that tokens report while weights change (X12), or None if nothing is.

    One token of a request that runs alone takes ``token_s`` seconds.
    """
    subject = pair.subject
    can = subject.capabilities
    if can.version_binding != "spans" or InFlightPolicy.KEEP not in can.in_flight_policies:
        return None
    report("the versions of tokens while weights change")
    num_tokens = min(max(int(_RUNNING_S / token_s), _LEAST_TOKENS), _MOST_TOKENS, can.max_model_len // 2)
    published: dict[int, ReferenceWeights] = {}
    await publish_next(subject, published)
    running = await subject.start_running(4, max_tokens=num_tokens)
    for _ in range(_NUM_SPAN_UPDATES):
        await asyncio.sleep(0.03)
        await publish_next(subject, published, InFlightPolicy.KEEP)
    running += subject.start(2, 16)
    try:
        for request, task in running:
            check_spans(subject, request, (await task).completions[0], published)
    except CheckFailed as error:
        return str(error)
    return None


def _with_equal_experts(weights: ReferenceWeights) -> ReferenceWeights | None:
    """Return weights in which all experts of a layer are copies of its first expert, and its router is zero.

    Whichever experts are chosen, their outputs and router weights are then the same. The result is None if the model
    has no experts.
    """
    equal = {}
    for name in weights.tensors:
        layer, found, rest = name.partition(".experts.")
        if found and rest.partition(".")[0].isdecimal():
            equal[name] = weights.tensors[f"{layer}.experts.0.{rest.partition('.')[2]}"].clone()
            equal |= {
                router: torch.zeros_like(weights.tensors[router])
                for router in (f"{layer}.gate.weight", f"{layer}.router.weight")
                if router in weights.tensors
            }
    return ReferenceWeights("equal-experts", {**weights.tensors, **equal}) if equal else None


def _with_two_levels(weights: ReferenceWeights) -> ReferenceWeights:
    """Return weights whose matrices in decoder layers have only the values c and -c, with c the mean absolute value.

    A quantization that scales by the largest value of a tensor, a channel or a block represents them exactly.
    """
    tensors = {
        name: torch.where(tensor >= 0, 1.0, -1.0).to(tensor.dtype) * tensor.abs().mean()
        if tensor.dim() == 2 and ".layers." in name
        else tensor
        for name, tensor in weights.tensors.items()
    }
    return ReferenceWeights("two-levels", tensors)
