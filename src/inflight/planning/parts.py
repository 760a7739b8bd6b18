"""Where a speed-up over conventional RL comes from: its parts, whose product it is.

Each part is the ratio of two simulated runs that differ in one thing, in this order:

- memory: endpoints keep the memory that trainers shared with them, and take more completions (LlamaRL's theorem);
- stragglers: completions of a phase are all equally long, so that none is waited for;
- bubbles: sampling and training continue at the same time, on devices of their own, with the true lengths again;
- drafts: what is drafted counts.

Stragglers and bubbles are parts of what the pipeline removes. Where the pipeline itself waits for its longest
completions, the part of the bubbles is smaller for it, and may be below 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from inflight.planning.calibration import Costs
from inflight.planning.candidates import Candidate, simulated
from inflight.planning.groups import Prompted


@dataclass(frozen=True, slots=True)
class Parts:
    """Ratios of trained tokens per second."""

    memory: float
    stragglers: float
    bubbles: float
    drafts: float

    @property
    def product(self) -> float:
        """The whole speed-up."""
        return self.memory * self.stragglers * self.bubbles * self.drafts


def parts_of(costs: Costs, conventional: Candidate, pipeline: Candidate, num_steps: int) -> Parts:
    """Return the parts of the speed-up of a pipeline over a conventional run without drafts."""
    plain = dataclasses.replace(costs, tokens_per_forward=1.0)
    roomy = dataclasses.replace(conventional, max_concurrent=pipeline.max_concurrent)
    even = dataclasses.replace(plain, prompted=_even(costs))

    def speed(costs: Costs, candidate: Candidate) -> float:
        return simulated(costs, candidate, num_steps).steady(num_steps // 5).tokens_per_time

    speeds = [
        speed(plain, conventional),
        speed(plain, roomy),
        speed(even, roomy),
        speed(plain, pipeline),
        speed(costs, pipeline),
    ]
    return Parts(*(after / before for before, after in itertools.pairwise(speeds)))


def _even(costs: Costs) -> Callable[[int], Callable[[int, int], Prompted]]:
    """Return prompts whose completions have the mean length of all."""
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
