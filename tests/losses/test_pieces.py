"""Pieces one by one: ratio levels, corrections, denominators, penalties, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pydantic
import pytest
import torch

from inflight.errors import InvalidRequestError, NonFiniteError
from inflight.losses import (
    PRESETS,
    Band,
    Budget,
    Constant,
    CrossEntropy,
    Entropy,
    GeometricMean,
    Kl,
    MaxAge,
    PolicyLoss,
    PpoClip,
    PromptMean,
    Score,
    SecondMoment,
    SegmentMean,
    SegmentSum,
    Sum,
    TokenMean,
    Truncate,
    prepare,
)
from tests.losses.reference import clip_of, sequence_of, tokens_of, total
from tests.losses.steps import VERSION, logprobs_of, loss_and_gradient, plan_of, random_step, sequences_of

LEVELS = ("token", "segment_mean", "segment_mean_token", "segment_product", "prefix")


def log_ratio_at(level, step, token):
    """The log ratio of trainer to behaviour policy that a token has at a level, from its definition."""
    sequence = list(sequence_of(step, token))
    logs = [other.logp - other.mu for other in sequence]
    own = next(i for i, other in enumerate(sequence) if other is token)
    match level:
        case "token":
            return logs[own]
        case "segment_mean":
            return total(logs) / len(logs)
        case "segment_mean_token":
            return (total(logs) / len(logs)).detach() + logs[own] - logs[own].detach()
        case "segment_product":
            return total(logs)
        case "prefix":
            return total(logs[: own + 1])


@pytest.mark.parametrize("drift", [1.0, 0.1])
@pytest.mark.parametrize("gate", [PpoClip(low=0.3, high=0.4), PpoClip(dual=1.5), Score(high=1.3), Score(low=0.5)])
@pytest.mark.parametrize("level", LEVELS)
def test_gate_at_a_level_equals_a_plain_loop(level, gate, drift):
    batch, logits_TV = random_step(drift=drift)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PolicyLoss(gate=gate, level=level, aggregation=Sum())
    value, gradient_T = loss_and_gradient(loss, batch, trainer_T, plan_of(loss, [batch], [trainer_T]))

    leaf_T = trainer_T.clone().requires_grad_()
    step = sequences_of(batch, leaf_T)
    terms = []
    for token in tokens_of(step):
        ratio = torch.exp(log_ratio_at(level, step, token))
        if isinstance(gate, Score):
            bounded = torch.clamp(ratio, gate.low, gate.high).detach()
            terms.append(-bounded * token.advantage * token.logp)
        elif gate.dual is not None and token.advantage < 0:
            inner = clip_of(ratio, token.advantage, gate.low, gate.high)
            terms.append(torch.minimum(inner, torch.tensor(-gate.dual * token.advantage, dtype=torch.float64)))
        else:
            terms.append(clip_of(ratio, token.advantage, gate.low, gate.high))
    expected = total(terms)
    expected.backward()
    # float64: products of up to 9 ratios, each up to e.
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient_T, leaf_T.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("counted", ["before", "after"])
@pytest.mark.parametrize("kind", [TokenMean, SegmentMean, SegmentSum, PromptMean])
def test_denominators_count_before_or_after_rejection_by_name(kind, counted):
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PolicyLoss(
        gate=Score(low=1.0, high=1.0),
        corrections=(Band(between="trainer/behaviour", low=0.5, high=2.0),),
        aggregation=kind(counted=counted),
    )
    _, gradient_T = loss_and_gradient(loss, batch, trainer_T, plan_of(loss, [batch], [trainer_T]))
    ratio_T = (trainer_T - batch.behaviour_logprobs_T).exp()
    kept_T = batch.loss_mask_T & (ratio_T >= 0.5) & (ratio_T <= 2.0)
    counted_T = kept_T if counted == "after" else batch.loss_mask_T
    assert 0 < kept_T.sum() < batch.loss_mask_T.sum()

    def size(rows_T):
        return int((counted_T & rows_T).sum())

    segments = [batch.segment_ids_T == s for s in range(len(batch.segment_lengths))]
    groups = [batch.group_ids_S[batch.segment_ids_T] == g for g in range(3)]
    # Papers divide by all completions; one that is left without a target is not counted after rejection only.
    num_sequences = sum(size(rows_T) > 0 for rows_T in segments) if counted == "after" else len(segments)
    assert counted == "after" or not all(size(rows_T) for rows_T in segments)
    num_prompts = sum(size(rows_T) > 0 for rows_T in groups)
    for t in range(batch.num_tokens):
        own, group = segments[int(batch.segment_ids_T[t])], groups[int(batch.group_ids_S[batch.segment_ids_T[t]])]
        share = {
            TokenMean: lambda: 1 / int(counted_T.sum()),
            SegmentMean: lambda own=own: 1 / (num_sequences * size(own)),
            SegmentSum: lambda: 1 / num_sequences,
            PromptMean: lambda group=group: 1 / (num_prompts * size(group)),
        }[kind]
        expected = -batch.advantages_T[t].item() * share() if kept_T[t] else 0.0
        assert gradient_T[t].item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("aggregation", "share"), [(Constant(length=50), "1 / (6 * 50)"), (Budget(tokens=300), "1 / 300"), (Sum(), "1")]
)
def test_denominators_that_are_given_do_not_depend_on_the_step(aggregation, share):
    batch, logits_TV = random_step(mask="everything")
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PolicyLoss(gate=Score(low=1.0, high=1.0), aggregation=aggregation)
    _, gradient_T = loss_and_gradient(loss, batch, trainer_T, plan_of(loss, [batch], [trainer_T]))
    expected_T = torch.where(batch.loss_mask_T, -batch.advantages_T * eval(share), 0.0)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-13, atol=0)


def test_penalty_may_have_a_denominator_of_its_own():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)

    def gradient(**kwargs):
        loss = PolicyLoss(gate=Score(), **kwargs)
        return loss_and_gradient(loss, batch, trainer_T, plan_of(loss, [batch], [trainer_T]))[1]

    policy_T = gradient(aggregation=SegmentSum())
    both_T = gradient(aggregation=SegmentSum(), penalties=(CrossEntropy(coefficient=0.5, aggregation=TokenMean()),))
    positive_T = batch.loss_mask_T & (batch.advantages_T > 0)
    expected_T = torch.where(positive_T, -0.5 / batch.loss_mask_T.sum().double(), 0.0)
    torch.testing.assert_close(both_T - policy_T, expected_T, rtol=0, atol=1e-14)


def test_cross_entropy_on_all_targets_is_plain_imitation():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    batch = replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))
    loss = PolicyLoss(gate=Score(), penalties=(CrossEntropy(coefficient=1.0, where="all"),))
    value, _ = loss_and_gradient(loss, batch, trainer_T, prepare(loss, [batch]))
    assert value == pytest.approx(-trainer_T[batch.loss_mask_T].mean().item(), rel=1e-13)


def test_bound_on_the_log_ratio_of_a_kl_ends_its_gradient():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    batch = replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))
    d_T = trainer_T - batch.reference_logprobs_T
    inside_T = batch.loss_mask_T & (d_T.abs() < 0.5)
    assert 0 < inside_T.sum() < batch.loss_mask_T.sum()
    loss = PolicyLoss(gate=Score(), aggregation=Sum(), penalties=(Kl(coefficient=1.0, estimator="k2", clamp=0.5),))
    value, gradient_T = loss_and_gradient(loss, batch, trainer_T, prepare(loss, [batch]))
    assert value == pytest.approx((d_T.clamp(-0.5, 0.5) ** 2 / 2)[batch.loss_mask_T].sum().item(), rel=1e-12)
    torch.testing.assert_close(gradient_T, torch.where(inside_T, d_T, 0.0), rtol=1e-12, atol=0)


def test_loss_says_whether_groups_of_equal_rewards_teach_it_anything():
    having = {name for name, it in PRESETS.items() if it.loss.has_terms_without_advantage}
    taught = {"opd", "tinker_opd", "slime_opd", "mopd", "verl_forward_kl", "tinker_top_k"}
    assert having == {"deepseek_v32", "skyrl_default", "nemo_default"} | taught


def test_entropy_bonus_has_the_gradient_of_the_entropy():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    entropy_T = torch.rand(batch.num_tokens, dtype=torch.float64)
    loss = PolicyLoss(gate=Score(), penalties=(Entropy(coefficient=0.2),))
    plan = prepare(loss, [batch])
    logprob_gradient_T, entropy_gradient_T = loss.gradient(batch, trainer_T, plan, entropy_T=entropy_T)
    expected_T = torch.where(batch.loss_mask_T, -0.2 / batch.loss_mask_T.sum().double(), 0.0)
    torch.testing.assert_close(entropy_gradient_T, expected_T, rtol=1e-13, atol=0)
    plain = PolicyLoss(gate=Score())
    assert torch.equal(logprob_gradient_T, plain.gradient(batch, trainer_T, prepare(plain, [batch]))[0])
    output = loss(batch, trainer_T, plan, entropy_T=entropy_T)
    assert output.metrics["entropy"].value == pytest.approx(entropy_T[batch.loss_mask_T].mean().item())
    with pytest.raises(InvalidRequestError, match="needs entropy_T"):
        loss(batch, trainer_T, plan)


@pytest.mark.parametrize("versions", [0, 2, 5])
def test_targets_above_the_maximum_age_are_rejected(versions):
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PolicyLoss(gate=Score(), corrections=(MaxAge(versions=versions),))
    _, gradient_T = loss_and_gradient(loss, batch, trainer_T, prepare(loss, [batch], current_version=VERSION))
    live_T = batch.loss_mask_T & (batch.advantages_T != 0)
    assert torch.equal(gradient_T != 0, live_T & (VERSION - batch.versions_T <= versions))
    with pytest.raises(InvalidRequestError, match="pass current_version to prepare"):
        prepare(loss, [batch])


def test_band_may_reject_whole_segments():
    batch, logits_TV = random_step(seed=3)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    band = Band(between="trainer/behaviour", low=0.25, whole_segments=True)
    loss = PolicyLoss(gate=Score(), corrections=(band,))
    _, gradient_T = loss_and_gradient(loss, batch, trainer_T, plan_of(loss, [batch], [trainer_T]))
    outside_T = batch.loss_mask_T & ((trainer_T - batch.behaviour_logprobs_T).exp() < 0.25)
    bad = set(batch.segment_ids_T[outside_T].tolist())
    assert 0 < len(bad) < 5
    for segment in range(len(batch.segment_lengths)):
        rows_T = (batch.segment_ids_T == segment) & batch.loss_mask_T & (batch.advantages_T != 0)
        assert (gradient_T[rows_T] == 0).all() if segment in bad else (gradient_T[rows_T] != 0).all()


@pytest.mark.parametrize("bound", [0.0, 0.1, 1.0, 1e9])
def test_second_moment_keeps_as_many_targets_as_the_bound_allows(bound):
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PolicyLoss(gate=Score(), corrections=(SecondMoment(bound=bound, between="trainer/behaviour"),))
    plan = plan_of(loss, [batch], [trainer_T])
    squares = sorted(((trainer_T - batch.behaviour_logprobs_T) ** 2)[batch.loss_mask_T].tolist())
    while squares and math.fsum(squares) / len(squares) > bound:
        squares.pop()
    kept = loss(batch, trainer_T, plan).metrics["kept_fraction"]
    assert kept.sum == len(squares)


SMOOTH = {
    **{
        name: PRESETS[name].loss
        for name in ("grpo", "dapo", "dual_clip", "gspo", "gmpo", "sapo", "importance_sampling")
    },
    "prefix": PolicyLoss(gate=PpoClip(low=None, high=None), level="prefix"),
    "product": PolicyLoss(gate=PpoClip(low=None, high=None), level="segment_product"),
    **{
        f"kl_{it}": PolicyLoss(gate=PpoClip(), penalties=(Kl(coefficient=0.5, estimator=it),))
        for it in ("k1", "k2", "k3", "ratio_k1", "ratio_k3")
    },
}
"""Losses without a stopped gradient: numerical differences see all that their gradient is of."""


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_passes_gradcheck(name):
    batch, logits_TV = random_step(lengths=(4, 5), drift=0.5, seed=2)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    plan = prepare(SMOOTH[name], [batch])
    torch.autograd.gradcheck(lambda x_T: SMOOTH[name](batch, x_T, plan).loss, trainer_T.requires_grad_())


# ---- what is not finite


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_behaviour_logprobs_that_are_not_finite_follow_the_named_policy(poison):
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    wrong_T = batch.loss_mask_T & (torch.arange(batch.num_tokens) % 3 == 0)
    poisoned = replace(batch, behaviour_logprobs_T=batch.behaviour_logprobs_T.masked_fill(wrong_T, poison))

    def both(loss, it):
        plan = prepare(loss, [it])
        return *loss_and_gradient(loss, it, trainer_T, plan), loss(it, trainer_T, plan).metrics

    base = PRESETS["pipelinerl_paper"].loss
    with pytest.raises(NonFiniteError, match=r"of \d+ behaviour_logprobs at targets are not finite"):
        prepare(base, [poisoned])
    dropped = both(base.model_copy(update={"non_finite": "drop"}), poisoned)
    without = both(base, replace(batch, loss_mask_T=batch.loss_mask_T & ~wrong_T))
    assert dropped[0] == without[0]
    assert torch.equal(dropped[1], without[1])
    taken = both(base.model_copy(update={"non_finite": "on_policy"}), poisoned)
    on_policy_T = torch.where(wrong_T, trainer_T, batch.behaviour_logprobs_T)
    same = both(base, replace(batch, behaviour_logprobs_T=on_policy_T))
    assert taken[0] == same[0]
    assert torch.equal(taken[1], same[1])
    for metrics in (dropped[2], taken[2]):
        assert metrics["non_finite_behaviour"].sum == int(wrong_T.sum())


@pytest.mark.parametrize("field", ["reference_logprobs_T", "proximal_logprobs_T", "advantages_T"])
def test_other_fields_that_are_not_finite_at_a_target_are_refused_by_name(field):
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    index = int(batch.loss_mask_T.nonzero()[3])
    values_T = getattr(batch, field).clone()
    values_T[index] = math.nan
    loss = PRESETS["skyrl_default"].loss
    plan = prepare(loss, [batch])
    with pytest.raises(NonFiniteError, match=rf"1 of \d+ {field[:-2]} at targets .* nan at packed token {index}"):
        loss(replace(batch, **{field: values_T}), trainer_T, plan)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gate", [PpoClip(dual=3.0), PpoClip(delta=4.0), Score(high=5.0), GeometricMean()])
def test_bounded_gates_have_finite_gradients_where_ratios_overflow(gate, advantage):
    batch, logits_TV = random_step(lengths=(4,), mask="everything")
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    behaviour_T = trainer_T.clone()
    behaviour_T[2] -= 4000.0
    batch = replace(batch, behaviour_logprobs_T=behaviour_T, advantages_T=torch.full((4,), advantage).double())
    loss = PolicyLoss(gate=gate)
    if isinstance(gate, GeometricMean) and advantage < 0:
        # Unbounded from above by its formula: infinite, and not a NaN.
        assert loss_and_gradient(loss, batch, trainer_T, prepare(loss, [batch]))[0] == math.inf
        return
    value, gradient_T = loss_and_gradient(loss, batch, trainer_T, prepare(loss, [batch]))
    assert math.isfinite(value)
    assert gradient_T.isfinite().all()


# ---- what does not fit


def test_loss_says_what_it_lacks():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    kl = PolicyLoss(gate=Score(), penalties=(Kl(coefficient=0.1),))
    with pytest.raises(InvalidRequestError, match="needs reference_logprobs_T"):
        kl(replace(batch, reference_logprobs_T=None), trainer_T, prepare(kl, [batch]))
    prompts = PolicyLoss(gate=Score(), aggregation=PromptMean())
    with pytest.raises(InvalidRequestError, match="needs group_ids_S"):
        prepare(prompts, [replace(batch, group_ids_S=None)])
    with pytest.raises(InvalidRequestError, match="pass num_groups"):
        prepare(prompts, [batch], reduce=lambda numbers: numbers)
    with pytest.raises(InvalidRequestError, match="group_ids_S of targets go from 0 to 2, but num_groups is 2"):
        prepare(prompts, [batch], num_groups=2)
    with pytest.raises(InvalidRequestError, match="pass the trainer_logprobs of every micro-batch to prepare"):
        prepare(PRESETS["m2po"].loss, [batch])


def test_logprobs_and_plans_that_do_not_fit_are_refused():
    batch, logits_TV = random_step()
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    loss = PRESETS["tis"].loss
    plan = prepare(loss, [batch])
    with pytest.raises(InvalidRequestError, match=r"trainer_logprobs_T is \[27\], but the micro-batch has 28 tokens"):
        loss(batch, trainer_T[1:], plan)
    with pytest.raises(InvalidRequestError, match="plan is for another loss"):
        loss(batch, trainer_T, prepare(PRESETS["grpo"].loss, [batch]))


def test_pieces_that_make_no_sense_are_refused():
    for wrong in (
        lambda: PpoClip(low=-0.1),
        lambda: PpoClip(dual=0.5),
        lambda: Score(high=math.nan),
        lambda: Truncate(level="sequence"),
        lambda: Budget(tokens=0),
        lambda: Kl(coefficient=-1.0),
        lambda: PolicyLoss(gate=GeometricMean(), level="segment_mean"),
        lambda: PolicyLoss.model_validate({"gate": {"kind": "ppo"}}),
        lambda: PolicyLoss.model_validate({"gate": {"kind": "ppo_clip", "hihg": 0.3}}),
    ):
        with pytest.raises(pydantic.ValidationError):
            wrong()


def test_pieces_are_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        PRESETS["grpo"].loss.level = "prefix"


def test_needs_and_locality_say_what_a_loss_couples():
    needs = {name: PRESETS[name].loss.needs for name in ("grpo", "m2po", "a3po", "scalerl", "skyrl_default")}
    assert needs == {
        "grpo": frozenset(),
        "m2po": {"first_forward"},
        "a3po": {"versions"},
        "scalerl": {"group_ids"},
        "skyrl_default": {"reference_logprobs"},
    }
    after = PolicyLoss(gate=Score(), corrections=(Band(high=2.0),), aggregation=TokenMean(counted="after"))
    assert after.needs == {"first_forward"}
    local = {name for name, it in PRESETS.items() if it.loss.locality == "token"}
    assert {"grpo", "dapo", "cispo", "prime_default", "tis", "icepop"} <= local
    assert local.isdisjoint({"gspo", "gspo_token", "gmpo", "vespo", "topr", "opsm", "luspo", "mis", "seq_mask_tis"})


def test_gradient_of_a_local_loss_depends_on_no_other_logprob():
    batch, logits_TV = random_step(drift=0.3)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    # Without proximal logprobs the proximal policy moves with the trainer's.
    batch = replace(batch, proximal_logprobs_T=None)
    coupled = set()
    for index in batch.loss_mask_T.nonzero().squeeze(1)[::4].tolist():
        moved_T = trainer_T.clone()
        moved_T[index] -= 0.37
        others_T = torch.arange(batch.num_tokens) != index
        for name, it in PRESETS.items():
            if "teacher_top" in it.loss.needs:
                continue  # they have no gradient of their own
            plan = plan_of(it.loss, [batch], [trainer_T])
            before_T, after_T = (it.loss.gradient(batch, values_T, plan)[0] for values_T in (trainer_T, moved_T))
            if not torch.equal(before_T[others_T], after_T[others_T]):
                coupled.add(name)
    assert coupled <= {name for name, it in PRESETS.items() if it.loss.locality == "segment"}
    assert {"gspo", "gmpo", "vespo", "mis"} <= coupled
