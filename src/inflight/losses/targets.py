"""The targets of a micro-batch, one after another, and which of them share a segment.

Masked tokens are removed before anything is computed, so that a NaN there is never multiplied by a zero gradient.
Values are float64: N values are few compared with N rows of logits, and ratios of whole segments need float64's range.

Shape suffixes: N targets (tokens with a true loss mask), S segments, K candidate tokens at a target's position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch

Level = Literal["token", "segment_mean", "segment_mean_token", "segment_product", "prefix"]
"""The tokens that a ratio covers, with x_t = log ratio of token t and sums over the targets of its segment:

``token``               x_t
``segment_mean``        (1/L) sum x: log of the geometric mean (GSPO, arXiv 2507.18071, eq. 7)
``segment_mean_token``  the same value, but the gradient goes to x_t alone (GSPO-token, the same paper, eq. 14)
``segment_product``     sum x: log of the ratio of the whole sequence
``prefix``              sum of x up to and including t
"""

Between = Literal["trainer/behaviour", "trainer/proximal", "proximal/behaviour"]
"""The two policies of a ratio. The proximal policy is the trainer's at the start of the optimizer step."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of one micro-batch, float64 [N] unless noted. Only trainer logprobs and entropies have a gradient.

    All targets of a segment are included, one after another.
    """

    trainer_N: torch.Tensor
    """The natural log of the probability under the trained weights."""
    behaviour_N: torch.Tensor
    proximal_N: torch.Tensor
    advantages_N: torch.Tensor
    segments_N: torch.Tensor
    """int64, 0 to ``num_segments`` - 1."""
    num_segments: int
    lag_N: torch.Tensor | None = None
    """int64, number of versions between the weights that sampled the token and the trained weights."""
    reference_N: torch.Tensor | None = None
    teacher_N: torch.Tensor | None = None
    teacher_top_NK: torch.Tensor | None = None
    """Teacher logprobs of the teacher's K most likely tokens at each target's position."""
    student_top_NK: torch.Tensor | None = None
    """Trainer logprobs of the same tokens, with a gradient."""
    entropy_N: torch.Tensor | None = None
    """Entropy of the trainer's distribution at the target, in nats."""

    def log_ratio(self, between: Between) -> torch.Tensor:
        """Return the log ratio of each token, with a gradient if it involves the trainer."""
        match between:
            case "trainer/behaviour":
                return self.trainer_N - self.behaviour_N
            case "trainer/proximal":
                return self.trainer_N - self.proximal_N
            case "proximal/behaviour":
                return self.proximal_N - self.behaviour_N
            case _:
                assert_never(between)

    def segment_sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over each segment's targets, [S]."""
        return values_N.new_zeros(self.num_segments).index_add(0, self.segments_N, values_N)

    def segment_mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over each segment's targets, [S]; 0 for a segment without targets."""
        return self.segment_sum(values_N) / self.segment_sum(torch.ones_like(values_N)).clamp(min=1)

    def at_level(self, log_ratio_N: torch.Tensor, level: Level) -> torch.Tensor:
        """Return the log ratio of each target at a level, [N]."""
        match level:
            case "token":
                return log_ratio_N
            case "segment_mean":
                return self.segment_mean(log_ratio_N)[self.segments_N]
            case "segment_mean_token":
                # The difference is 0 and has the gradient of the token's own logprob.
                own_N = log_ratio_N - log_ratio_N.detach()
                return self.segment_mean(log_ratio_N.detach())[self.segments_N] + own_N
            case "segment_product":
                return self.segment_sum(log_ratio_N)[self.segments_N]
            case "prefix":
                before_S = torch.cat([log_ratio_N.new_zeros(1), self.segment_sum(log_ratio_N).cumsum(0)[:-1]])
                return log_ratio_N.cumsum(0) - before_S[self.segments_N]
            case _:
                assert_never(level)
