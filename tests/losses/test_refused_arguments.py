"""Every function of the room that promises an error for what does not fit gives that one, for every argument.

A row is a function, one of its arguments, and a wrong value for it; a test at the end asks for a row, or a reason why
there is none, for every argument of every such function.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch

from inflight.errors import ConfigError, InvalidRequestError, NonFiniteError
from inflight.losses import (
    Band,
    Distillation,
    Entropy,
    KeptTokens,
    Kl,
    MaxAge,
    PolicyLoss,
    PpoClip,
    PromptMean,
    SecondMoment,
    TeacherKl,
    chunked_logprobs,
    chunked_logprobs_and_entropy,
    collate,
    grpo_loss,
    one_pass,
    prepare,
    preset,
    reinforce_loss,
)
from inflight.types import MicroBatch
from tests.losses.steps import VERSION, logprobs_of, plan_of, random_step
from tests.losses.test_collate import FIRST

N, H, V = 3, 6, 17
META = torch.device("meta")

# ---- what fits

HEAD = {
    "hidden_NH": torch.ones(N, H),
    "weight_VH": torch.ones(V, H),
    "targets_N": torch.tensor([4, 5, 16]),
    "temperature_N": torch.ones(N),
    "bias_V": torch.ones(V),
    "chunk_size": 2,
}
TWO_PASSES = HEAD | {
    "vocab_chunk_size": 4,
    "kept": KeptTokens(torch.tensor([4, 5, 5, 0, 16]), torch.tensor([0, 2, 3, 5])),
}
ONE_PASS = HEAD | {"loss_of": lambda logprobs_C, rows: logprobs_C.sum()}
PLAIN = {
    "trainer_logprobs": torch.full((2, 4), -1.0),
    "behaviour_logprobs": torch.full((2, 4), -1.0),
    "advantages": torch.ones(2),
    "loss_mask": torch.ones(2, 4, dtype=torch.bool),
    "denominator": 8.0,
}
GRPO = PLAIN | {"clip_low": 0.2, "clip_high": 0.2}
REINFORCE = PLAIN | {"cap": 5.0}

LOSS = PolicyLoss(
    gate=PpoClip(),
    corrections=(SecondMoment(), MaxAge(versions=9)),
    penalties=(Kl(coefficient=0.1), Entropy(coefficient=0.1)),
    aggregation=PromptMean(counted="after"),
)
LOCAL = PolicyLoss(gate=PpoClip(), corrections=(MaxAge(versions=9),), penalties=(Kl(coefficient=0.1),))
BATCH, LOGITS_TV = random_step()
TRAINER_T = logprobs_of(LOGITS_TV, BATCH.token_ids_T, BATCH.temperature_T)
PLAN = plan_of(LOSS, [BATCH], [TRAINER_T])
GRADIENT = {"batch": BATCH, "trainer_logprobs_T": TRAINER_T, "plan": PLAN, "entropy_T": torch.ones_like(TRAINER_T)}
TAUGHT = LOSS.model_copy(
    update={"penalties": (*LOSS.penalties, TeacherKl(coefficient=0.1)), "distillation": Distillation()}
)
CALL = GRADIENT | {
    "plan": plan_of(TAUGHT, [BATCH], [TRAINER_T]),
    "student_top_TK": BATCH.teacher_top_logprobs_TK - 0.1,
}
PREPARE = {
    "loss": LOSS,
    "batches": [BATCH],
    "trainer_logprobs": [TRAINER_T],
    "current_version": VERSION,
    "num_groups": 3,
    "num_sequences": 6,
    "reduce": lambda numbers: numbers,
}


def in_one_pass(batch, plan):
    """The loss on hidden states: what cannot be known before is refused when the first part is computed."""
    num_targets = int(batch.loss_mask_T.sum())
    head = {
        "hidden_NH": torch.ones(num_targets, H, dtype=torch.float64),
        "weight_VH": torch.ones(V, H, dtype=torch.float64),
        "targets_N": batch.token_ids_T[batch.loss_mask_T],
        "temperature_N": torch.ones(num_targets),
    }
    return one_pass(**head, loss_of=LOCAL.on_targets(batch, plan))


FUNCTIONS = {
    "chunked_logprobs": (chunked_logprobs, TWO_PASSES),
    "chunked_logprobs_and_entropy": (chunked_logprobs_and_entropy, TWO_PASSES),
    "one_pass": (one_pass, ONE_PASS),
    "grpo_loss": (grpo_loss, GRPO),
    "reinforce_loss": (reinforce_loss, REINFORCE),
    "PolicyLoss.__call__": (TAUGHT.__call__, CALL),
    "PolicyLoss.gradient": (LOSS.gradient, GRADIENT),
    "PolicyLoss.on_targets": (in_one_pass, {"batch": BATCH, "plan": plan_of(LOCAL, [BATCH], [TRAINER_T])}),
    "prepare": (prepare, PREPARE),
    "collate": (collate, {"samples": [FIRST]}),
    "preset": (preset, {"name": "grpo"}),
}

# ---- what does not


def widened(tensor):
    return torch.cat([tensor, tensor[:1]])


def misshapen(tensor):
    """A tensor with one more entry, one with one more dimension, and a scalar."""
    return [widened(tensor), tensor.unsqueeze(0), tensor.flatten()[0]]


def mistyped(tensor):
    """The tensor in dtypes of another kind, and on another device."""
    wrong = [torch.int64, torch.bool, torch.complex64] if tensor.is_floating_point() else [torch.float32, torch.bool]
    return [tensor.to(dtype) for dtype in wrong] + [tensor.to(META)]


def wrong_of(tensor):
    return misshapen(tensor) + mistyped(tensor)


def with_entry(tensor, value, index=1):
    changed = tensor.clone()
    changed.view(-1)[index] = value
    return changed


def temperatures():
    return [with_entry(torch.ones(N), value) for value in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-40)]


def kept_tokens():
    ids, offsets = TWO_PASSES["kept"].token_ids_K, TWO_PASSES["kept"].offsets
    return [
        *(KeptTokens(wrong, offsets) for wrong in wrong_of(ids)),
        *(KeptTokens(ids, wrong) for wrong in wrong_of(offsets)),
        *(KeptTokens(with_entry(ids, token), offsets) for token in (-1, V)),
        *(KeptTokens(ids, torch.tensor(wrong)) for wrong in ([1, 2, 3, 5], [0, 2, 3, 4], [0, 3, 2, 5], [0, 2, 3, 6])),
        KeptTokens(with_entry(ids, 3, index=0), offsets),
    ]


def batches(*, of_step):
    """Micro-batches that lack something or do not fit together."""
    yield replace(BATCH, group_ids_S=None)
    yield replace(BATCH, group_ids_S=BATCH.group_ids_S[:-1])
    yield replace(BATCH, group_ids_S=with_entry(BATCH.group_ids_S, 3))
    yield replace(BATCH, group_ids_S=with_entry(BATCH.group_ids_S, -1))
    if not of_step:
        yield replace(BATCH, reference_logprobs_T=None)
    yield replace(BATCH, segment_lengths=BATCH.segment_lengths[:-1])
    yield replace(BATCH, segment_ids_T=with_entry(BATCH.segment_ids_T, 6))
    for name in MicroBatch.__dataclass_fields__:
        if name.endswith("_T") and name not in ("token_ids_T", "position_ids_T", "temperature_T", "prefix_ids_T"):
            value = getattr(BATCH, name)
            wrong = wrong_of(value) if value.dtype != torch.bool else [*misshapen(value), value.long(), value.to(META)]
            yield from (replace(BATCH, **{name: it}) for it in wrong)


def batches_of_teachers():
    """Micro-batches whose scores of teachers are missing, do not fit, or have not been computed yet."""
    yield replace(BATCH, teacher_logprobs_T=None)
    yield replace(BATCH, teacher_logprobs_T=torch.full_like(BATCH.teacher_logprobs_T, math.nan))
    yield replace(BATCH, teacher_top_logprobs_TK=None)
    for name in ("teacher_top_ids_TK", "teacher_top_logprobs_TK"):
        yield from (replace(BATCH, **{name: it}) for it in wrong_of(getattr(BATCH, name)))


OTHER_PLANS = [
    plan_of(other, [BATCH], [TRAINER_T])
    for other in (
        PolicyLoss(gate=PpoClip()),
        LOSS.model_copy(update={"corrections": (MaxAge(versions=9), SecondMoment())}),
        LOSS.model_copy(update={"corrections": (Band(), MaxAge(versions=9))}),
        LOSS.model_copy(update={"gate": PpoClip(), "aggregation": PolicyLoss(gate=PpoClip()).aggregation}),
    )
]
SIZES = [0, -1, 1.5]
NOT_POSITIVE = [0.0, -1.0, math.nan, math.inf]
NOT_FINITE = [math.nan, math.inf]
SHORT = replace(FIRST, advantages=[1.0])

WRONG_HEAD = {
    "hidden_NH": wrong_of(HEAD["hidden_NH"]),
    "weight_VH": [torch.ones(V, H + 1), *misshapen(HEAD["weight_VH"])[1:], *mistyped(HEAD["weight_VH"])],
    "targets_N": [
        *wrong_of(HEAD["targets_N"]), HEAD["targets_N"].int(),
        *(with_entry(HEAD["targets_N"], token) for token in (-1, -100, V, 2**40)),
    ],
    "temperature_N": [
        *misshapen(HEAD["temperature_N"]), *mistyped(HEAD["temperature_N"])[2:], *temperatures()
    ],
    "bias_V": wrong_of(HEAD["bias_V"]),
    "chunk_size": SIZES,
}  # fmt: skip
WRONG_PLAIN = {
    "trainer_logprobs": wrong_of(PLAIN["trainer_logprobs"]),
    "behaviour_logprobs": [
        *wrong_of(PLAIN["behaviour_logprobs"]), *(with_entry(PLAIN["behaviour_logprobs"], x) for x in NOT_FINITE)
    ],
    "advantages": [
        torch.ones(3), torch.ones(1, 2), torch.ones(2, 4, 1), *mistyped(PLAIN["advantages"])[2:],
        *(with_entry(PLAIN["advantages"], x) for x in NOT_FINITE),
    ],
    "loss_mask": [
        *misshapen(PLAIN["loss_mask"]), PLAIN["loss_mask"].to(torch.complex64), PLAIN["loss_mask"].to(META)
    ],
    "denominator": [*NOT_POSITIVE, torch.tensor(0), torch.ones(2)],
}  # fmt: skip
WRONG_LOGPROBS = wrong_of(TRAINER_T)

WRONG = {
    "chunked_logprobs": WRONG_HEAD | {"vocab_chunk_size": SIZES, "kept": kept_tokens()},
    "chunked_logprobs_and_entropy": WRONG_HEAD | {"vocab_chunk_size": SIZES, "kept": kept_tokens()},
    "one_pass": WRONG_HEAD | {"loss_of": [lambda logprobs_C, _: logprobs_C, lambda *_: 0.0]},
    "grpo_loss": WRONG_PLAIN | {"clip_low": [-0.1, math.nan], "clip_high": [-0.1, math.nan]},
    "reinforce_loss": WRONG_PLAIN | {"cap": [-1.0, math.nan]},
    "PolicyLoss.__call__": {
        "batch": [*batches(of_step=False), *batches_of_teachers()],
        "trainer_logprobs_T": WRONG_LOGPROBS,
        "plan": [PLAN, *OTHER_PLANS],
        "entropy_T": [None, *WRONG_LOGPROBS],
        "student_top_TK": [None, *wrong_of(CALL["student_top_TK"])],
    },
    "PolicyLoss.gradient": {
        "batch": list(batches(of_step=False)),
        "trainer_logprobs_T": WRONG_LOGPROBS,
        "plan": OTHER_PLANS,
        "entropy_T": WRONG_LOGPROBS,
    },
    "PolicyLoss.on_targets": {"batch": [replace(BATCH, reference_logprobs_T=None)], "plan": OTHER_PLANS},
    "prepare": {
        "loss": [],
        "batches": [[], [BATCH, BATCH], *([batch] for batch in batches(of_step=True))],
        "trainer_logprobs": [None, [], *([wrong] for wrong in WRONG_LOGPROBS)],
        "current_version": [None],
        "num_groups": [None, 2, -1],
        "num_sequences": [5, 0, -1],
        "reduce": [],
    },
    "collate": {"samples": [[SHORT], [FIRST, replace(FIRST, reference_logprobs=[0.0] * 3)]]},
    "preset": {"name": ["no such loss"]},
}
"""By function and argument; a loss and what sums over ranks are made by their author."""

ROWS = [
    pytest.param(function, name, wrong, id=f"{function}-{name}-{index}")
    for function, arguments in WRONG.items()
    for name, values in arguments.items()
    for index, wrong in enumerate(values)
]


@pytest.mark.parametrize(("function", "name", "wrong"), ROWS)
def test_an_argument_that_does_not_fit_is_refused(function, name, wrong):
    call, given = FUNCTIONS[function]
    with pytest.raises((InvalidRequestError, NonFiniteError, ConfigError)) as caught:
        call(**given | {name: wrong})
    assert not isinstance(caught.value, NonFiniteError) or "not finite" in str(caught.value)
    assert isinstance(caught.value, ConfigError) == (function == "preset")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_fit_are_not_refused(function):
    call, given = FUNCTIONS[function]
    call(**given)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_has_a_row(function):
    call = FUNCTIONS[function][0]
    assert {*inspect.signature(call).parameters} - {"device", "image_tensors", "share_prefixes"} == {*WRONG[function]}


def test_a_part_of_the_loss_may_be_a_constant():
    hidden_NH = HEAD["hidden_NH"].clone().requires_grad_()
    loss = one_pass(**ONE_PASS | {"hidden_NH": hidden_NH, "loss_of": lambda *_: torch.tensor(2.0)})
    loss.backward()
    assert loss.item() == 4.0
    assert hidden_NH.grad.count_nonzero() == 0


def test_hidden_states_that_are_not_finite_are_not_called_tokens_that_were_not_kept():
    hidden_NH = HEAD["hidden_NH"].clone()
    hidden_NH[1, 0] = math.nan
    logprobs_N = chunked_logprobs(**TWO_PASSES | {"hidden_NH": hidden_NH})
    assert logprobs_N.isnan().tolist() == [False, True, False]
