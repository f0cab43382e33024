"""The controller's part of algorithms: advantages, facts and statistics of trajectories and numpy arrays.

The only place at which the controller comes to tensors. Functions load torch when they are called; importing this
module does not. Shape legend: B = rollouts of a batch, R = trained tokens of an update, L = MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moerl.algorithms.section import Algorithm
from moerl.contract.batch import TrainSample
from moerl.contract.trajectory import Trajectory


def with_advantages(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> list[TrainSample]:
    """Returns the trajectories with the advantages of their sampled tokens; with zeros if a KL is yet to be taken from
    the rewards.

    Raises:
        ContractError: a trajectory lacks a score of `Algorithm.needs`.
    """
    counts = [trajectory.num_sampled for trajectory in trajectories]
    if algorithm.kl_in_reward:
        advantages_N = np.zeros(sum(counts), np.float32)
    else:
        from moerl.algorithms.tensors import rewarded

        advantages = algorithm.compute_advantages(rewarded(trajectories, algorithm.needs)).numpy()
        advantages_N = np.repeat(advantages, counts) if len(advantages) == len(trajectories) else advantages
    samples: list[TrainSample] = []
    for trajectory, end in zip(trajectories, np.cumsum(counts).tolist(), strict=True):
        advantages_S = np.zeros(len(trajectory), np.float32)
        advantages_S[trajectory.sampled] = advantages_N[end - trajectory.num_sampled : end]
        samples.append(TrainSample(trajectory, advantages_S))
    return samples


def advantages_less_kl(
    trajectories: Sequence[Trajectory], kl_B: NDArray[np.float64], algorithm: Algorithm
) -> NDArray[np.float32]:
    """Returns one advantage per rollout, from rewards less a KL: float32 [B]. kl_B: `RewardedBatch.kl_B`."""
    from moerl.algorithms.tensors import rewarded

    return algorithm.compute_advantages(rewarded(trajectories, kl_B=kl_B)).numpy()


def batch_facts(samples: Sequence[TrainSample], algorithm: Algorithm) -> dict[str, float]:
    """Returns the facts of an algorithm (`Algorithm.batch_facts`) about the samples of an optimizer step."""
    from moerl.algorithms.tensors import sampled_tokens

    return algorithm.batch_facts(sampled_tokens(samples))


def mismatch(trainer_R: NDArray[np.float32], rollout_R: NDArray[np.float32]) -> dict[str, float]:
    """Returns `moerl.algorithms.mismatch.mismatch`: the distance of the trainer's log-probs from the engine's."""
    from moerl.algorithms import mismatch

    return mismatch.mismatch(trainer_R, rollout_R)


def ratio_quantiles(
    trainer_R: NDArray[np.float32], rollout_R: NDArray[np.float32], max_samples: int
) -> dict[str, float]:
    """Returns `moerl.algorithms.mismatch.ratio_quantiles`, of the ratio trainer over rollout."""
    from moerl.algorithms import mismatch

    return mismatch.ratio_quantiles(trainer_R, rollout_R, max_samples)


def agreement(sums_LS: NDArray[np.float64], *, over_layers: bool = False) -> dict[str, list[float]]:
    """Returns `moerl.algorithms.agreement.summarize`: how often routers would have chosen other experts, by name."""
    from moerl.algorithms.agreement import summarize

    return summarize(sums_LS, over_layers=over_layers)
