"""Tensors that algorithms get of trajectories. Loads torch: the controller calls it through `moerl.algorithms.arrays`.

Shape legend: B = rollouts of a batch, N = their sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.algorithms.policy import RewardedBatch, SampledTokens
from moerl.contract.batch import TrainSample
from moerl.contract.demands import demand_scores
from moerl.contract.spans import turn_numbers
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Trajectory


def rewarded(
    trajectories: Sequence[Trajectory], scores: Sequence[str] = (), kl_B: NDArray[np.float64] | None = None
) -> RewardedBatch:
    """Returns the batch that advantages of these trajectories are computed from. A trajectory without an episode is an
    episode of its own.

    Args:
        scores: names of the side scores that the batch has.
        kl_B: as in `RewardedBatch`.

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
        kl_B=None if kl_B is None else torch.from_numpy(kl_B).float(),
        scores_N={
            name: torch.from_numpy(np.concatenate([t.scores[name][t.sampled] for t in trajectories])) for name in scores
        },
    )


def sampled_tokens(samples: Sequence[TrainSample]) -> SampledTokens:
    """Returns advantages and rollout log-probs of the sampled tokens, for the facts of an algorithm
    (`Algorithm.batch_facts`)."""

    def of_all(arrays: Iterable[NDArray[np.float32]]) -> torch.Tensor:
        chosen = zip(arrays, samples, strict=True)
        return torch.from_numpy(np.concatenate([each[sample.trajectory.sampled] for each, sample in chosen]))

    return SampledTokens(
        of_all(sample.advantages for sample in samples), of_all(s.trajectory.rollout_logprobs for s in samples)
    )


def _turn_rewards(trajectory: Trajectory) -> NDArray[np.float32]:
    """Returns the rewards of turns on their last tokens: float32 [sampled tokens], 0 on others."""
    rewards_S = trajectory.scores.get(TURN_REWARDS)
    return np.zeros(trajectory.num_sampled, np.float32) if rewards_S is None else rewards_S[trajectory.sampled]
