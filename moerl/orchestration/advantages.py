"""Advantages of a batch of trajectories. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.algorithms.policy import Algorithm, RewardedBatch
from moerl.contract.batch import TrainSample
from moerl.contract.demands import demand_scores
from moerl.contract.spans import turn_numbers
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Trajectory


def rewarded(trajectories: Sequence[Trajectory], scores: Sequence[str] = ()) -> RewardedBatch:
    """Returns the batch that advantages of these trajectories are computed from. A trajectory without an episode is an
    episode of its own. scores: names of the side scores that the batch has.

    Raises:
        ContractError: a trajectory lacks one of the scores.
    """

    def numbered(names: list[str]) -> torch.Tensor:
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([number[name] for name in names])

    for trajectory in trajectories:
        demand_scores(trajectory.scores, scores)
    lineages = [trajectory.lineage for trajectory in trajectories]
    return RewardedBatch(
        rewards_B=torch.tensor([t.rewards["reward"] for t in trajectories], dtype=torch.float32),
        group_index_B=numbered([each.group_id for each in lineages]),
        episode_index_B=numbered([f"{each.group_id}\0{each.episode}" for each in lineages]),
        num_tokens_B=torch.tensor([t.num_sampled for t in trajectories]),
        agent_index_B=numbered([each.agent_id for each in lineages]),
        turn_index_N=torch.from_numpy(np.concatenate(turn_numbers(trajectories))),
        turn_rewards_N=torch.from_numpy(np.concatenate([_turn_rewards(t) for t in trajectories])),
        truncated_B=torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories]),
        scores_N={
            name: torch.from_numpy(np.concatenate([t.scores[name][t.sampled] for t in trajectories])) for name in scores
        },
    )


def with_advantages(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> list[TrainSample]:
    """Returns the trajectories with the advantages of their sampled tokens; with zeros if a KL is yet to be taken from
    the rewards."""
    counts = [trajectory.num_sampled for trajectory in trajectories]
    if algorithm.kl_in_reward:
        advantages_N = np.zeros(sum(counts), np.float32)
    else:
        advantages = algorithm.compute_advantages(rewarded(trajectories, algorithm.needs)).numpy()
        advantages_N = np.repeat(advantages, counts) if len(advantages) == len(trajectories) else advantages
    samples: list[TrainSample] = []
    for trajectory, end in zip(trajectories, np.cumsum(counts).tolist(), strict=True):
        advantages_S = np.zeros(len(trajectory), np.float32)
        advantages_S[trajectory.sampled] = advantages_N[end - trajectory.num_sampled : end]
        samples.append(TrainSample(trajectory, advantages_S))
    return samples


def _turn_rewards(trajectory: Trajectory) -> NDArray[np.float32]:
    """Returns the rewards of turns on their last tokens: float32 [sampled tokens], 0 on others."""
    rewards_S = trajectory.scores.get(TURN_REWARDS)
    return np.zeros(trajectory.num_sampled, np.float32) if rewards_S is None else rewards_S[trajectory.sampled]
