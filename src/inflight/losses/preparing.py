"""`prepare`, which computes the counts and statistics of a whole optimizer step that the loss of each micro-batch
needs.

Shape suffixes: T packed tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from inflight.errors import InvalidRequestError
from inflight.losses.aggregation import Counts, counts_after_rejection
from inflight.losses.corrections import Reduce, SecondMoment, second_moment_threshold
from inflight.losses.micro_batch import NO_GROUP, check_groups, check_micro_batch
from inflight.losses.policy import LossPlan, PolicyLoss
from inflight.losses.targets import Targets
from inflight.types import MicroBatch


def prepare(
    loss: PolicyLoss,
    batches: Sequence[MicroBatch],
    *,
    trainer_logprobs: Sequence[torch.Tensor] | None = None,
    current_version: int | None = None,
    num_groups: int | None = None,
    num_sequences: int | None = None,
    reduce: Reduce | None = None,
) -> LossPlan:
    """Return the counts and statistics of a whole optimizer step that the loss needs, without gradients.

    ``batches`` are all micro-batches of this rank; segments must not be split between them. ``reduce`` sums over ranks;
    every rank must call `prepare`, even without a target. A loss that needs a ``first_forward`` needs
    ``trainer_logprobs`` [T] of each micro-batch; one that needs ``group_ids`` on several ranks needs the whole step's
    ``num_groups``. ``current_version`` is the version of the trained weights. ``num_sequences`` is the number of
    completions in the whole step; pass it if some completions are in no micro-batch because all their tokens are
    masked. By default, the segments of all micro-batches except `empty_micro_batch` are counted.

    Raises `InvalidRequestError` if something is missing, and the errors that `PolicyLoss` raises for invalid targets.
    """
    if trainer_logprobs is not None and len(trainer_logprobs) != len(batches):
        raise InvalidRequestError(
            f"trainer_logprobs has {len(trainer_logprobs)} entries for {len(batches)} micro-batches: give one for each"
        )
    for i, batch in enumerate(batches):
        check_micro_batch(batch, trainer_logprobs_T=None if trainer_logprobs is None else trainer_logprobs[i])
    if "first_forward" in loss.needs and trainer_logprobs is None:
        raise InvalidRequestError(
            "this loss counts the targets that its corrections keep: pass the trainer_logprobs of every "
            "micro-batch to prepare"
        )
    if "versions" in loss.needs and current_version is None:
        raise InvalidRequestError("this loss needs the age of tokens: pass current_version to prepare")
    if "group_ids" in loss.needs:
        if any(batch.group_ids_S is None for batch in batches):
            raise InvalidRequestError(
                "this loss needs group_ids_S, which indicate which segments share a prompt, in every micro-batch"
            )
        if num_groups is None and reduce is not None:
            raise InvalidRequestError(
                "a single rank cannot count the prompts of the whole step: pass num_groups to prepare"
            )
        largest = max(
            (int(b.group_ids_S.max()) for b in batches if b.group_ids_S is not None and len(b.group_ids_S)), default=-1
        )
        num_groups = largest + 1 if num_groups is None else num_groups
        check_groups(batches, num_groups)
    else:
        num_groups = 0
    add = reduce or (lambda numbers: numbers)
    with torch.no_grad():
        logprobs = trainer_logprobs or [torch.zeros_like(batch.behaviour_logprobs_T) for batch in batches]
        step = [
            (loss._targets(batch, logprobs_T, current_version), batch)
            for batch, logprobs_T in zip(batches, logprobs, strict=True)
        ]
        thresholds = tuple(
            second_moment_threshold(correction, [targets for targets, _ in step], add)
            if isinstance(correction, SecondMoment)
            else None
            for correction in loss.corrections
        )
        everything = [(targets, torch.ones_like(targets.advantages_N, dtype=torch.bool), b) for targets, b in step]
        left, completions = _counts(everything, num_groups, add)
        if num_sequences is not None and num_sequences < completions:
            raise InvalidRequestError(
                f"the micro-batches contain {completions:.0f} completions, but num_sequences is only {num_sequences}: "
                "pass the number of completions of the whole step"
            )
        before = after = replace(left, num_sequences=completions if num_sequences is None else num_sequences)
        if any(map(counts_after_rejection, loss._aggregations)):
            kept = [(targets, loss._correct(targets, thresholds)[1], batch) for targets, batch in step]
            after = _counts(kept, num_groups, add)[0]
    return LossPlan(loss, before, after, thresholds, current_version)


def _counts(
    step: Sequence[tuple[Targets, torch.Tensor, MicroBatch]], num_groups: int, add: Reduce
) -> tuple[Counts, float]:
    """Return the counts of targets and of segments that have one, over all ranks, and the number of completions."""
    numbers = torch.zeros(3 + num_groups, dtype=torch.float64)
    for targets, counted_N, batch in step:
        tokens_S = targets.segment_sum(counted_N.double()).cpu()
        has_some_S = tokens_S > 0
        numbers[0] += tokens_S.sum()
        numbers[1] += has_some_S.sum()
        ids_S = None if batch.group_ids_S is None else batch.group_ids_S.cpu()
        numbers[2] += len(tokens_S) if ids_S is None else (ids_S != NO_GROUP).sum()
        if num_groups and ids_S is not None:
            numbers[3:].index_add_(0, ids_S[has_some_S], tokens_S[has_some_S])
    num_tokens, num_sequences, completions, *tokens_P = add(numbers).tolist()
    return Counts(num_tokens, num_sequences, tuple(tokens_P)), completions
