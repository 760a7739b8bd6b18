"""Denominators, which determine how much weight each target has in the loss.

The loss is a plain sum over targets. Its weights come from counts over the whole optimizer step, so any split of the
segments into micro-batches and ranks gives the same gradient.

Shape suffixes: N targets, S segments, P prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

import torch
from pydantic import Field

from inflight.errors import InvalidRequestError
from inflight.losses.pieces import Piece
from inflight.losses.targets import Targets

Counted = Literal["before", "after"]
"""Whether a denominator counts before or after corrections have rejected targets.

``before`` counts all targets and, as in the papers, all completions, even those without a target. ``after`` counts the
remaining targets, and the completions that still have one.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over the whole optimizer step: all micro-batches of all ranks."""

    num_tokens: float
    """Number of targets."""
    num_sequences: float
    """Number of completions or, after rejection, of those that still have a target."""
    tokens_P: tuple[float, ...] = ()
    """Number of targets in all completions of each prompt; empty if no denominator needs these numbers."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts with at least one target, before or after rejection."""
        return sum(tokens > 0 for tokens in self.tokens_P)


class TokenMean(Piece):
    """1 / N_tokens: every token of the step has the same weight (DAPO, arXiv 2503.14476, eq. 8)."""

    kind: Literal["token_mean"] = "token_mean"
    counted: Counted = "before"


class SegmentMean(Piece):
    """1 / (N_sequences L_i): every sequence has the same weight, so tokens of short ones weigh more (GRPO, 2402.03300).

    L_i counts targets.
    """

    kind: Literal["segment_mean"] = "segment_mean"
    counted: Counted = "before"


class SegmentSum(Piece):
    """1 / N_sequences: a sum over each sequence's tokens (PipelineRL). With a whole-sequence ratio, it is LUSPO's
    weight.
    """

    kind: Literal["segment_sum"] = "segment_sum"
    counted: Counted = "before"


class Constant(Piece):
    """1 / (N_sequences length): a sum over each sequence, scaled by a fixed length (Dr. GRPO, 2503.20783)."""

    kind: Literal["constant"] = "constant"
    length: float = Field(gt=0)
    """In tokens; usually the longest completion that sampling allows."""
    counted: Counted = "before"


class PromptMean(Piece):
    """1 / (N_prompts T_p): equal weight for prompts; T_p counts a prompt's completion tokens (ScaleRL, 2510.13786)."""

    kind: Literal["prompt_mean"] = "prompt_mean"
    counted: Counted = "before"


class Budget(Piece):
    """1 / tokens: a fixed number of tokens, regardless of the step's size (C3PO, Ring-lite, arXiv 2506.14731)."""

    kind: Literal["budget"] = "budget"
    tokens: float = Field(gt=0)


class Sum(Piece):
    """1: the loss is a plain sum over tokens (Tinker)."""

    kind: Literal["sum"] = "sum"


Aggregation = Annotated[
    TokenMean | SegmentMean | SegmentSum | Constant | PromptMean | Budget | Sum, Field(discriminator="kind")
]
"""How the losses of targets become the loss of a step."""


def token_shares(
    aggregation: Aggregation,
    targets: Targets,
    counted_N: torch.Tensor,
    prompts_S: torch.Tensor | None,
    counts: Counts,
) -> torch.Tensor:
    """Return the weight of each target, float64 [N].

    ``counted_N`` and ``counts`` cover all targets or only the kept ones, depending on what the aggregation counts.
    ``prompts_S`` indicates which segments share a prompt. Raises `InvalidRequestError` if that is needed but None.
    """
    # A step without targets has counts of 0, and nothing to weigh.
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    match aggregation:
        case TokenMean():
            denominator: float | torch.Tensor = num_tokens
        case SegmentMean():
            length_S = targets.segment_sum(counted_N.double()).clamp(min=1)
            denominator = num_sequences * length_S[targets.segments_N]
        case SegmentSum():
            denominator = num_sequences
        case Constant():
            denominator = num_sequences * aggregation.length
        case PromptMean():
            if prompts_S is None:
                raise InvalidRequestError(
                    "prompt_mean needs the micro-batch's group_ids_S, which indicate which segments share a prompt"
                )
            tokens_P = torch.tensor(counts.tokens_P, dtype=torch.float64, device=prompts_S.device)
            denominator = max(counts.num_prompts, 1) * tokens_P[prompts_S[targets.segments_N]].clamp(min=1)
        case Budget():
            denominator = aggregation.tokens
        case Sum():
            denominator = 1.0
        case _:
            assert_never(aggregation)
    return torch.ones_like(targets.advantages_N) / denominator


def counts_after_rejection(aggregation: Aggregation) -> bool:
    """Return whether rejected targets are excluded from the denominator."""
    return getattr(aggregation, "counted", "before") == "after"
