"""Samples become packed, target-aligned micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inflight.errors import InvalidRequestError
from inflight.losses import PRESETS, Counts, LossPlan, collate, empty_micro_batch, prepare
from inflight.types import Rollout, Sample, TeacherScores, Turn
from inflight.wire import VersionSpan
from tests.losses.steps import further


def sample(prompt, completion, spans, *, mask=None, temperature=0.7, reference=None):
    rollout = Rollout(
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        behaviour_logprobs=[-0.1 * token for token in completion],
        version_spans=[VersionSpan(version=v, start=s, end=e) for v, s, e in spans],
        finish_reason="stop",
        reward=1.0,
        temperature=temperature,
    )
    return Sample(rollout, [0.5 * token for token in completion], mask or [True] * len(completion), reference)


FIRST = sample([11, 12], [1, 2, 3], [(4, 0, 1), (5, 1, 3)])
SECOND = sample([13], [6, 7], [(5, 0, 2)], mask=[False, True], temperature=0.0)


def test_every_field_at_t_speaks_of_token_t():
    batch = collate([FIRST, SECOND])
    assert batch.token_ids_T.tolist() == [11, 12, 1, 2, 3, 13, 6, 7]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.segment_ids_T.tolist() == [0] * 5 + [1] * 3
    assert batch.segment_lengths == (5, 3)
    assert batch.num_tokens == 8
    assert batch.loss_mask_T.tolist() == [False, False, True, True, True, False, False, True]
    # float32 of short decimals.
    assert batch.behaviour_logprobs_T.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.7], rel=1e-6)
    assert batch.advantages_T.tolist() == [0, 0, 0.5, 1.0, 1.5, 0, 0, 3.5]
    assert batch.temperature_T.tolist() == pytest.approx([0.7] * 5 + [1.0] * 3, rel=1e-6)
    assert batch.versions_T.tolist() == [-1, -1, 4, 5, 5, -1, 5, 5]
    assert batch.reference_logprobs_T is None


def test_dtypes_are_those_of_the_contract():
    batch = collate([replace(FIRST, reference_logprobs=[-1.0, -2.0, -3.0])])
    for made in (batch, empty_micro_batch()):
        for name in ("token_ids_T", "position_ids_T", "segment_ids_T", "versions_T"):
            assert getattr(made, name).dtype == torch.int64
        for name in ("behaviour_logprobs_T", "advantages_T", "temperature_T", "reference_logprobs_T"):
            assert getattr(made, name).dtype == torch.float32
        assert made.loss_mask_T.dtype == torch.bool
    assert batch.reference_logprobs_T.tolist() == [0, 0, -1, -2, -3]


def test_first_token_of_a_segment_is_never_a_target():
    batch = collate([FIRST, SECOND, FIRST])
    assert not batch.loss_mask_T[batch.position_ids_T == 0].any()


def test_values_at_masked_completion_tokens_become_zero():
    broken = replace(SECOND.rollout, behaviour_logprobs=[math.nan, -0.5])
    batch = collate([Sample(broken, [math.inf, 1.0], [False, True], [-math.inf, -2.0])])
    assert batch.behaviour_logprobs_T.tolist() == [0, 0, -0.5]
    assert batch.advantages_T.tolist() == [0, 0, 1.0]
    assert batch.reference_logprobs_T.tolist() == [0, 0, -2.0]


def test_completion_without_tokens_is_a_segment_without_targets():
    batch = collate([sample([1, 2], [], []), FIRST])
    assert batch.segment_lengths == (2, 5)
    assert batch.loss_mask_T.tolist() == [False] * 4 + [True] * 3


def test_counts_are_of_unmasked_tokens_of_all_completions_and_of_prompts_that_have_one():
    silent = replace(FIRST, loss_mask=[False] * 3)
    loss = PRESETS["scalerl"].loss
    batches = [collate([FIRST, replace(SECOND, group_index=2)]), collate([replace(silent, group_index=1)])]
    plan = prepare(loss, batches, num_groups=4)
    assert plan.before == Counts(num_tokens=4, num_sequences=3, tokens_P=(3, 0, 1, 0))
    assert plan.before.num_prompts == 2
    assert prepare(loss, []).before == Counts(0, 0)
    assert prepare(loss, [*batches, empty_micro_batch()], num_groups=4).before == plan.before


def test_completions_that_are_in_no_micro_batch_count_if_their_number_is_given():
    loss = PRESETS["grpo"].loss
    assert prepare(loss, [collate([FIRST])], num_sequences=4).before.num_sequences == 4
    with pytest.raises(InvalidRequestError, match="contain 2 completions, but num_sequences is only 1"):
        prepare(loss, [collate([FIRST, SECOND])], num_sequences=1)


def test_segments_know_the_prompt_that_they_answer():
    batch = collate([FIRST, replace(SECOND, group_index=3), FIRST])
    assert batch.group_ids_S.tolist() == [0, 3, 0]


def test_no_samples_make_the_empty_micro_batch():
    made, empty = collate([]), empty_micro_batch()
    assert made.segment_lengths == empty.segment_lengths == (2,)
    assert not made.loss_mask_T.any()


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("counts", [Counts(10, 2, (10,)), Counts(0, 0, (0,))])
def test_empty_micro_batch_has_zero_loss_that_depends_on_the_logprobs(preset, counts):
    logprobs_T = torch.zeros(2, requires_grad=True)
    thresholds = tuple(0.1 if c.kind == "second_moment" else None for c in preset.loss.corrections)
    empty, plan = empty_micro_batch(), LossPlan(preset.loss, counts, counts, thresholds, 3)
    output = preset.loss(empty, logprobs_T, plan, **further(preset.loss, empty))
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs_T.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(FIRST, advantages=[1.0]), "sample 1 has 3 completion tokens but advantages has 1"),
        (replace(FIRST, loss_mask=[True] * 4), "loss_mask has 4"),
        (replace(FIRST, rollout=replace(FIRST.rollout, behaviour_logprobs=[])), "behaviour_logprobs has 0"),
        (replace(FIRST, rollout=replace(FIRST.rollout, version_spans=[])), "version_spans cover 0"),
        (
            replace(FIRST, rollout=replace(FIRST.rollout, turns=[Turn(0, 1)])),
            "sample 1 has 1 sampled tokens but its version_spans cover 3",
        ),
        (
            replace(
                FIRST,
                rollout=replace(
                    FIRST.rollout, turns=[Turn(0, 1)], version_spans=[VersionSpan(version=0, start=0, end=1)]
                ),
                loss_mask=[True] * 3,
            ),
            "true loss_mask at a token of an observation",
        ),
        (replace(FIRST, rollout=replace(FIRST.rollout, prompt_token_ids=[])), "sample 1 has no prompt"),
        (replace(FIRST, reference_logprobs=[0.0] * 3), "sample 0 has no reference_logprobs but others do"),
    ],
)
def test_sample_whose_fields_disagree_is_refused_by_name(wrong, message):
    with pytest.raises(InvalidRequestError, match=message):
        collate([SECOND, wrong])


def taught(it, teacher=0, logprobs=(-1.0, -2.0, -3.0), ids=(), top=()):
    scores = TeacherScores(teacher=teacher, logprobs=logprobs, top_token_ids=ids, top_logprobs=top)
    return replace(it, rollout=replace(it.rollout, teacher=scores))


def test_scores_of_teachers_speak_of_the_same_token_and_what_is_not_known_is_no_number():
    top = [[-0.1, -3.0], [-0.2, -4.0], [-0.3, -5.0]]
    batch = collate([taught(FIRST, 1, ids=[[4, 5], [6, 7], [8, 9]], top=top)])
    assert batch.teacher_ids_S.tolist() == [1]
    assert batch.teacher_logprobs_T.tolist() == [0, 0, -1, -2, -3]
    assert batch.teacher_top_ids_TK.tolist() == [[0, 0], [0, 0], [4, 5], [6, 7], [8, 9]]
    torch.testing.assert_close(batch.teacher_top_logprobs_TK[2:], torch.tensor(top))
    later = collate([taught(SECOND, 2, logprobs=None), taught(FIRST, 1)])
    assert later.teacher_ids_S.tolist() == [2, 1]
    assert later.teacher_logprobs_T.nan_to_num(7.0).tolist() == [0, 0, 7, 0, 0, -1, -2, -3]
    assert later.teacher_top_ids_TK is None
    with pytest.raises(InvalidRequestError, match=r"sample 1 has no rollout\.teacher but others do"):
        collate([taught(FIRST), SECOND])
    with pytest.raises(InvalidRequestError, match="different numbers of top_token_ids"):
        collate([taught(FIRST, ids=[[4]] * 3, top=[[-0.1]] * 3), taught(FIRST)])
    with pytest.raises(InvalidRequestError, match=r"rollout.teacher.logprobs has 1"):
        collate([taught(FIRST, logprobs=[0.0])])


def test_reference_logprobs_of_the_wrong_length_are_refused():
    with pytest.raises(InvalidRequestError, match="reference_logprobs has 2"):
        collate([replace(FIRST, reference_logprobs=[0.0, 0.0])])


def test_a_temperature_that_is_an_integer_becomes_a_float():
    whole = replace(FIRST, rollout=replace(FIRST.rollout, temperature=1))
    assert collate([whole]).temperature_T.dtype == torch.float32
