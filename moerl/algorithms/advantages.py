"""Advantages of rollouts from the rewards of their groups, and the units that they belong to: what a reward is compared
with, and which tokens share an advantage. Runs in the process that closes a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moerl.algorithms.policy import RewardedBatch
from moerl.errors import RewardError


def group_advantages(
    rewards_B: Tensor,
    group_index_B: Tensor,
    *,
    normalize_std: bool,
    eps: float = 1e-6,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    episode_index_B: Tensor | None = None,
) -> Tensor:
    """Returns the reward of each rollout relative to the other rollouts of the same prompt.

    `A_i = r_i - mean(r)` over the group, divided by `std(r) + eps` with `normalize_std` (GRPO: Shao et al.
    2024, arXiv:2402.03300). Without it: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), which does not weigh
    prompts by how seldom their rewards differ. `std` is the sample deviation (n - 1). A group whose rewards
    are all equal, so also a group of one, gets exactly 0.

    Other baselines: leave_one_out, the mean of the other episodes (RLOO: Ahmadian et al. 2024, arXiv:2402.14740); none,
    the reward itself.

    Args:
        rewards_B: finite, any float dtype. group_index_B: int64; equal values form a group.
        normalize_std: divide by the group's deviation.
        eps: added to the deviation.
        episode_index_B: int64; equal values form an episode, which lies in one group and counts once in it, with the
            mean of its rewards. If None, every rollout is an episode.

    Returns:
        float32 [B], computed in float64.

    Raises:
        RewardError: shapes differ, or a reward is not finite.
    """
    _check(rewards_B, group_index_B)
    rewards = rewards_B.double()
    group_B = group_index_B.unique(return_inverse=True)[1]
    zeros_G = rewards.new_zeros(int(group_B.max()) + 1 if len(group_B) else 0)
    share_B, of_episode_B = torch.ones_like(rewards), rewards
    if episode_index_B is not None:
        episode_B = episode_index_B.unique(return_inverse=True)[1]
        share_B = 1.0 / episode_B.bincount().double()[episode_B]
        of_episode_B = torch.zeros_like(rewards).index_add(0, episode_B, share_B * rewards)[episode_B]
    count_G = zeros_G.index_add(0, group_B, share_B)
    mean_G = zeros_G.index_add(0, group_B, share_B * rewards) / count_G
    centered_B = rewards - mean_G[group_B]
    # If all rewards are equal, rounding of the mean would leave 1e-17, which `std` then blows up.
    highest_G = zeros_G.scatter_reduce(0, group_B, rewards, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, group_B, rewards, "amin", include_self=False)
    from_mean_B = centered_B = torch.where((highest_G == lowest_G)[group_B], 0.0, centered_B)
    if baseline == "leave_one_out":
        # The mean of the others is as far from the mean of all as this, on the other side.
        centered_B = centered_B + ((of_episode_B - mean_G[group_B]) / (count_G - 1).clamp(min=1)[group_B]).where(
            (highest_G != lowest_G)[group_B], 0.0
        )
    elif baseline == "none":
        centered_B = rewards
    if normalize_std:
        square_sum_G = zeros_G.index_add(0, group_B, share_B * from_mean_B.square())
        std_G = (square_sum_G / (count_G - 1).clamp(min=1)).sqrt()
        centered_B = centered_B / (std_G + eps)[group_B]
    return centered_B.float()


def pass_at_k_advantages(
    rewards_B: Tensor, group_index_B: Tensor, k: int, episode_index_B: Tensor | None = None
) -> Tensor:
    """Returns what each episode adds to the best of k: the mean of `max(r_i, max(S)) - max(S)` over all sets S of k - 1
    others of its group. All rollouts of an episode get the same. float32 [B], computed in float64.

    The mean over episodes of k times these numbers, with the gradients of their log-probs, is an unbiased gradient of
    E[max of k rewards], with binary rewards pass@k, with a leave-one-out baseline (PKPO: Walder and Karkhanis 2025,
    arXiv:2505.15201). Never negative. If k is the size of the group, the best episode gets its lead over the second,
    and the others 0.

    Args:
        rewards_B: finite, any float dtype. group_index_B: int64; equal values form a group.
        k: at least 2. A group that is smaller, because episodes were refused, counts by the best of as many as it has;
            an episode without others gets 0.
        episode_index_B: as in `group_advantages`.

    Raises:
        RewardError: shapes differ, or a reward is not finite.
    """
    _check(rewards_B, group_index_B)
    given_B = torch.arange(len(rewards_B)) if episode_index_B is None else episode_index_B
    episode_B = given_B.unique(return_inverse=True)[1]
    sizes_E = episode_B.bincount()
    rewards_E = torch.zeros(len(sizes_E), dtype=torch.float64).index_add(0, episode_B, rewards_B.double()) / sizes_E
    group_E = torch.zeros_like(sizes_E).scatter(0, episode_B, group_index_B)
    out_E = torch.zeros_like(rewards_E)
    for group in group_E.unique().tolist():
        at_n = torch.nonzero(group_E == group)[:, 0]
        size = len(at_n)
        chosen = min(k, size)
        if chosen < 2:
            continue
        rewards_n, order_n = rewards_E[at_n].sort()
        values = rewards_n.tolist()
        # In ascending order; of the sets S, those whose largest member stands at j < i are C(j, k - 2).
        sets = math.comb(size - 1, chosen - 1)
        gains = [sum((values[i] - values[j]) * math.comb(j, chosen - 2) for j in range(i)) / sets for i in range(size)]
        out_E[at_n[order_n]] = torch.tensor(gains, dtype=torch.float64)
    return out_E[episode_B].float()


def whitened(advantages_B: Tensor, num_tokens_B: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns `(A - mean(A)) / (std(A) + eps)` over all sampled tokens of the batch: float32 [B], computed in float64.

    Each rollout counts with its tokens. `std` is that of the population. REINFORCE++ (Hu et al. 2025,
    arXiv:2501.03262). Equal advantages give exactly 0.

    Args:
        advantages_B: float. num_tokens_B: int64, sampled tokens of each rollout.
    """
    values_B, tokens_B = advantages_B.double(), num_tokens_B.double()
    if not len(values_B) or bool(values_B.amax() == values_B.amin()):
        return torch.zeros_like(advantages_B, dtype=torch.float32)
    mean = (values_B * tokens_B).sum() / tokens_B.sum()
    std = ((values_B - mean).square() * tokens_B).sum().div(tokens_B.sum()).sqrt()
    return ((values_B - mean) / (std + eps)).float()


def less_when_overlong(rewards_B: Tensor, num_tokens_B: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Returns `r - factor clip((tokens - (limit - buffer)) / buffer, 0, 1)`: float [B].

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13): nothing up to `limit - buffer` sampled
    tokens, `factor` at `limit` and beyond.
    """
    exceeded_B = (num_tokens_B - (limit - buffer)).clamp(0, buffer).to(rewards_B.dtype)
    return rewards_B - factor * exceeded_B / buffer


@dataclass(frozen=True, slots=True, eq=False)
class CreditUnits:
    """U units, each with a reward and one advantage: rollouts, or turns of them."""

    rewards_U: Tensor
    """float32."""
    group_index_U: Tensor
    """int64; the same for units that are compared."""
    episode_index_U: Tensor
    """int64; the same for units of one group that come from one episode, which counts once in it."""
    num_tokens_U: Tensor
    """int64; sampled tokens, at least 1."""


def credit_units(batch: RewardedBatch, rewards_B: Tensor, credit: Literal["episode", "agent", "turn"]) -> CreditUnits:
    """Returns the units of a batch, in the order of their tokens.

    episode: rollouts, compared in the groups of their prompts. agent: rollouts, compared with those of the same agent
    in the group. turn: turns k of rollouts, compared with the k-th turns of the same agent in the group; the reward of
    a turn is what was not earned before it, `r - sum over j < k of t_j`, with r the reward of the rollout and t_j the
    part of it that turn j earned (rewards to go with a baseline of the same place: Williams 1992; turns in groups: Zeng
    et al. 2025, arXiv:2505.11821). Turns of a fork are counted from the beginning of the session it comes from.

    Args:
        rewards_B: float32; of the rollouts, after all that is taken from them.
    """
    groups_B = batch.group_index_B
    if credit == "episode":
        return CreditUnits(rewards_B, groups_B, batch.episode_index_B, batch.num_tokens_B)
    agents_B = _pairs(groups_B, batch.agent_index_B)
    if credit == "agent":
        return CreditUnits(rewards_B, agents_B, _pairs(batch.episode_index_B, agents_B), batch.num_tokens_B)
    rollout_N = torch.repeat_interleave(torch.arange(len(rewards_B)), batch.num_tokens_B)
    is_new_N = torch.ones_like(rollout_N, dtype=torch.bool)
    is_new_N[1:] = (rollout_N.diff() != 0) | (batch.turn_index_N.diff() != 0)
    unit_N = is_new_N.cumsum(0) - 1
    rollout_U, turn_U = rollout_N[is_new_N], batch.turn_index_N[is_new_N]
    earned_U = torch.zeros(len(rollout_U), dtype=torch.float64).index_add(0, unit_N, batch.turn_rewards_N.double())
    before_U = earned_U.cumsum(0) - earned_U
    first_B = torch.searchsorted(rollout_U, torch.arange(len(rewards_B)))
    to_go_U = rewards_B.double()[rollout_U] - (before_U - before_U[first_B][rollout_U])
    groups_U = _pairs(agents_B[rollout_U], turn_U)
    episodes_U = _pairs(batch.episode_index_B[rollout_U], groups_U)
    return CreditUnits(to_go_U.float(), groups_U, episodes_U, torch.bincount(unit_N))


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Returns numbers that are equal exactly for equal pairs: int64."""
    return torch.stack([first, second], 1).unique(dim=0, return_inverse=True)[1]


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
