"""Units of credit: what a reward is compared with, and which tokens share an advantage. Runs in the process that closes
a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moerl.algorithms.policy import RewardedBatch

Credit = Literal["episode", "agent", "turn"]


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


def credit_units(batch: RewardedBatch, rewards_B: Tensor, credit: Credit) -> CreditUnits:
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
