"""The library's advantages against those of the installed releases of TRL and verl, and where they differ."""

from __future__ import annotations

import pytest
import torch

from inflight.rollouts import batch_advantages
from tests.losses.padded import NUM_GENERATIONS, padded_batch
from tests.losses.parity import FLOAT64

GROUPS = ((1.0, 0.0, 0.5), (2.0, 2.5, 4.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))


REWARDS = torch.tensor(GROUPS, dtype=torch.float64).flatten()


def flat(groups):
    return [advantage for group in groups for advantage in group]


def trl_advantages(trl, rewards_B, scale_rewards):
    padded = padded_batch()
    scored = trl.trl_scored_batch(
        rewards_B, padded.proximal_BT, padded.mask_BT, num_generations=NUM_GENERATIONS, scale_rewards=scale_rewards
    )
    return scored["advantages"].tolist()


@pytest.mark.parametrize(("scale_rewards", "estimator"), [("group", "std"), ("none", "mean")])
def test_advantages_of_a_group_are_those_of_trl(scale_rewards, estimator, trl):
    found = flat(batch_advantages(GROUPS, estimator))
    assert found == pytest.approx(trl_advantages(trl, REWARDS, scale_rewards), rel=FLOAT64, abs=FLOAT64)


def test_batch_std_is_that_of_trl_for_groups_of_one_mean_and_otherwise_leaves_out_what_lies_between_groups(trl):
    centred = [[reward - sum(group) / len(group) for reward in group] for group in GROUPS]
    ours = flat(batch_advantages(GROUPS, "batch_std"))
    # TRL computes n / (n - 1) in float32 (trl/trainer/utils.py:1041).
    assert ours == pytest.approx(trl_advantages(trl, torch.tensor(flat(centred)).double(), "batch"), rel=1e-7, abs=1e-7)
    theirs = trl_advantages(trl, REWARDS, "batch")
    factor = (torch.tensor(flat(centred)).double().std().item() + 1e-4) / (REWARDS.std().item() + 1e-4)
    assert factor < 0.8
    assert [factor * advantage for advantage in ours] == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_leave_one_out_advantages_are_those_of_trl(trl):
    padded = padded_batch()
    theirs = trl.trl_rloo_advantages(REWARDS, padded.proximal_BT, padded.mask_BT, num_generations=NUM_GENERATIONS)
    assert flat(batch_advantages(GROUPS, "leave_one_out")) == pytest.approx(theirs.tolist(), rel=FLOAT64, abs=FLOAT64)


VERL_GROUPS = (*GROUPS[:3], (0.25, 1.0), (3.0,))


VERL_REWARDS = torch.tensor([reward for group in VERL_GROUPS for reward in group], dtype=torch.float64)


GROUP_IDS = torch.tensor([index for index, group in enumerate(VERL_GROUPS) for _ in group])


def verl_advantages(verl, name, **settings):
    """verl's advantages of each row, of which there are 12, and the rows' numbers of targets."""
    mask_BT = padded_batch().mask_BT
    advantages_BT = verl.verl_advantages(name, VERL_REWARDS, mask_BT, GROUP_IDS, **settings)
    assert ((advantages_BT == 0) | mask_BT).all()
    assert torch.equal(torch.where(mask_BT, advantages_BT[:, :1], 0.0), advantages_BT)
    return advantages_BT[:, 0].tolist(), mask_BT.sum(1).tolist()


@pytest.mark.parametrize(
    ("name", "settings", "estimator", "tolerance", "of_one"),
    [
        ("grpo", {"epsilon": 1e-4}, "std", FLOAT64, 3.0 / (1 + 1e-4)),
        # float32 inside (verl/utils/groupwise.py)
        ("grpo_vectorized", {"epsilon": 1e-4}, "std", 1e-6, 3.0 / (1 + 1e-4)),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, "mean", FLOAT64, 3.0),
        ("rloo", {}, "leave_one_out", FLOAT64, 3.0),
        ("rloo_vectorized", {}, "leave_one_out", FLOAT64, 0.0),
        ("opo", {}, "opo", FLOAT64, 3.0),
    ],
    ids=["grpo", "grpo_vectorized", "grpo without std", "rloo", "rloo_vectorized", "opo"],
)
def test_advantages_are_those_of_verl_but_for_a_group_of_one_which_has_its_raw_reward_in_verl_and_0_here(
    name, settings, estimator, tolerance, of_one, verl
):
    theirs, lengths = verl_advantages(verl, name, **settings)
    of_groups = [[lengths.pop(0) for _ in group] for group in VERL_GROUPS]
    ours = flat(batch_advantages(VERL_GROUPS, estimator, of_groups))
    assert ours[:-1] == pytest.approx(theirs[:-1], rel=tolerance, abs=tolerance)
    assert ours[-1] == 0
    assert theirs[-1] == pytest.approx(of_one, rel=1e-6)  # its deviation of 1 is a float32


def test_grpo_of_verl_adds_1e_6_to_the_deviation_and_here_it_is_1e_4_as_in_trl(verl):
    theirs, _ = verl_advantages(verl, "grpo")
    ours = flat(batch_advantages(VERL_GROUPS, "std"))
    furthest = max(abs(a - b) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
    assert 1e-5 < furthest < 1e-3
