"""A check that mixes micro-batches, passes, gathers, saves and loads at random, with a fixed seed.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at
from inflight.conformance.worker.adam import create_scheduled
from inflight.conformance.worker.batches import (
    accumulate,
    loss_of,
    make_batch,
    prefix_ids_of,
    segment_rows,
    with_targets,
)
from inflight.conformance.worker.gathering import Weights, compare_changes, differing, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import PrefixSharingWorker, TargetScoringWorker
from inflight.types import MicroBatch

LEVEL = "step"
_SEED = 79
_NUM_STEPS, _MOST_BATCHES = 8, 3
"""Number of steps, and maximum number of micro-batches per step. The steps are taken with and without other calls."""
_SHAPES = ((12, 12, 12), (7, 20), (1, 9, 9, 2))
"""Lengths of the segments. There are few shapes, so that different micro-batches often have the same one."""
_LAST_SAVED = 5
"""Highest version of the checkpoint that is loaded."""
_SCALES = (1.0, 1.0, 8.0, 2.0**-10, 0.0)
"""Factors of the loss."""


@check("W-79", deadline_s=90)
@look_at("state that is kept from one micro-batch, step or load to the next, and the keys under which it is kept")
def mixed_calls(subject: WorkerSubject) -> None:
    """However micro-batches of equal shapes, discarded forward passes, backward passes in any order, gathers, saves and
    loads are mixed, logprobs and gradients are those of transformers and autograd at the gathered weights, and steps
    lead to the same weights as without the other calls."""
    _Mix(subject).run()


@dataclass(frozen=True, slots=True)
class _Step:
    """The micro-batches of a step, for each share of the data, and the factor of its loss."""

    batches: Sequence[Sequence[MicroBatch]]
    scale: float


class _Mix:
    """Draws the next call, which is the same on every rank, and records the weights after every step."""

    def __init__(self, subject: WorkerSubject) -> None:
        self._subject, self._draw = subject, random.Random(_SEED)
        self._worker = create_scheduled(subject)
        self._reference = ReferenceModel(subject.model())
        self._weights: dict[int, Weights] = {0: gathered(self._worker)}
        """The weights of each version, on rank 0."""
        self._saved: dict[int, Path] = {}
        """Checkpoints by version."""
        self._num_calls = self._num_compared = 0
        self._largest = 0.0
        """The largest difference between logprobs so far, on rank 0."""

    def run(self) -> None:
        """Take steps with other calls in between, load a checkpoint and repeat the later steps, and compare the weights
        with those of another worker that takes only the steps."""
        subject, steps = self._subject, [self._make_step() for _ in range(_NUM_STEPS)]
        for step in steps:
            self._take(step)
        first = self._weights[_NUM_STEPS]
        version = self._load()
        for step in steps[version:]:
            self._take(step)
        steady = create_scheduled(subject)
        for step in steps:
            accumulate(steady, step.batches[subject.data_rank], step.scale)
            steady.step()
        expected, again = gathered(steady), self._weights[_NUM_STEPS]
        figures = {"calls": self._num_calls, "loaded": version, "logprobs": self._num_compared}
        subject.note(**figures, largest_difference=self._largest)
        if subject.rank == 0:
            for what, found in {"other calls": first, f"other calls and a load of version {version}": again}.items():
                words = f"{_NUM_STEPS} steps with {what} in between, and the same steps alone"
                compare_changes(subject, self._weights[0], expected, found, words, by_the_same_worker=True)

    def _make_step(self) -> _Step:
        subject, draw = self._subject, self._draw
        num_batches = draw.randint(1, _MOST_BATCHES)
        batches = [[self._make_batch() for _ in range(num_batches)] for _ in range(subject.data_size)]
        return _Step(batches, draw.choice(_SCALES))

    def _make_batch(self) -> MicroBatch:
        """Return a micro-batch that has one of a few shapes, and in which some segments begin with the same tokens."""
        worker, draw, lengths = self._worker, self._draw, self._draw.choice(_SHAPES)
        seed = draw.randrange(1 << 30)
        batch = make_batch(lengths, seed, temperature=draw.choice((1.0, None)), targets=draw.random() < 0.9)
        segments = [batch.token_ids_T[rows].tolist() for rows in segment_rows(lengths)]
        for _ in range(len(segments) - 1):
            source, target = draw.sample(segments, 2)
            num_shared = draw.randint(0, min(len(source), len(target)) - 1)
            target[:num_shared] = source[:num_shared]
        batch = replace(batch, token_ids_T=torch.tensor(list(itertools.chain(*segments))))
        if draw.random() < 0.7 and isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes:
            batch = replace(batch, prefix_ids_T=prefix_ids_of(segments))
        if draw.random() < 0.3 and isinstance(worker, TargetScoringWorker) and worker.scores_target_ids:
            batch = with_targets(batch, seed)
        return batch

    def _take(self, step: _Step) -> None:
        """Take a step with other calls around its passes; fail unless the logprobs and gradient norm are correct."""
        subject, worker, draw = self._subject, self._worker, self._draw
        pending: list[tuple[MicroBatch, torch.Tensor]] = []
        found: list[list[float]] = []
        for batch in step.batches[subject.data_rank]:
            self._maybe_call()
            logprobs_T = worker.forward(batch)
            found.append(logprobs_T.detach().flatten().tolist())
            pending.append((batch, logprobs_T))
            if draw.random() < 0.5:
                self._backward(pending, step.scale)
        self._backward(pending, step.scale)
        self._maybe_call()
        result = worker.step()
        of_ranks = subject.ranks.exchange([subject.data_rank, found])
        problem = self._problem(step, dict(of_ranks), result.gradient_norm) if subject.rank == 0 else ""
        subject.require_on_all_ranks(not problem, f"in the step to version {result.version}, {problem}")
        self._maybe_call()
        self._weights[worker.version] = gathered(worker)
        if worker.version <= _LAST_SAVED and (worker.version == _LAST_SAVED or draw.random() < 0.5):
            self._save()

    def _backward(self, pending: list[tuple[MicroBatch, torch.Tensor]], scale: float) -> None:
        """Compute the gradients of the pending micro-batches in random order, and empty the list."""
        self._draw.shuffle(pending)
        for batch, logprobs_T in pending:
            self._worker.backward(loss_of(logprobs_T, batch, scale))
        pending.clear()

    def _problem(self, step: _Step, logprobs: dict[int, list[list[float]]], norm: float) -> str:
        """Return what is wrong with the logprobs of a share of the data or with the gradient norm, if anything is."""
        subject, reference = self._subject, self._reference
        reference.put(self._weights[self._worker.version - 1])
        for share, found in logprobs.items():
            for i, batch in enumerate(step.batches[share]):
                with torch.no_grad():
                    expected_T = reference.logprobs(batch).flatten()
                apart_T = (torch.tensor(found[i], dtype=torch.float64) - expected_T).abs()
                apart = float(apart_T.max())
                self._largest, self._num_compared = max(self._largest, apart), self._num_compared + len(apart_T)
                if not apart <= subject.tolerance.logprob:
                    what = f"segments of {batch.segment_lengths} tokens"
                    what += " that share prefixes" if batch.prefix_ids_T is not None else ""
                    what += ", with target ids," if batch.target_ids_TK is not None else ""
                    return f"logprobs of {what} differ by up to {apart:.2e} nats from those of transformers"
        expected = reference.gradient_norm(list(itertools.chain(*step.batches)), step.scale)
        if not abs(norm - expected) <= subject.tolerance.gradient * expected:
            return f"the gradient norm is {norm:.6g}, but that of autograd is {expected:.6g}"
        return ""

    def _maybe_call(self) -> None:
        """Make a random call that must change nothing, or no call."""
        subject, worker, draw = self._subject, self._worker, self._draw
        kind = draw.choice(("", "", "forward", "gather", "save"))
        self._num_calls += bool(kind)
        if kind == "forward":
            batches = [self._make_batch() for _ in range(subject.data_size)]
            with torch.no_grad():
                worker.forward(batches[subject.data_rank])
        elif kind == "gather":
            found = gathered(worker, draw.choice((1, 4096, 1 << 30)))
            changed = differing(found, self._weights.get(worker.version, found))
            words = f"gathered tensors have changed although no step was taken: {shortened(changed)}"
            subject.require_on_all_ranks(not changed, words)
        elif kind == "save":
            worker.save(subject.fresh_path(f"between-{self._num_calls}"))

    def _save(self) -> None:
        version = self._worker.version
        self._saved[version] = self._subject.fresh_path(f"version-{version}")
        self._worker.save(self._saved[version])

    def _load(self) -> int:
        """Load a random checkpoint, fail unless this restores its version and weights, and return the version."""
        subject, worker = self._subject, self._worker
        version = self._draw.choice(sorted(self._saved))
        worker.load(self._saved[version])
        self._weights = {number: weights for number, weights in self._weights.items() if number <= version}
        changed = differing(self._weights[version], gathered(worker))
        words = f"after loading version {version}, the worker is at version {worker.version}"
        is_restored = worker.version == version and not changed
        subject.require_on_all_ranks(is_restored, f"{words}; tensors not restored: {shortened(changed)}")
        return version
