"""Exact expected gradients: all 27 sequences of length 3 over 3 tokens, from a table of logits per prefix."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from inflight.losses import PRESETS, Distillation, Kl, PolicyLoss, PpoClip, Score, Sum, TeacherKl, prepare
from inflight.types import MicroBatch

PREFIXES = [prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)]
SEQUENCES = list(itertools.product(range(3), repeat=3))
ONES = torch.ones(4, dtype=torch.float64)


def table(seed, scale=1.0):
    return scale * torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequence_logprobs(logits, sequence):
    """Logprobs [4]: a prompt of one token, then the sequence."""
    logprobs = logits.log_softmax(1)
    of_tokens = [logprobs[PREFIXES.index(sequence[:t]), sequence[t]] for t in range(3)]
    return torch.stack([torch.zeros((), dtype=torch.float64), *of_tokens])


def reward(sequence):
    return math.sin(1 + sequence[0] + 3 * sequence[1] + 9 * sequence[2])


def expected_gradient(loss, logits, behaviour, reference, *, advantage=reward, targets=(1, 2, 3)):
    """Gradient at ``logits`` of the loss, in expectation over sequences drawn from ``behaviour``."""
    leaf = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        behaviour_T = sequence_logprobs(behaviour, sequence)
        trainer_T = sequence_logprobs(leaf, sequence)
        batch = MicroBatch(
            token_ids_T=torch.tensor([0, *sequence]),
            position_ids_T=torch.arange(4),
            segment_ids_T=torch.zeros(4, dtype=torch.int64),
            segment_lengths=(4,),
            loss_mask_T=torch.tensor([t in targets for t in range(4)]),
            behaviour_logprobs_T=behaviour_T,
            advantages_T=advantage(sequence) * ONES,
            temperature_T=ONES,
            versions_T=torch.zeros(4, dtype=torch.int64),
            reference_logprobs_T=sequence_logprobs(reference, sequence),
            teacher_logprobs_T=sequence_logprobs(reference, sequence),
            group_ids_S=torch.tensor([0]),
        )
        plan = prepare(loss, [batch], trainer_logprobs=[trainer_T.detach()], current_version=0)
        total = total + behaviour_T.sum().exp() * loss(batch, trainer_T, plan).loss
    total.backward()
    return leaf.grad


def true_gradient(logits, objective_of):
    leaf = logits.clone().requires_grad_()
    objective_of(leaf).backward()
    return leaf.grad


def expected_reward(x):
    return sum(sequence_logprobs(x, s).sum().exp() * reward(s) for s in SEQUENCES)


def kl_at_prefixes(behaviour, reference, *, forward=False):
    """Sum over prefixes, as often as ``behaviour`` reaches them, of KL(x || reference), or of the forward one."""
    reach = [
        math.exp(sum(behaviour.log_softmax(1)[PREFIXES.index(p[:t]), p[t]].item() for t in range(len(p))))
        for p in PREFIXES
    ]

    def objective(x):
        first, second = x.log_softmax(1), reference.log_softmax(1)
        if forward:
            first, second = second, first
        kl = (first.exp() * (first - second)).sum(1)
        return (torch.tensor(reach, dtype=torch.float64) * kl).sum()

    return objective


ON_POLICY_EXCEPTIONS = {
    "gspo": "1 / L",
    "luspo": "one gradient per sequence, not per token",
    "gmpo": "1 / L",
    "opd": "no reward",
    "tinker_opd": "no reward",
    "mopd": "no reward",
    "verl_forward_kl": "no reward",
    "tinker_top_k": "no reward",
    "slime_opd": "a teacher",
    "nemo_default": "KL",
    "skyrl_default": "KL",
    "deepseek_v32": "KL",
}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(ON_POLICY_EXCEPTIONS)))
def test_on_policy_every_preset_ascends_the_expected_reward(name):
    logits = table(0)
    loss = PRESETS[name].loss.model_copy(update={"aggregation": Sum()})
    estimate = expected_gradient(loss, logits, logits, table(2))
    truth = true_gradient(logits, expected_reward)
    # float64: sums of 81 terms below 1. The loss is minimised, the reward maximised.
    torch.testing.assert_close(-estimate, truth, rtol=0, atol=1e-13)
    assert truth.abs().max() > 0.01


@pytest.mark.parametrize(("name", "share"), [("gspo", 1), ("gmpo", 1), ("luspo", 1)])
def test_on_policy_losses_of_sequences_ascend_the_expected_reward_too(name, share):
    logits = table(0)
    loss = PRESETS[name].loss.model_copy(update={"aggregation": Sum()})
    estimate = expected_gradient(loss, logits, logits, table(2))
    # Each of the L tokens has the loss of its sequence, whose gradient is spread over L: the sum is that of one.
    torch.testing.assert_close(-estimate, share * true_gradient(logits, expected_reward), rtol=0, atol=1e-13)


def test_off_policy_whole_sequence_weights_are_exact_and_truncated_ones_are_not():
    logits, behaviour = table(0), table(1)

    def estimate(high):
        loss = PolicyLoss(gate=Score(high=high), level="segment_product", aggregation=Sum())
        return -expected_gradient(loss, logits, behaviour, table(2))

    truth = true_gradient(logits, expected_reward)
    torch.testing.assert_close(estimate(None), truth, rtol=0, atol=1e-13)
    assert (estimate(1.02) - truth).abs().max() > 0.01


def test_off_policy_the_gradient_of_one_token_is_exact_without_truncation_and_biased_with_it():
    logits, behaviour = table(0), table(1)

    def estimate(high):
        loss = PolicyLoss(gate=Score(high=high), aggregation=Sum())
        return -expected_gradient(loss, logits, behaviour, table(2), advantage=lambda s: s[0] - 0.5, targets=(1,))

    truth = true_gradient(logits, lambda x: (x.softmax(1)[0] * torch.tensor([-0.5, 0.5, 1.5])).sum())
    torch.testing.assert_close(estimate(None), truth, rtol=0, atol=1e-14)
    assert (estimate(1.02) - truth).abs().max() > 0.01


@pytest.mark.parametrize(
    ("estimator", "on_policy", "off_policy"),
    [
        ("k1", "nothing", None),
        ("k2", "reverse", None),
        ("k3", "forward", None),
        ("k3_straight_through", "reverse", None),
        ("ratio_k1", "reverse", "reverse"),
        ("ratio_k3", "reverse", "reverse"),
    ],
)
def test_expected_gradient_of_each_kl_estimator_is_what_its_docs_say(estimator, on_policy, off_policy):
    logits, reference = table(0), table(2)
    loss = PolicyLoss(gate=Score(), aggregation=Sum(), penalties=(Kl(coefficient=0.7, estimator=estimator),))

    def estimate(behaviour):
        return expected_gradient(loss, logits, behaviour, reference, advantage=lambda s: 0.0)

    def truth(kind, behaviour):
        if kind == "nothing":
            return torch.zeros_like(logits)
        objective = kl_at_prefixes(behaviour, reference, forward=kind == "forward")
        return 0.7 * true_gradient(logits, objective)

    # float64: sums of 81 terms of order 1.
    torch.testing.assert_close(estimate(logits), truth(on_policy, logits), rtol=0, atol=1e-13)
    other = table(1)
    difference = (estimate(other) - truth("reverse", other)).abs().max()
    assert difference < 1e-13 if off_policy == "reverse" else difference > 0.05


@pytest.mark.parametrize("student", ["trainer", "proximal", "behaviour"])
@pytest.mark.parametrize("gate", [Score(), PpoClip(low=None, high=None), PpoClip()], ids=lambda gate: gate.kind)
def test_distillation_on_policy_is_the_reverse_kl(student, gate):
    logits, teacher = table(0), table(2)
    loss = PolicyLoss(gate=gate, aggregation=Sum(), distillation=Distillation(coefficient=0.7, student=student))
    estimate = expected_gradient(loss, logits, logits, teacher, advantage=lambda s: 0.0)
    truth = 0.7 * true_gradient(logits, kl_at_prefixes(logits, teacher))
    torch.testing.assert_close(estimate, truth, rtol=0, atol=1e-13)


def test_distillation_adds_to_the_reward():
    logits, teacher = table(0), table(2)
    loss = PolicyLoss(gate=Score(), aggregation=Sum(), distillation=Distillation())
    estimate = expected_gradient(loss, logits, logits, teacher)
    truth = true_gradient(logits, kl_at_prefixes(logits, teacher)) - true_gradient(logits, expected_reward)
    torch.testing.assert_close(estimate, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("renormalised", [False, True])
def test_a_teachers_kl_over_the_whole_vocabulary_is_the_forward_kl(renormalised):
    logits, teacher = table(0), table(2)
    loss = PolicyLoss(
        gate=Score(), aggregation=Sum(), penalties=(TeacherKl(coefficient=1.0, renormalised=renormalised),)
    )
    batch = MicroBatch(
        token_ids_T=torch.zeros(len(PREFIXES) + 1, dtype=torch.int64),
        position_ids_T=torch.arange(len(PREFIXES) + 1),
        segment_ids_T=torch.zeros(len(PREFIXES) + 1, dtype=torch.int64),
        segment_lengths=(len(PREFIXES) + 1,),
        loss_mask_T=torch.arange(len(PREFIXES) + 1) > 0,
        behaviour_logprobs_T=torch.zeros(len(PREFIXES) + 1),
        advantages_T=torch.zeros(len(PREFIXES) + 1),
        temperature_T=torch.ones(len(PREFIXES) + 1),
        versions_T=torch.zeros(len(PREFIXES) + 1, dtype=torch.int64),
        teacher_top_ids_TK=torch.arange(3).expand(len(PREFIXES) + 1, 3),
        teacher_top_logprobs_TK=torch.cat([torch.zeros(1, 3).double(), teacher.log_softmax(1)]),
    )

    def objective(x):
        student_TK = torch.cat([torch.zeros(1, 3).double(), x.log_softmax(1)])
        return loss(batch, student_TK[:, 0], prepare(loss, [batch]), student_top_TK=student_TK).loss.double()

    truth = true_gradient(logits, lambda x: (teacher.softmax(1) * (teacher.log_softmax(1) - x.log_softmax(1))).sum())
    torch.testing.assert_close(true_gradient(logits, objective), truth, rtol=0, atol=1e-13)
