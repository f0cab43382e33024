"""Advantages, corrections, objectives and reductions in loops over plain numbers: what moerl computes, without torch.

Gradients come from complex steps: the loss at `x + 1e-30 i` has the derivative in its imaginary part, without the
rounding errors of differences.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = 1e-30
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Log-probs and mask [N, T], advantages [N]."""

    trainer: NDArray[Any]
    proximal: Matrix
    rollout: Matrix
    mask: Matrix
    advantages: Matrix

    def trained(self, i: int) -> list[int]:
        """The trained tokens of a sequence."""
        return [t for t in range(self.mask.shape[1]) if self.mask[i, t]]


def loss_and_gradient(batch: Batch, algorithm: Any) -> tuple[float, Matrix]:
    """The loss of the batch, and its gradient with respect to the trainer's log-probs."""
    frozen = weights(batch, algorithm)
    gradient = np.zeros(batch.mask.shape)
    for place in np.ndindex(*batch.mask.shape):
        moved = batch.trainer.astype(complex)
        moved[place] += STEP * 1j
        step = Batch(moved, batch.proximal, batch.rollout, batch.mask, batch.advantages)
        gradient[place] = _loss(step, algorithm, frozen).imag / STEP
    return _loss(batch, algorithm, frozen).real, gradient


def weights(batch: Batch, algorithm: Any) -> Matrix:
    """Returns the factor of each token's objective; 0 if the token is not trained."""
    out = np.zeros(batch.mask.shape)
    for i, advantage in enumerate(batch.advantages):
        trained = batch.trained(i)
        logs = [batch.proximal[i, t] - batch.rollout[i, t] for t in trained]
        mean = sum(logs) / len(logs)
        far = sum(batch.rollout[i, t] - batch.trainer[i, t].real for t in trained) / len(trained)
        for t, log in zip(trained, logs, strict=True):
            value = {"token": log, "sequence": sum(logs), "geometric": mean, "off": 0.0}[algorithm.importance]
            weight, low, high = math.exp(value), algorithm.importance_floor, algorithm.importance_cap
            if not low <= weight <= high:
                weight = 0.0 if algorithm.importance_outside == "drop" else min(max(weight, low), high)
            if algorithm.sequence_band is not None and abs(mean) > math.log(1.0 + algorithm.sequence_band):
                weight = 0.0
            if algorithm.opsm_delta is not None and advantage < 0.0 and far > algorithm.opsm_delta:
                weight = 0.0
            out[i, t] = weight
    return out


def _loss(batch: Batch, algorithm: Any, frozen: Matrix) -> complex:
    total, num_sequences, num_tokens = 0j, len(batch.advantages), float(batch.mask.sum())
    for i, advantage in enumerate(batch.advantages):
        trained = batch.trained(i)
        logs = [complex(batch.trainer[i, t] - batch.proximal[i, t]) for t in trained]
        terms = [
            -frozen[i, t] * _objective(algorithm, complex(batch.trainer[i, t]), log, logs, float(advantage))
            for t, log in zip(trained, logs, strict=True)
        ]
        share = {
            "token_mean": num_tokens,
            "sequence_mean": num_sequences * len(trained),
            "constant": num_sequences * (algorithm.reduction_length or 0),
        }[algorithm.reduction]
        total += sum(terms) / share
    return total


def _objective(algorithm: Any, logprob: complex, log: complex, logs: Sequence[complex], advantage: float) -> complex:
    """Returns the maximised objective of one token; `logs` are the log-ratios of its response."""
    match algorithm.name:
        case "grpo":
            return _clipped(algorithm, log, advantage)
        case "gspo":
            return _clipped(algorithm, sum(logs) / len(logs), advantage)
        case "cispo":
            ratio = math.exp(log.real)
            return min(max(ratio, 1.0 - algorithm.clip_low), 1.0 + algorithm.clip_high) * advantage * logprob
        case "gmpo":
            cut = [_cut(algorithm, each, advantage) for each in logs]
            return cmath.exp(sum(cut) / len(cut)) * advantage
        case "sapo":
            tau = algorithm.tau_positive if advantage > 0.0 else algorithm.tau_negative
            return 4.0 / tau / (1.0 + cmath.exp(-tau * (cmath.exp(log) - 1.0))) * advantage
        case _:
            raise AssertionError(algorithm.name)


def _clipped(algorithm: Any, log: complex, advantage: float) -> complex:
    ratio = cmath.exp(log)
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    if advantage >= 0.0:
        return (ratio if ratio.real <= high else high) * advantage
    ratio = ratio if ratio.real >= low else low
    dual = getattr(algorithm, "dual_clip", None)
    return (ratio if dual is None or ratio.real <= dual else dual) * advantage


def _cut(algorithm: Any, log: complex, advantage: float) -> complex:
    if advantage > 0.0 and log.real > algorithm.clip_high:
        return algorithm.clip_high
    return -algorithm.clip_low if advantage < 0.0 and log.real < -algorithm.clip_low else log


def advantages(rewards: Matrix, groups: Sequence[int], num_tokens: Sequence[int], algorithm: Any) -> list[float]:
    """Returns the advantage of each rollout, from the rewards of its group."""
    out: list[float] = []
    for i, reward in enumerate(rewards.tolist()):
        group = [other for other, name in zip(rewards.tolist(), groups, strict=True) if name == groups[i]]
        mean, count = sum(group) / len(group), len(group)
        if algorithm.baseline == "none":
            out.append(reward)
        elif count == 1 or len(set(group)) == 1:
            out.append(0.0)
        elif algorithm.baseline == "leave_one_out":
            out.append(reward - (sum(group) - reward) / (count - 1))
        else:
            deviation = math.sqrt(sum((other - mean) ** 2 for other in group) / (count - 1))
            out.append((reward - mean) / (deviation + 1e-6 if algorithm.normalize_std else 1.0))
    if not algorithm.whiten:
        return out
    every = [value for value, count in zip(out, num_tokens, strict=True) for _ in range(count)]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in every) / len(every))
    return [(value - mean) / (deviation + 1e-8) for value in out]
