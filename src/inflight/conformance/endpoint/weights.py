"""Level ``weights``: how an update changes the distribution that tokens are sampled from."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.publishing import SteppedPublisher, specs_of
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.scoring import require_right_scores
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import lower_logits, make_tiny_model
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights, chosen
from inflight.contracts import ReleasingEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import EndpointState, TensorSpec

LEVEL = "weights"
_SOAK_UPDATES = 200
_FEWEST_SOAK_UPDATES, _SOAK_S = 20, 30.0
"""The soak ends early once at least this many updates have been made and this many seconds have passed."""
_LARGE = 250.0
"""Logits that the largest checkpoints reach and that float32 cannot exponentiate."""
_DEPTH, _VERY_DEEP = 300.0, 40_000.0
"""How far below 0 all logits are under two sets of weights."""
_LOWERED = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
"""Tensors that lower all logits, if the model has them under these names and its head is not tied."""
_TOP_K = 3
_LOAD = "how received tensors are loaded: transposed, cast on the way, fused in another order, or left out"
_REFUSE = "whether request_weight_update compares names, shapes and dtypes with the model before anything is paused"


@check("U-01", "updates", look_at=_LOAD)
async def identity_update(subject: EndpointSubject) -> None:
    """An update with the weights that are already served leaves every logprob unchanged."""
    await subject.require_serves(subject.reference.weights, "before the update")
    await subject.publisher.publish(subject.reference.weights)
    await subject.require_serves(subject.reference.weights, "after the update")


@check("U-02", "updates", look_at="whether the commit switches to all the tensors that arrived, at once")
async def doubled_final_norm(subject: EndpointSubject) -> None:
    """A changed tensor changes the logprobs as arithmetic predicts: a doubled final norm doubles every logit."""
    doubled = subject.reference.with_final_norm(2.0, "A with its final norm doubled")
    await _require_would_show(subject, doubled)
    await subject.publisher.publish(doubled)
    await subject.require_serves(doubled, "after the update")


@check("U-03", "updates")
@look_at("whether V is the vocabulary that the head computes, and whether padding rows are excluded from it")
async def zeroed_final_norm(subject: EndpointSubject) -> None:
    """With a final norm of zeros, every token has the logprob -ln V."""
    await subject.publisher.publish(subject.reference.with_final_norm(0.0, "A with its final norm zeroed"))
    completion = await subject.generate(max_tokens=32)
    vocab_size = subject.capabilities.vocab_size
    uniform = -math.log(vocab_size)
    gap = max(abs(logprob - uniform) for logprob in completion.logprobs)
    subject.note(**{"-ln V": uniform, "logprobs": completion.logprobs[:4], "largest difference from -ln V": gap})
    require(gap < 1e-3, f"with all logits at zero, logprobs differ by up to {gap:.3g} from -ln {vocab_size}")


@check("U-04", "updates", look_at=_REFUSE)
async def missing_tensor(subject: EndpointSubject) -> None:
    """An update that lacks a tensor is refused when it is requested, and the old weights stay in service."""
    await _require_refused(subject, "an update without the final norm", lambda norm: None)


@check("U-05", "updates", look_at=_REFUSE)
async def unknown_tensor(subject: EndpointSubject) -> None:
    """An update with a tensor that the model does not have is refused when it is requested, and the old weights stay
    in service."""
    extra = TensorSpec(name="model.layers.999.made.up.weight", dtype="float32", shape=(2, 2))
    await _require_refused(subject, f"an update with {extra.name}", lambda norm: norm, extra)


@check("U-06", "updates", look_at=_REFUSE)
async def misshapen_tensor(subject: EndpointSubject) -> None:
    """An update with a tensor of another shape is refused when it is requested, and the old weights stay in service."""
    await _require_refused(
        subject,
        "an update whose final norm is one element longer",
        lambda norm: norm.model_copy(update={"shape": (*norm.shape[:-1], norm.shape[-1] + 1)}),
    )


@check("U-07", "updates", look_at=_REFUSE)
async def wrong_dtype(subject: EndpointSubject) -> None:
    """An update with a tensor of another dtype is refused when it is requested, and the old weights stay in service."""
    dtype = specs_of(subject.reference.weights)[0].dtype
    other = "bfloat16" if dtype != "bfloat16" else "float16"
    what = f"an update whose final norm is {other}, not {dtype}"
    await _require_refused(subject, what, lambda norm: norm.model_copy(update={"dtype": other}))


async def _require_refused(
    subject: EndpointSubject, what: str, change: Callable[[TensorSpec], TensorSpec | None], *more: TensorSpec
) -> None:
    """Require that an update is refused if it announces ``more`` tensors, and the final norm as changed by
    ``change``."""
    changed = [
        change(spec) if spec.name == subject.reference.final_norm else spec
        for spec in specs_of(subject.reference.weights)
    ]
    specs = [*(spec for spec in changed if spec is not None), *more]
    await subject.publisher.form_group()
    update = subject.publisher.announcement(subject.reference.weights, specs=specs)
    await subject.require_refused(subject.endpoint.request_weight_update(update), what)
    await subject.require_state(EndpointState.READY, f"after {what} was refused")
    await subject.require_serves(subject.reference.weights, f"after {what} was refused")


@check("U-08", "updates", look_at=f"{_LOAD}; the head and the norms are forgotten most often")
async def every_tensor(subject: EndpointSubject) -> None:
    """Every tensor of an update is loaded: logprobs are those of transformers under the new weights."""
    other = subject.reference.perturbed("B (every tensor differs from the checkpoint)")
    await _require_would_show(subject, other)
    for weights, when in ((other, "after the update"), (subject.reference.weights, "after the update back")):
        await subject.publisher.publish(weights)
        await subject.require_serves(weights, when)


async def _require_would_show(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Require that the served weights differ clearly from ``weights``."""
    gap = await subject.gap_now(weights)
    require(
        gap > 2 * subject.tolerance, f"before the update, logprobs differ by only {gap:.3g}: the check is inconclusive"
    )


@check("U-74", "updates", deadline_s=60)
@look_at("a clamp, a soft cap or an exponential without a subtracted maximum, at the logits or within attention")
async def large_logits(subject: EndpointSubject) -> None:
    """Logits and attention scores of any size are used unchanged: nothing clamps or caps them."""
    reference = subject.reference
    usual = float(reference.logits(reference.weights, subject.prompt(), (0,)).abs().max())
    factor = min(2.0 ** math.ceil(math.log2(_LARGE / usual)), 100.0)
    large = reference.with_final_norm(factor, f"A with its final norm times {factor:g}")
    await subject.publisher.publish(large)
    for temperature in (factor, factor / 4, 1.0, 0.0):  # the first gives the same probabilities as the checkpoint's
        try:
            request, completion = await subject.ask(temperature=temperature, max_tokens=24)
        except (InvalidRequestError, UnsupportedError) as error:
            if temperature <= 2:  # higher ones may be refused
                raise
            subject.note(**{f"temperature={temperature:g}": f"refused: {error}"})
            continue
        scale = max(1.0, factor / (temperature or 1.0))
        gap = subject.gap(large, request, completion)
        what = f"with logits of up to {factor * usual:.3g} at temperature {temperature:g}"
        subject.note(**{f"logprob difference {what}": gap})
        words = f"{what}, logprobs differ by up to {gap:.3g} (tolerance {scale * subject.tolerance:.3g})"
        require(gap <= scale * subject.tolerance, words)
    if not subject.is_coarse:  # in 16 bits, attention this sharp turns rounding errors into other tokens
        sharp = _with_sharp_attention(reference)
        await subject.publisher.publish(sharp)
        await subject.require_serves(sharp, "with larger scores of attention")
        if subject.capabilities.scoring:
            half = reference.with_final_norm(factor / 2, f"A with its final norm times {factor / 2:g}")
            await subject.publisher.publish(half)
            await require_right_scores(subject, subject.prompt(24, seed=74), 1, "with unlikely tokens", half)
        if reference.weights.tensors.keys() >= _LOWERED:
            low, very_low = (_with_low_logits(reference, depth) for depth in (_DEPTH, _VERY_DEEP))
            await subject.publisher.publish(low)
            await subject.require_serves(low, "with logits far below 0")
            await _require_filtered(subject, very_low)


def _with_low_logits(reference: ReferenceCheckpoint, depth: float) -> ReferenceWeights:
    tensors = dict(reference.weights.tensors)
    lower_logits(tensors, depth)
    return ReferenceWeights(f"A with logits of about -{depth:g}", tensors)


async def _require_filtered(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Require that top_k removes tokens under these weights."""
    await subject.publisher.publish(weights)
    request, found = await subject.ask(max_tokens=24, top_k=_TOP_K)
    logits_TV = subject.reference.logits(weights, request.prompt_token_ids, found.token_ids)
    missing_T = logits_TV.topk(_TOP_K).values[:, -1] - chosen(logits_TV, found.token_ids)
    apart = float(missing_T.max())
    subject.note(**{f"largest distance from the {_TOP_K} likeliest tokens under {weights.label}": apart})
    words = f"with top_k={_TOP_K} under {weights.label}, a token was sampled whose logit is {apart:.3g} too low"
    require(apart < 1.0, words)  # float32 rounds such logits to multiples of 0.004


def _with_sharp_attention(reference: ReferenceCheckpoint) -> ReferenceWeights:
    """Return weights with larger attention scores.

    The norm of the queries is scaled. In a model without such a norm, scores are already large, and the query
    projection is scaled by a smaller factor."""
    tensors = reference.weights.tensors
    has_norm = any(".q_norm." in name for name in tensors)
    ends, factor = ((".q_norm.weight",), 64.0) if has_norm else ((".q_proj.weight", ".q_proj.bias"), 16.0)
    larger = {name: tensor * factor if name.endswith(ends) else tensor for name, tensor in tensors.items()}
    return ReferenceWeights(f"A with scores of attention times {factor:g}", larger)


@check("U-09", "updates", deadline_s=60)
@look_at("whether the head keeps a copy of its own, packed or quantized, that the update does not reach")
async def tied_head(subject: EndpointSubject) -> None:
    """If the head is tied to the embedding, an update of the embedding changes both, even after memory has been
    released and restored."""
    if subject.reference.is_tied:
        reference, endpoint, publisher = subject.reference, subject.endpoint, subject.publisher
    else:
        if (reason := subject.missing("fresh")) is not None:
            skip(f"the model's head is not tied to its embedding, and {reason}")
        reference = ReferenceCheckpoint(make_tiny_model(subject.directory / "tied", tied=True))
        endpoint = (await subject.fresh(reference.path)).endpoint
        capabilities = await endpoint.capabilities()
        reference.cast(capabilities.dtype)
        publisher = SteppedPublisher(endpoint, capabilities)
    names = [n for n, t in reference.weights.tensors.items() if t.dim() == 2 and t.shape[0] == reference.vocab_size]
    require(len(names) == 1, f"exactly one tensor of a tied model must have a row per token, but these do: {names}")
    turned = {**reference.weights.tensors, names[0]: reference.weights.tensors[names[0]].roll(1, 0)}
    other = ReferenceWeights("A with every row of its embedding moved by one", turned)
    await publisher.publish(other)
    gap = subject.gap(other, *await subject.ask(endpoint=endpoint), reference=reference)
    subject.note(**{"largest logprob difference": gap})
    require(gap <= subject.tolerance, f"after an update of the embedding, logprobs differ by up to {gap:.3g}")
    if isinstance(endpoint, ReleasingEndpoint) and (await endpoint.capabilities()).releases_memory:
        await endpoint.release_memory()
        await endpoint.restore_memory()
        await publisher.publish(reference.weights)
        gap = subject.gap(reference.weights, *await subject.ask(endpoint=endpoint), reference=reference)
        what = "after memory was restored and the embedding was updated again"
        require(gap <= subject.tolerance, f"{what}, logprobs differ by up to {gap:.3g}")
    publisher.lose_group()


@check(
    "U-10", "updates", look_at="whether each bucket is staged in addition to the earlier ones, and what a commit clears"
)
async def several_buckets(subject: EndpointSubject) -> None:
    """The same tensors give the same logprobs whether they arrive in one bucket, in several, or each in its own."""
    other = subject.reference.perturbed("B")
    total = other.size_bytes
    for weights, bucket_bytes in ((other, total // 9), (subject.reference.weights, 1), (other, total)):
        update = await subject.publisher.request(weights, bucket_bytes=bucket_bytes)
        await subject.publisher.complete(update, weights)
        await subject.require_serves(weights, f"after an update in {len(update.buckets)} buckets")


@check(
    "U-11", "updates", look_at="whether tensors are identified by their name in the manifest or by their position in it"
)
async def any_order(subject: EndpointSubject) -> None:
    """Tensors may arrive in any order that the manifest specifies."""
    other = subject.reference.perturbed("B")
    backwards = ReferenceWeights("B", dict(reversed(list(other.tensors.items()))))
    await subject.publisher.publish(backwards, bucket_bytes=1 << 16)
    await subject.require_serves(other, "after an update in reverse order")


@check("U-12", "updates fresh", deadline_s=60, look_at=_LOAD)
async def restart_from_disk(subject: EndpointSubject) -> None:
    """After an update, the endpoint gives the logprobs of one that was started from a checkpoint of these weights."""
    other = subject.reference.perturbed("B")
    await subject.publisher.publish(other)
    restarted = (await subject.fresh(subject.reference.save(other, subject.directory / "B"))).endpoint
    pairs = []
    for seed in range(4):
        prompt = subject.prompt(seed=seed)
        updated = await subject.generate(prompt, temperature=0.0)
        pairs.append((updated, await subject.generate(prompt, endpoint=restarted, temperature=0.0)))
    require_repeated(subject, pairs, "after the update and after a start from these weights")


@check("U-13", "updates", deadline_s=90)
@look_at(
    "what a session leaves behind: staged tensors, timers, groups, half-renewed leases; if the check hung after "
    "many updates, how long an update waits for running requests"
)
async def soak(subject: EndpointSubject) -> None:
    """While requests run, up to two hundred updates follow one another (as many as half a minute allows, but at least
    20), and each changes what is sampled next."""
    reference, prompt = subject.reference, subject.prompt()
    factors = (2.0, 0.5, -1.0, 1.0)
    cycle = [reference.with_final_norm(factor, f"A times {factor:g}") for factor in factors]
    logits_V = reference.logits(reference.weights, prompt, (0,))
    seconds: list[float] = []
    first = subject.publisher.version + 1
    began = time.monotonic()
    for i in range(_SOAK_UPDATES):
        if i >= _FEWEST_SOAK_UPDATES and time.monotonic() - began > _SOAK_S:
            break
        if i % 50 == 0:
            await subject.start_running(2, max_tokens=min(1000, subject.context_len // 2))
        started = time.monotonic()
        answer = await subject.publisher.publish(cycle[i % 4])
        seconds.append(time.monotonic() - started)
        subject.note(updates=len(seconds))
        require(answer.version == first + i, f"update {i + 1}, to version {first + i}, left version {answer.version}")
        completion = await subject.generate(prompt, max_tokens=1, seed=i)
        expected = chosen(torch.log_softmax(factors[i % 4] * logits_V.double(), -1), completion.token_ids)
        gap = subject.difference(completion.logprobs, expected)
        words = f"after update {i + 1} ({cycle[i % 4].label}) a logprob differs by {gap:.3g}"
        require(gap <= 2 * subject.tolerance, words)
    subject.note(**{"median seconds": statistics.median(seconds), "slowest": max(seconds)})
