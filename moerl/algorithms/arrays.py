"""The controller's part of algorithms: advantages, facts and statistics of trajectories and numpy arrays.

The only place at which the controller comes to tensors. Functions load torch when they are called; importing this
module does not. Shape legend: B = rollouts of a batch, N = their sampled tokens, R = trained tokens of an update, L =
MoE layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moerl.algorithms.section import Algorithm
from moerl.contract.batch import TrainSample
from moerl.contract.requirements import require_scores
from moerl.contract.spans import turn_numbers
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Trajectory

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import RewardedBatch, SampledTokens, Tensor

FAR_LOG_RATIO = math.log(2.0)
"""A token whose probabilities differ by more than a factor of 2 counts as far off."""

NEAR_RATIOS = (0.9, 1.1)
"""A token whose ratio lies outside of this counts as one that importance weights would change."""


# --- advantages ------------------------------------------------------------------------------------------------------


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
    return algorithm.compute_advantages(rewarded(trajectories, kl_B=kl_B)).numpy()


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
    import torch

    from moerl.algorithms import toolbox

    def numbered(names: list[str]) -> Tensor:
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([number[name] for name in names])

    for trajectory in trajectories:
        require_scores(trajectory.scores, scores)
    lineages = [trajectory.lineage for trajectory in trajectories]
    return toolbox.RewardedBatch(
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


def _turn_rewards(trajectory: Trajectory) -> NDArray[np.float32]:
    """Returns the rewards of turns on their last tokens: float32 [sampled tokens], 0 on others."""
    rewards_S = trajectory.scores.get(TURN_REWARDS)
    return np.zeros(trajectory.num_sampled, np.float32) if rewards_S is None else rewards_S[trajectory.sampled]


# --- facts -----------------------------------------------------------------------------------------------------------


def batch_facts(samples: Sequence[TrainSample], algorithm: Algorithm) -> dict[str, float]:
    """Returns the facts of an algorithm (`Algorithm.batch_facts`) about the samples of an optimizer step."""
    return algorithm.batch_facts(sampled_tokens(samples))


def sampled_tokens(samples: Sequence[TrainSample]) -> SampledTokens:
    """Returns advantages and rollout log-probs of the sampled tokens, for the facts of an algorithm
    (`Algorithm.batch_facts`)."""
    import torch

    from moerl.algorithms import toolbox

    def of_all(arrays: Iterable[NDArray[np.float32]]) -> Tensor:
        chosen = zip(arrays, samples, strict=True)
        return torch.from_numpy(np.concatenate([each[sample.trajectory.sampled] for each, sample in chosen]))

    return toolbox.SampledTokens(
        of_all(sample.advantages for sample in samples), of_all(s.trajectory.rollout_logprobs for s in samples)
    )


# --- statistics ------------------------------------------------------------------------------------------------------


def mismatch(trainer_R: NDArray[np.float32], rollout_R: NDArray[np.float32]) -> dict[str, float]:
    """Returns the distance of the trainer's log-probs from the engine's, for the same tokens and weights: means,
    maximum and shares of tokens by metric name; nothing if there are no tokens.

    Of `d = trainer - rollout` in nats, bounded before `exp`: mean and maximum of |d|; mean of `exp(d) - 1 - d`, which
    estimates KL(rollout || trainer) (`moerl.algorithms.losses.k3_estimate`); mean of exp(d); shares of tokens with
    |d| > `FAR_LOG_RATIO`, and with exp(d) outside of `NEAR_RATIOS`.
    """
    if not len(trainer_R):
        return {}
    import torch

    from moerl.algorithms import toolbox

    trainer, rollout = torch.from_numpy(trainer_R).double(), torch.from_numpy(rollout_R).double()
    difference = trainer - rollout
    distance, ratio = difference.abs(), toolbox.bounded(difference).exp()
    low, high = NEAR_RATIOS
    return {
        "mismatch_abs_mean": float(distance.mean()),
        "mismatch_abs_max": float(distance.max()),
        "mismatch_k3": float(toolbox.k3_estimate(rollout, trainer).mean()),
        "mismatch_ratio_mean": float(ratio.mean()),
        "mismatch_far_share": float((distance > FAR_LOG_RATIO).double().mean()),
        "mismatch_outside_share": float(((ratio < low) | (ratio > high)).double().mean()),
    }


def ratio_quantiles(
    trainer_R: NDArray[np.float32], rollout_R: NDArray[np.float32], max_samples: int
) -> dict[str, float]:
    """Returns quantiles 0.01, 0.5 and 0.99 of the ratios `exp(trainer - rollout)` of at most `max_samples` tokens,
    evenly spaced; nothing if there are no tokens."""
    if not len(trainer_R):
        return {}
    import torch

    from moerl.algorithms import toolbox

    stride = math.ceil(len(trainer_R) / max_samples)
    ratios = toolbox.bounded(torch.from_numpy(trainer_R - rollout_R)).exp()[::stride].double()
    levels = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    names = ("mismatch_ratio_p01", "mismatch_ratio_p50", "mismatch_ratio_p99")
    return dict(zip(names, torch.quantile(ratios, levels).tolist(), strict=True))


def agreement(sums_LS: NDArray[np.float64], *, over_layers: bool = False) -> dict[str, list[float]]:
    """Returns how often routers would have chosen other experts: the share of flips, mean Jaccard similarity and mean
    margins, from sums over all ranks [L, 5]: a number for each layer, or one for all layers together. A mean over
    nothing is 0."""
    import torch

    sums = torch.from_numpy(sums_LS)
    rows_L, flips_L, jaccard_L, at_flips_L, elsewhere_L = (sums.sum(0, keepdim=True) if over_layers else sums).unbind(1)
    return {
        "disagreement": (flips_L / rows_L.clamp(min=1)).tolist(),
        "jaccard": (jaccard_L / rows_L.clamp(min=1)).tolist(),
        "margin_at_flips": (at_flips_L / flips_L.clamp(min=1)).tolist(),
        "margin_elsewhere": (elsewhere_L / (rows_L - flips_L).clamp(min=1)).tolist(),
    }
