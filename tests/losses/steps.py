"""Random optimizer steps: whole, in parts, and as the references see them. All in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from inflight.losses import prepare
from inflight.types import MicroBatch
from tests.losses.reference import Token

LENGTHS = (5, 2, 9, 4, 1, 7)
"""Of the segments in most tests; the fifth has no target."""
VOCAB = 11
MASKS = ("holes", "everything", "prompts_only_first", "single", "tails")


def random_step(lengths=LENGTHS, seed=0, *, mask="holes", drift=2.0, temperature=None):
    """A packed step and its logits [T, V]: advantages of both signs and zero, ratios from e^-drift to e^drift.

    Logprobs are of the logits over the temperature of each token.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    positions_T = torch.cat([torch.arange(length) for length in lengths])

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*(shape or (total,)), generator=generator, dtype=torch.float64)

    logits_TV = uniform(-2.0, 2.0, total, VOCAB)
    token_ids_T = torch.randint(VOCAB, (total,), generator=generator)
    temperature_T = uniform(0.5, 1.5) if temperature is None else torch.full((total,), temperature).double()
    trainer_T = logprobs_of(logits_TV, token_ids_T, temperature_T)
    advantages_T = uniform(-1.5, 1.5)
    advantages_T[uniform(0, 1) < 0.15] = 0.0
    ids_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask_T = {
        "holes": uniform(0, 1) < 0.8,
        "everything": torch.ones(total, dtype=torch.bool),
        "prompts_only_first": ids_T != 0,
        "single": torch.arange(total) == total - 1,
        "tails": positions_T >= 2,
    }[mask] & (positions_T > 0)
    batch = MicroBatch(
        token_ids_T=token_ids_T,
        position_ids_T=positions_T,
        segment_ids_T=ids_T,
        segment_lengths=tuple(lengths),
        loss_mask_T=mask_T,
        behaviour_logprobs_T=torch.clamp(trainer_T + uniform(-drift, drift), max=-1e-3),
        advantages_T=advantages_T,
        temperature_T=temperature_T,
        versions_T=torch.randint(4, 10, (total,), generator=generator),
        reference_logprobs_T=trainer_T + uniform(-1, 1),
        proximal_logprobs_T=torch.clamp(trainer_T + uniform(-0.5, 0.5) * min(drift, 1.0), max=-1e-3),
        group_ids_S=torch.arange(len(lengths)) // 2,
    )
    teacher_TV = torch.log_softmax(logits_TV + uniform(-1.0, 1.0, total, VOCAB), 1)
    top_logprobs_TK, top_ids_TK = teacher_TV.topk(3, dim=1)
    return replace(
        batch,
        teacher_logprobs_T=teacher_TV.gather(1, token_ids_T[:, None]).squeeze(1),
        teacher_top_ids_TK=top_ids_TK,
        teacher_top_logprobs_TK=top_logprobs_TK,
    ), logits_TV


VERSION = 9
"""Of the weights that are trained; tokens are 0 to 5 versions old."""


def logprobs_of(logits_TV, token_ids_T, temperature_T):
    """log softmax(logits / temperature) at the tokens."""
    log_softmax_TV = torch.log_softmax(logits_TV / temperature_T[:, None], 1)
    return log_softmax_TV.gather(1, token_ids_T[:, None]).squeeze(1)


def top_logprobs_of(logits_TV, batch):
    """log softmax(logits / temperature) at the teacher's likeliest tokens, [T, K]."""
    return torch.log_softmax(logits_TV / batch.temperature_T[:, None], 1).gather(1, batch.teacher_top_ids_TK)


def sequences_of(batch, trainer_T, top_TK=None):
    """The step as the references take it; without ``top_TK``, tokens lack those of the teacher."""
    step = []
    top_of_teacher = None if top_TK is None else batch.teacher_top_logprobs_TK.tolist()
    for segment in range(len(batch.segment_lengths)):
        rows = ((batch.segment_ids_T == segment) & batch.loss_mask_T).nonzero().squeeze(1).tolist()
        step.append(
            [
                Token(
                    logp=trainer_T[t],
                    mu=batch.behaviour_logprobs_T[t].item(),
                    old=batch.proximal_logprobs_T[t].item(),
                    ref=batch.reference_logprobs_T[t].item(),
                    advantage=batch.advantages_T[t].item(),
                    lag=VERSION - int(batch.versions_T[t]),
                    group=int(batch.group_ids_S[segment]),
                    teacher=math.nan if batch.teacher_logprobs_T is None else batch.teacher_logprobs_T[t].item(),
                    top=[] if top_TK is None else [*zip(top_of_teacher[t], top_TK[t], strict=True)],
                )
                for t in rows
            ]
        )
    return step


def plan_of(loss, batches, logprobs, **kwargs):
    """What `prepare` finds out, with everything that any loss needs."""
    return prepare(
        loss,
        batches,
        trainer_logprobs=[logprobs_T.detach() for logprobs_T in logprobs],
        current_version=VERSION,
        **kwargs,
    )


def select_segments(batch, segments):
    """The micro-batch of some of the segments, and their token indices in the whole one."""
    lengths = [batch.segment_lengths[s] for s in segments]
    tokens = torch.cat([(batch.segment_ids_T == s).nonzero().squeeze(1) for s in segments])
    fields = {
        name: getattr(batch, name)[tokens]
        for name in MicroBatch.__dataclass_fields__
        if name.endswith(("_T", "_TK")) and name != "segment_ids_T" and getattr(batch, name) is not None
    }
    ids_T = torch.arange(len(segments)).repeat_interleave(torch.tensor(lengths))
    part = MicroBatch(segment_ids_T=ids_T, segment_lengths=tuple(lengths), **fields)
    return replace(part, group_ids_S=batch.group_ids_S[torch.tensor(segments)]), tokens


def further(loss, batch):
    """What a call of the loss needs in addition: the trainer's logprobs of the teacher's likeliest tokens."""
    return {"student_top_TK": batch.teacher_top_logprobs_TK - 0.3} if "teacher_top" in loss.needs else {}


def loss_and_gradient(loss, batch, trainer_T, plan, **kwargs):
    """The loss as a number and its gradient with respect to trainer logprobs."""
    leaf_T = trainer_T.detach().clone().requires_grad_()
    value = loss(batch, leaf_T, plan, **further(loss, batch), **kwargs).loss
    if value.requires_grad:
        value.backward()
    return value.item(), torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
