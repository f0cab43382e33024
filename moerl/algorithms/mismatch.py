"""Distance of the trainer's log-probs from the engine's, for the same tokens and the same weights. Runs in the
controller. Shape legend: R = trained tokens of an update.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.algorithms.losses import bounded, k3_estimate

FAR_LOG_RATIO = math.log(2.0)
"""A token whose probabilities differ by more than a factor of 2 counts as far off."""

NEAR_RATIOS = (0.9, 1.1)
"""A token whose ratio lies outside of this counts as one that importance weights would change."""


def mismatch(trainer_R: NDArray[np.float32], rollout_R: NDArray[np.float32]) -> dict[str, float]:
    """Returns means, maximum and shares of tokens by metric name; nothing if there are no tokens.

    Of `d = trainer - rollout` in nats, bounded before `exp`: mean and maximum of |d|; mean of `exp(d) - 1 - d`, which
    estimates KL(rollout || trainer) (`moerl.algorithms.losses.k3_estimate`); mean of exp(d); shares of tokens with
    |d| > `FAR_LOG_RATIO`, and with exp(d) outside of `NEAR_RATIOS`.
    """
    if not len(trainer_R):
        return {}
    trainer, rollout = torch.from_numpy(trainer_R).double(), torch.from_numpy(rollout_R).double()
    difference = trainer - rollout
    distance, ratio = difference.abs(), bounded(difference).exp()
    low, high = NEAR_RATIOS
    return {
        "mismatch_abs_mean": float(distance.mean()),
        "mismatch_abs_max": float(distance.max()),
        "mismatch_k3": float(k3_estimate(rollout, trainer).mean()),
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
    stride = math.ceil(len(trainer_R) / max_samples)
    ratios = bounded(torch.from_numpy(trainer_R - rollout_R)).exp()[::stride].double()
    levels = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    names = ("mismatch_ratio_p01", "mismatch_ratio_p50", "mismatch_ratio_p99")
    return dict(zip(names, torch.quantile(ratios, levels).tolist(), strict=True))
