"""`grpo_loss` and `reinforce_loss`: plain tensors of any shape."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from inflight.errors import InvalidRequestError
from inflight.losses import PRESETS, PolicyLoss, PpoClip, grpo_loss, prepare, reinforce_loss
from tests.losses.steps import logprobs_of, random_step


def reference_grpo(logprob, behaviour, advantage, low, high):
    ratio = math.exp(logprob - behaviour)
    clipped = min(max(ratio, 1 - low), 1 + high)
    unclipped_is_the_minimum = ratio * advantage <= clipped * advantage
    gradient = -advantage * ratio if unclipped_is_the_minimum else 0.0
    return -min(ratio * advantage, clipped * advantage), gradient


def plain_tensors(*shape, seed=0):
    """Trainer and behaviour logprobs, advantages and a mask with holes, of one shape."""
    batch, logits_TV = random_step((math.prod(shape),), seed)
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    tensors = (trainer_T, batch.behaviour_logprobs_T, batch.advantages_T, batch.loss_mask_T)
    return [tensor.reshape(shape) for tensor in tensors]


def plain_loss_and_gradient(trainer, *tensors, **kwargs):
    leaf = trainer.clone().requires_grad_()
    loss = grpo_loss(leaf, *tensors, **kwargs).loss
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("denominator", [None, 7, 7.5, torch.tensor(11)])
@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4)])
def test_grpo_loss_of_any_shape_equals_a_plain_loop(shape, denominator):
    trainer, behaviour, advantages, mask = plain_tensors(*shape)
    expected_loss, expected_gradient = 0.0, torch.zeros_like(trainer)
    for index in itertools.product(*map(range, shape)):
        if mask[index]:
            logprobs = trainer[index].item(), behaviour[index].item()
            value, gradient = reference_grpo(*logprobs, advantages[index].item(), 0.1, 0.3)
            expected_loss += value
            expected_gradient[index] = gradient
    total = int(mask.sum()) if denominator is None else float(denominator)
    loss, gradient = plain_loss_and_gradient(
        trainer, behaviour, advantages, mask, clip_low=0.1, clip_high=0.3, denominator=denominator
    )
    # float64 throughout: sums of 24 terms of order 1.
    assert loss == pytest.approx(expected_loss / total, abs=1e-13)
    torch.testing.assert_close(gradient, expected_gradient / total, rtol=0, atol=1e-13)


def test_plain_losses_are_those_of_the_pieces():
    batch, logits_TV = random_step((24,))
    trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
    tensors = (trainer_T, batch.behaviour_logprobs_T, batch.advantages_T, batch.loss_mask_T)
    loss = PolicyLoss(gate=PpoClip())
    pieces = loss(batch, trainer_T, prepare(loss, [batch]))
    plain = grpo_loss(*tensors)
    assert plain.loss.item() == pytest.approx(pieces.loss.item(), rel=1e-14)
    assert plain.metrics == pieces.metrics
    loss = PRESETS["pipelinerl_paper"].loss
    pieces = loss(batch, trainer_T, prepare(loss, [batch]))
    plain = reinforce_loss(*tensors, cap=5.0, denominator=1)
    assert plain.loss.item() == pytest.approx(pieces.loss.item(), rel=1e-14)
    assert plain.metrics == pieces.metrics


def test_one_advantage_per_sequence_goes_to_its_tokens_even_where_the_batch_is_square():
    trainer, behaviour, _, mask = plain_tensors(5, 5)
    advantages = torch.linspace(-1, 1, 5, dtype=torch.float64)
    expected = plain_loss_and_gradient(trainer, behaviour, advantages[:, None].expand(5, 5), mask)
    for per_sequence in (advantages, advantages[:, None]):
        loss, gradient = plain_loss_and_gradient(trainer, behaviour, per_sequence, mask)
        assert loss == expected[0]
        assert torch.equal(gradient, expected[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_grpo_loss_does_not_see_what_stands_at_masked_positions(poison):
    trainer, behaviour, advantages, mask = plain_tensors(4, 6)
    expected = plain_loss_and_gradient(trainer, behaviour, advantages, mask)
    poisoned = [tensor.masked_fill(~mask, poison) for tensor in (trainer, behaviour, advantages)]
    for form in (mask, mask.long(), mask.float()):
        loss, gradient = plain_loss_and_gradient(*poisoned, form)
        assert loss == expected[0]
        assert torch.equal(gradient, expected[1])
        assert (gradient[~mask] == 0).all()


def test_parts_of_a_step_add_up_under_one_denominator_and_not_under_their_own():
    tensors = plain_tensors(6, 4)
    tensors[3][:2] = False
    tensors[3][0, 0] = True
    num_targets = int(tensors[3].sum())
    whole, _ = plain_loss_and_gradient(*tensors)
    parts = [[tensor[:2] for tensor in tensors], [tensor[2:] for tensor in tensors]]
    # float64: sums of 24 terms of order 1 in another order.
    assert sum(grpo_loss(*part, denominator=num_targets).loss.item() for part in parts) == pytest.approx(
        whole, abs=1e-13
    )
    assert abs(sum(grpo_loss(*part).loss.item() for part in parts) / 2 - whole) > 0.01


def test_a_call_without_targets_has_a_loss_and_a_gradient_of_zero():
    trainer, behaviour, advantages, mask = plain_tensors(2, 3)
    loss, gradient = plain_loss_and_gradient(trainer, behaviour, advantages, torch.zeros_like(mask))
    assert loss == 0
    assert gradient.tolist() == [[0.0] * 3] * 2


def test_tensors_that_do_not_fit_are_refused_by_name():
    trainer, behaviour, advantages, mask = plain_tensors(4, 6)
    with pytest.raises(InvalidRequestError, match=r"behaviour_logprobs has shape \[4, 5\], but must have .*\[4, 6\]"):
        grpo_loss(trainer, behaviour[:, 1:], advantages, mask)
    with pytest.raises(InvalidRequestError, match=r"loss_mask has shape \[24\]"):
        grpo_loss(trainer, behaviour, advantages, mask.flatten())
    for wrong in (advantages[0], advantages[:, :5], advantages[None], torch.zeros(1, 1, 1)):
        with pytest.raises(InvalidRequestError, match=r"advantages has shape .*per token, \[4, 6\], or per row, \[4\]"):
            grpo_loss(trainer, behaviour, wrong, mask)
