"""Random padded batches, as other frameworks take them, and their tokens as the packed micro-batches of this library.

Shape suffixes: B rows, T padded columns or packed tokens; H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from inflight.types import MicroBatch

LENGTHS = (17, 1, 5, 9, 3, 12, 2, 14, 7, 4, 11, 6)
"""Of the rows; each is one completion, the groups of three after one another."""
DRIFTS = (1.0, 1.0, 0.15, 0.5, 0.1, 1.0, 0.4, 0.05, 0.7, 0.03, 0.2, 1.0)
"""How far the logprobs of a row lie apart, so that ratios of whole rows fall on both sides of every bound too."""
LEANS = (-0.3, 0.3, 0.3, 0.3, -0.3, -0.3, 0.3, -0.3, 0.3, 0.3, -0.3, 0.3)
"""Where the middle of these distances lies, in parts of the farthest."""
ADVANTAGES = (1.0, -1.25, 0.5, -0.5, 0.75, -2.0, 1.5, -1.0, 0.0, -0.75, 2.0, 0.25)
"""Of the rows, where all tokens of a row have one advantage."""
NUM_GENERATIONS = 3


@dataclass(frozen=True)
class Padded:
    """Rows of unequal length, float64 but exact in float32. What stands beyond the end of a row is masked."""

    trainer_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    proximal_BT: torch.Tensor
    reference_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    inside_BT: torch.Tensor
    """Tokens of a row, masked or not."""

    @property
    def row_advantages(self):
        """One advantage for each row."""
        return self.advantages_BT[:, 0]

    def rows(self, *rows):
        """Some of the rows."""
        return Padded(*(getattr(self, field.name)[list(rows)] for field in fields(self)))

    def pack(self, values_BT, prompt=0.0):
        """The values of the tokens inside of rows, packed behind one prompt token each, with their gradient."""
        lengths_B = self.inside_BT.sum(1)
        starts_B = (lengths_B + 1).cumsum(0) - lengths_B - 1
        completion_T = torch.ones(int(lengths_B.sum()) + len(lengths_B), dtype=torch.bool)
        completion_T[starts_B] = False
        packed_T = torch.full(completion_T.shape, prompt, dtype=values_BT.dtype)
        return packed_T.masked_scatter(completion_T, values_BT[self.inside_BT])

    def packed(self):
        """The same targets as a micro-batch: each row a segment of one prompt token and what is inside of the row."""
        lengths = [1 + int(length) for length in self.inside_BT.sum(1)]
        total = sum(lengths)
        return MicroBatch(
            token_ids_T=torch.zeros(total, dtype=torch.int64),
            position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
            segment_ids_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            segment_lengths=tuple(lengths),
            loss_mask_T=self.pack(self.mask_BT, prompt=False),
            behaviour_logprobs_T=self.pack(self.behaviour_BT),
            advantages_T=self.pack(self.advantages_BT),
            temperature_T=torch.ones(total),
            versions_T=torch.zeros(total, dtype=torch.int64),
            reference_logprobs_T=self.pack(self.reference_BT),
            proximal_logprobs_T=self.pack(self.proximal_BT),
        )


def padded_batch(seed=0, *, per_token=False, drift=2.0, trainer_BT=None):
    """Rows with holes in their masks and logprobs up to ``drift`` apart, references at most 1 from the trainer's.

    Advantages are of both signs and 0, one for each row or each token. Every row has a target and its first column is
    one. Trainer logprobs are random between -3 and -0.1 unless given.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)

    def uniform(low, high):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    def exact(values_BT):
        return values_BT.float().double()

    def apart():
        distance_BT = torch.tensor(LEANS)[:, None] + 0.7 * uniform(-1, 1)
        return exact((trainer_BT + drift * torch.tensor(DRIFTS)[:, None] * distance_BT).clamp(max=-0.01))

    inside_BT = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    holes_BT = uniform(0, 1) < 0.2
    holes_BT[:, 0] = False
    random_BT = exact(uniform(-3, -0.1))
    trainer_BT = random_BT if trainer_BT is None else trainer_BT
    signed_BT = torch.where(uniform(0, 1) < 0.5, 1.0, -0.75).double()
    signed_BT[uniform(0, 1) < 0.1] = 0.0
    row_BT = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(shape).contiguous()
    return Padded(
        trainer_BT=trainer_BT,
        behaviour_BT=apart(),
        proximal_BT=apart(),
        reference_BT=exact(trainer_BT + uniform(-1, 1)),
        advantages_BT=signed_BT if per_token else row_BT,
        mask_BT=inside_BT & ~holes_BT,
        inside_BT=inside_BT,
    )


def head_inputs(dtype=torch.float32):
    """Hidden states [B, T, H], the head's weight [V, H] and tokens [B, T] of a batch."""
    generator = torch.Generator().manual_seed(3)
    shape = len(LENGTHS), max(LENGTHS)
    hidden_BTH = torch.randn(*shape, 32, generator=generator)
    weight_VH = 0.3 * torch.randn(211, 32, generator=generator)
    return hidden_BTH.to(dtype), weight_VH.to(dtype), torch.randint(211, shape, generator=generator)
