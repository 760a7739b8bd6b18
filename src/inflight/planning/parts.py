"""Splits the speed-up over conventional RL into factors.

Each factor is the ratio of the speeds of two simulated runs that differ in one respect, in this order:

- memory: endpoints no longer share memory with trainers, so they run more completions (LlamaRL's theorem);
- stragglers: all completions of a phase have the same length, so no completion waits for the longest;
- bubbles: sampling and training run concurrently on separate devices, with the true lengths;
- drafts: speculative drafts are enabled.

The pipeline removes both stragglers and bubbles. If the pipeline itself waits for its longest completions, the factor
for bubbles is smaller and may be below 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from inflight.planning.calibration import Costs
from inflight.planning.candidates import Candidate, simulate_candidate
from inflight.planning.groups import Prompted


@dataclass(frozen=True, slots=True)
class Parts:
    """The factors of the speed-up; each is a ratio of two runs' trained tokens per second."""

    memory: float
    stragglers: float
    bubbles: float
    drafts: float

    @property
    def product(self) -> float:
        """The total speed-up."""
        return self.memory * self.stragglers * self.bubbles * self.drafts


def parts_of(costs: Costs, conventional: Candidate, pipeline: Candidate, num_steps: int) -> Parts:
    """Return the factors of the speed-up of a pipeline over a conventional run without drafts."""
    plain = dataclasses.replace(costs, tokens_per_forward=1.0)
    roomy = dataclasses.replace(conventional, max_concurrent=pipeline.max_concurrent)
    even = dataclasses.replace(plain, prompted=_with_equal_lengths(costs))

    def speed(costs: Costs, candidate: Candidate) -> float:
        return simulate_candidate(costs, candidate, num_steps).steady(num_steps // 5).tokens_per_time

    speeds = [
        speed(plain, conventional),
        speed(plain, roomy),
        speed(even, roomy),
        speed(plain, pipeline),
        speed(costs, pipeline),
    ]
    return Parts(*(after / before for before, after in itertools.pairwise(speeds)))


def _with_equal_lengths(costs: Costs) -> Callable[[int], Callable[[int, int], Prompted]]:
    """Return a function that samples items whose completions all have the mean length."""
    of_size = costs.prompted
    assert of_size is not None

    def even(group_size: int) -> Callable[[int, int], Prompted]:
        true = of_size(group_size)
        mean = round(statistics.fmean(length for item in range(512) for length in true(item, 0).lengths))

        def prompted(item: int, version: int) -> Prompted:
            it = true(item, version)
            return dataclasses.replace(it, lengths=(mean,) * len(it.lengths))

        return prompted

    return even
