"""Checks of `forward`: the logprobs of one segment.

Shape suffixes: T packed tokens, K tokens scored in place of each packed token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.batches import OF_SEVERAL_CHUNKS, every_target, loss_of, make_batch, with_targets
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.refusals import error_of, words_of
from inflight.conformance.worker.subject import VOCAB_SIZE, WorkerSubject
from inflight.contracts import TargetScoringWorker
from inflight.errors import UnsupportedError
from inflight.types import MicroBatch

LEVEL = "forward"
STEEPNESS = 16.0
"""Factor for the logits of one checkpoint. The logits then lie between -150 and 150, so that a cap at 50 or 100 is
noticeable."""
DEPTH = 300.0
"""How far below 0 all logits of one checkpoint are: the exponential of -104 is 0 in float32."""
_COLDEST = 0.05


@check("W-04")
@look_at(
    "attention mask, position ids, half-precision arithmetic in the head, which row predicts which token, bounds of "
    "logits or logprobs that the model does not have"
)
def logprobs_equal_transformers(subject: WorkerSubject) -> None:
    """forward() returns the logprobs that transformers computes from the same checkpoint, even if some logits exceed
    100, all of them are far below -100, or a segment has as many tokens as the model has positions."""
    # Rounding grows with the logits, which are at least STEEPNESS times those of the kit's other checkpoints.
    for model in (subject.steep_model(STEEPNESS), subject.low_model(DEPTH)):
        _compare(subject, make_batch((40,), seed=1), model=model, factor=STEEPNESS)
    num_positions = json.loads((subject.model() / "config.json").read_text())["max_position_embeddings"]
    _compare(subject, make_batch((num_positions,), seed=1), model=subject.model())


@check("W-05", look_at="tie_word_embeddings: whether the head is tied again after sharding, wrapping or loading")
def logprobs_of_a_tied_model(subject: WorkerSubject) -> None:
    """forward() of a model with tied embeddings uses the embedding as the head."""
    _compare(subject, make_batch((40,), seed=2), model=subject.model(tied=True))


@check("W-06", deadline_s=30)
@look_at(
    "temperature_T[t] divides the logits of the row that predicts token t; logprobs are not divided; a head that is "
    "computed in chunks needs the temperatures of each chunk, also where the first one is 1"
)
def each_token_has_its_own_temperature(subject: WorkerSubject) -> None:
    """Each logprob is at its token's own temperature: the log softmax of the logits divided by the temperature, however
    many targets a micro-batch has."""
    batch = every_target(make_batch(OF_SEVERAL_CHUNKS, seed=3, temperature=None))
    batch.temperature_T[::3], batch.temperature_T[1::3], batch.temperature_T[:2] = _COLDEST, 5.0, 1.0
    plain = ReferenceModel(subject.model()).logprobs(replace(batch, temperature_T=torch.ones(batch.num_tokens)))
    found = subject.create().forward(batch).detach().double()
    subject.note(
        difference_to_temperature_1=_largest(found - plain),
        difference_to_division_of_logprobs=_largest(found - plain / batch.temperature_T),
    )
    _compare(subject, batch, model=subject.model(), found=found, factor=1 / _COLDEST)


@check("W-07", look_at="row t - 1 of the logits predicts token t: a shift by one, a missing causal mask")
def logprobs_are_target_aligned(subject: WorkerSubject) -> None:
    """Logprobs are target-aligned: index t holds log p(token t | earlier tokens of the same segment)."""
    k = 17
    worker, batch = subject.create(), every_target(make_batch((40,), seed=4))
    token_ids_T = batch.token_ids_T.clone()
    token_ids_T[k] = (token_ids_T[k] + 1) % VOCAB_SIZE
    with torch.no_grad():
        change_T = (worker.forward(replace(batch, token_ids_T=token_ids_T)) - worker.forward(batch)).double().abs()
    before, at, allowed = _largest(change_T[:k]), float(change_T[k]), subject.tolerance.logprob
    first_change = int((change_T > allowed).int().argmax())
    subject.note(changed_index=k, first_change=first_change, change_before=before, change_at=at)
    require(
        before <= allowed,
        f"another token at index {k} changes logprobs before it, by up to {before:.2e}: they are shifted, or tokens "
        "attend to later tokens",
    )
    require(at > allowed, f"another token at index {k} does not change the logprob there")


@check("W-08")
@look_at("loss_mask_T: every index with a false mask, including prompts and the first token of a segment")
def no_target_gives_zero(subject: WorkerSubject) -> None:
    """A logprob is exactly 0.0 at every index that is not a target."""
    batch = make_batch((20, 1, 9), seed=5)
    logprobs_T = subject.create().forward(batch).detach()
    others_T = logprobs_T[~batch.loss_mask_T]
    subject.note(num_others=others_T.numel(), num_nonzero=int((others_T != 0).sum()))
    require(bool((others_T == 0).all()), f"{int((others_T != 0).sum())} tokens that are not targets have a logprob")
    require(bool((logprobs_T[batch.loss_mask_T] < 0).all()), "there are targets without a logprob below 0")


@check("W-09", look_at="the cast after the head, a leftover batch dimension, and .to(batch.token_ids_T.device)")
def logprobs_are_float32(subject: WorkerSubject) -> None:
    """Logprobs are float32 (float64 if the model is float64), one per packed token, on the batch's device."""
    batch = make_batch((12, 5), seed=6)
    logprobs_T = subject.create().forward(batch)
    subject.note(dtype=str(logprobs_T.dtype), shape=list(logprobs_T.shape), device=str(logprobs_T.device))
    wanted = torch.float64 if subject.tolerance.dtype == "float64" else torch.float32
    require(logprobs_T.dtype == wanted, f"they are {logprobs_T.dtype}, not {wanted}")
    require(tuple(logprobs_T.shape) == (17,), f"17 packed tokens give the shape {tuple(logprobs_T.shape)}")
    device = batch.token_ids_T.device
    require(logprobs_T.device == device, f"they are on {logprobs_T.device}, the batch is on {device}")


@check("W-10", look_at="no_grad, inference_mode or detach around the forward")
def logprobs_are_differentiable(subject: WorkerSubject) -> None:
    """Logprobs are differentiable: backward() of a loss computed from them gives a gradient."""
    worker, batch = subject.create(), make_batch((15,), seed=7)
    logprobs_T = worker.forward(batch)
    subject.note(requires_grad=logprobs_T.requires_grad)
    require(logprobs_T.requires_grad, "the logprobs do not require gradients")
    worker.backward(loss_of(logprobs_T, batch))
    norm = worker.step().gradient_norm
    subject.note(gradient_norm=norm)
    require(norm > 0, f"the gradient norm of a loss of the logprobs is {norm}")


@check("W-66")
@look_at(
    "whether the normaliser is computed once for all tokens that are scored in one place, their gradients are added, "
    "and the logits are divided by the temperature"
)
def given_targets(subject: WorkerSubject) -> None:
    """Where a worker scores target ids, logprobs [T, K] and their gradient are those that transformers computes for
    these tokens in place of the packed ones, at each position's temperature, even if some ids are equal or K is 1."""
    worker, reference = subject.create(), ReferenceModel(subject.model())
    if not (isinstance(worker, TargetScoringWorker) and worker.scores_target_ids):
        skip("scores_target_ids is not supported")
    batches = [
        with_targets(make_batch((19, 1, 8), seed=70 + share, temperature=None), seed=28)
        for share in range(subject.data_size)
    ]
    batch = batches[subject.data_rank]
    logprobs_TK = worker.forward(batch)
    expected_TK = reference.logprobs(batch).detach()
    shape = list(logprobs_TK.shape)
    subject.require_on_all_ranks(
        shape == list(expected_TK.shape), f"logprobs are {shape}, not {list(expected_TK.shape)}"
    )
    difference = _largest(logprobs_TK.detach().double() - expected_TK)
    subject.note(largest_difference=difference)
    words = f"logprobs of given tokens differ by up to {difference:.2e} nats"
    subject.require_on_all_ranks(difference <= subject.tolerance.logprob, words)
    assert batch.target_ids_TK is not None
    single = replace(batch, target_ids_TK=batch.target_ids_TK[:, :1])
    found_TK, expected_TK = worker.forward(single).detach().double(), reference.logprobs(single).detach()
    shape = list(found_TK.shape)
    subject.require_on_all_ranks(shape == [batch.num_tokens, 1], f"with one token per position, the shape is {shape}")
    difference = _largest(found_TK - expected_TK)
    words = f"with one token per position, logprobs differ by up to {difference:.2e} nats"
    subject.require_on_all_ranks(difference <= subject.tolerance.logprob, words)
    worker.backward(loss_of(logprobs_TK, batch))
    subject.compare_norm(worker, reference.gradient_norm(batches), "of given tokens")


@check("W-67", look_at="whether a worker that scores only the packed tokens checks for target ids")
def unsupported_targets_are_refused(subject: WorkerSubject) -> None:
    """A worker that reports that it does not score target ids raises UnsupportedError for a micro-batch that has
    them."""
    worker = subject.create()
    if not isinstance(worker, TargetScoringWorker):
        skip("it does not report scores_target_ids, so a run sends it no target ids")
    if worker.scores_target_ids:
        skip("scores_target_ids is supported")
    error = error_of(lambda: worker.forward(with_targets(make_batch((19,), seed=70), seed=19)))
    subject.note(error=words_of(error))
    is_refused = isinstance(error, UnsupportedError)
    subject.require_on_all_ranks(is_refused, f"target ids raise {words_of(error)}, not UnsupportedError")


def _compare(
    subject: WorkerSubject,
    batch: MicroBatch,
    *,
    model: Path,
    found: torch.Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Fail unless the targets' logprobs match those of transformers; record the differences, including those from
    logprobs shifted by one token.

    The temperature-scaled logits, and therefore their rounding errors, are ``factor`` times as large as usual.
    """
    expected = ReferenceModel(model).logprobs(every_target(batch)).detach()
    if found is None:
        found = subject.create(model=model).forward(batch).detach().double()
    require(found.shape == expected.shape, f"the shape is {tuple(found.shape)}, not {tuple(expected.shape)}")
    difference_T = (found - expected)[batch.loss_mask_T].abs()
    largest, mean, allowed = _largest(difference_T), float(difference_T.mean()), factor * subject.tolerance.logprob
    shifted = min(_largest((found - expected.roll(by))[batch.loss_mask_T]) for by in (-1, 1))
    subject.note(
        largest_difference=largest, mean_difference=mean, allowed=allowed, difference_if_shifted_by_one=shifted
    )
    words = f"logprobs differ from transformers' by up to {largest:.2e} nats, {mean:.2e} on average"
    require(largest <= allowed, words)


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())
