"""Importance weights that correct for the rollout engine sampling from another policy than the trainer's.

Runs in trainer processes. Engine and trainer differ in numerics and, with asynchronous rollouts, in version. All but
`on_policy_enough` compare the weights that the batch met with the engine, `proximal_logprobs - rollout_logprobs`,
inside the support each token was drawn from; none has a gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from moerl.algorithms.losses import bounded
from moerl.algorithms.policy import PolicyRows


@torch.no_grad()
def importance_weights(
    rows: PolicyRows,
    level: Literal["token", "sequence", "geometric", "off"],
    floor: float,
    cap: float,
    *,
    drops: bool = False,
) -> Tensor:
    """Returns the weight of every token, within bounds: float32 [T].

    With d the log-ratio of a token: `exp(d)` at the level token; of a response, for all of its tokens, `exp(sum d)` at
    sequence and `exp(mean d)` at geometric; 1 at off. Clipped: truncated importance sampling (TIS: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). Dropped, 0 outside of the bounds: IcePop
    (Ling team 2025, "Every step evolves", arXiv:2510.18855).

    Args:
        floor: smallest weight, at most 1; 0 = no lower bound.
        cap: largest weight, at least 1.
        drops: True if weights outside become 0; else they become the bound.
    """
    if level == "off":
        return torch.ones_like(rows.proximal_logprobs_T)
    log_T = _log_weight(rows)
    if level != "token":
        log_T = rows.sequence_sum(log_T)
    if level == "geometric":
        log_T = log_T / rows.sequence_lengths()
    weights_T = bounded(log_T).exp()
    if drops:
        return weights_T.masked_fill((weights_T < floor) | (weights_T > cap), 0.0)
    return weights_T.clamp(floor, cap)


@torch.no_grad()
def within_band(rows: PolicyRows, band: float) -> Tensor:
    """Returns float32 [T]: 1 on responses whose geometric mean weight is within 1 / (1 + band) and 1 + band, else 0.

    The sequence mask of geometric importance sampling (Liu et al. 2025, "When speed kills stability").
    """
    mean_T = rows.sequence_sum(_log_weight(rows)) / rows.sequence_lengths()
    return (mean_T.abs() <= math.log1p(band)).float()


@torch.no_grad()
def on_policy_enough(rows: PolicyRows, delta: float) -> Tensor:
    """Returns float32 [T]: 0 on tokens with a negative advantage of responses with `mean(rollout - trainer) > delta`,
    else 1.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556), against the sampler's log-probs and with the weights
    being trained, so that it also sees how far the updates of a batch have gone.
    """
    far_T = (rows.rollout_logprobs_T - rows.trainer_logprobs_T).masked_fill(~rows.loss_mask_T, 0.0)
    mean_T = rows.sequence_sum(far_T) / rows.sequence_lengths()
    return (~((rows.advantages_T < 0.0) & (mean_T > delta))).float()


def _log_weight(rows: PolicyRows) -> Tensor:
    return (rows.proximal_logprobs_T - rows.rollout_logprobs_T).masked_fill(~rows.loss_mask_T, 0.0)
