"""Advantages of rollouts from the rewards of their groups. Runs in the process that closes a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.errors import RewardError


def group_advantages(rewards_B: Tensor, group_index_B: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Reward of each rollout relative to the other rollouts of the same prompt.

    `A_i = r_i - mean(r)` over the group, divided by `std(r) + eps` with `normalize_std` (GRPO: Shao et al.
    2024, arXiv:2402.03300). Without it: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), which does not weigh
    prompts by how seldom their rewards differ. `std` is the sample deviation (n - 1). A group whose rewards
    are all equal, so also a group of one, gets exactly 0.

    Args:
        rewards_B: finite, any float dtype. group_index_B: int64; equal values form a group.
        normalize_std: divide by the group's deviation.
        eps: added to the deviation.

    Returns:
        float32 [B], computed in float64.

    Raises:
        RewardError: shapes differ, or a reward is not finite.
    """
    _check(rewards_B, group_index_B)
    rewards = rewards_B.double()
    _, group_B = group_index_B.unique(return_inverse=True)
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    zeros_G = rewards.new_zeros(num_groups)
    count_G = zeros_G.index_add(0, group_B, torch.ones_like(rewards))
    mean_G = zeros_G.index_add(0, group_B, rewards) / count_G
    centered_B = rewards - mean_G[group_B]
    # Rounding of the mean would leave 1e-17 where all rewards are equal, which `std` then blows up.
    highest_G = zeros_G.scatter_reduce(0, group_B, rewards, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, group_B, rewards, "amin", include_self=False)
    centered_B = torch.where((highest_G == lowest_G)[group_B], 0.0, centered_B)
    if normalize_std:
        square_sum_G = zeros_G.index_add(0, group_B, centered_B.square())
        std_G = (square_sum_G / (count_G - 1).clamp(min=1)).sqrt()
        centered_B = centered_B / (std_G + eps)[group_B]
    return centered_B.float()


def _check(rewards_B: Tensor, group_index_B: Tensor) -> None:
    if rewards_B.dim() != 1 or rewards_B.shape != group_index_B.shape:
        raise RewardError(
            "rewards and group indices do not match",
            seen=f"{tuple(rewards_B.shape)} and {tuple(group_index_B.shape)}",
            expected="one reward and one group index per rollout",
            remedy="build both from the same list of trajectories",
        )
    if not bool(rewards_B.isfinite().all()):
        raise RewardError(
            "a reward is not finite",
            seen=float(rewards_B[~rewards_B.isfinite()][0]),
            expected="a finite number",
            remedy="fix the reward function; a failed reward must raise, not return NaN",
        )
