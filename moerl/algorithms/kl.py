"""KL terms per token. Runs in trainer processes.

The penalty uses exact KLs (`moerl.kernels`: a sum over the kept set or over the full vocabulary). The
estimator below serves metrics, for which only the log-probs of the sampled tokens are at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.policy import PolicyRows
from moerl.algorithms.ratios import bounded
from moerl.errors import ConfigError


def kl_penalty(loss_T: Tensor, rows: PolicyRows, kl_coef: float) -> Tensor:
    """Returns `loss + kl_coef * KL` per token with the exact KL of `rows`; adds 0 on untrained tokens.

    Raises:
        ConfigError: the rows carry no KL.
    """
    if rows.kl_T is None:
        raise ConfigError(
            "algorithm.kl_coef: the microbatch carries no KL to the reference",
            seen=f"kl_coef={kl_coef} and kl_T=None",
            expected="the exact KL per token",
            remedy="configure a reference model, or set algorithm.kl_coef to 0",
        )
    return loss_T + kl_coef * rows.kl_T.masked_fill(~rows.loss_mask_T, 0.0)


def k3_estimate(sampler_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """Estimates KL(sampler || other) from tokens drawn by the sampler: `exp(d) - 1 - d`, bounded `d = other - sampler`.

    Schulman's k3 (2020, "Approximating KL divergence"): never negative, low variance, unbiased if `other`'s support
    lies within the sampler's. If the sampler was truncated and `other` is not, it is biased: tokens that were cut are
    never drawn.
    """
    difference_T = bounded(other_logprobs_T - sampler_logprobs_T)
    return torch.expm1(difference_T) - difference_T
