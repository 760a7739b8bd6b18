"""On-policy distillation: a teacher's logprobs as a term in the advantages.

Shape suffixes: N targets.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from inflight.losses.pieces import Piece
from inflight.losses.targets import Targets


class Distillation(Piece):
    """On-policy distillation: adds ``coefficient`` (log teacher - log student) to the advantage of each target.

    This gives the gradient of the per-token reverse KL(student || teacher), weighted, gated and corrected like any
    advantage.
    """

    coefficient: float = Field(default=1.0, gt=0)
    student: Literal["trainer", "proximal", "behaviour"] = "trainer"
    """The logprobs that represent the student: the current ones, those at the start of the optimizer step, or those of
    the policy that sampled the token. They are detached."""

    def advantages(self, targets: Targets) -> torch.Tensor:
        """Return the advantages with the teacher's term added, [N]."""
        assert targets.teacher_N is not None
        students = {"trainer": targets.trainer_N, "proximal": targets.proximal_N, "behaviour": targets.behaviour_N}
        student_N = students[self.student].detach()
        return targets.advantages_N + self.coefficient * (targets.teacher_N - student_N)
