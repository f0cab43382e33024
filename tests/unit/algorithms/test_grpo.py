"""The whole GRPO loss against an independent numpy computation, and its seam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moerl.algorithms.grpo import GRPO
from moerl.algorithms.losses import PolicyLossInputs
from moerl.algorithms.reduction import token_mean
from moerl.algorithms.registry import make_algorithm
from moerl.errors import ConfigError

LENGTHS = [3, 5, 2, 4, 1, 6]
GROUPS = np.array([0, 0, 0, 1, 1, 2])
REWARDS = np.array([1.0, 0.0, 0.25, 1.0, 0.5, 1.0])


@dataclass
class Batch:
    trainer: np.ndarray
    proximal: np.ndarray
    rollout: np.ndarray
    kl: np.ndarray
    mask: np.ndarray
    rollout_index: np.ndarray


def make_batch() -> Batch:
    random = np.random.default_rng(0)
    num_tokens = sum(LENGTHS)
    rollout = -random.exponential(1.0, num_tokens)
    proximal = rollout + random.normal(0, 0.6, num_tokens)
    trainer = proximal + random.normal(0, 0.4, num_tokens)
    kl = random.exponential(0.1, num_tokens)
    mask = random.random(num_tokens) < 0.8
    return Batch(trainer, proximal, rollout, kl, mask, np.repeat(np.arange(len(LENGTHS)), LENGTHS))


def loss_by_hand(batch: Batch, algorithm: GRPO) -> float:
    """GRPO's loss token by token, in float64, without the code under test."""
    advantages = np.zeros(len(REWARDS))
    for index, group in enumerate(GROUPS):
        peers = REWARDS[group == GROUPS]
        advantages[index] = REWARDS[index] - sum(peers) / len(peers)
        if algorithm.normalize_std and len(peers) > 1:
            advantages[index] /= np.sqrt(sum((peers - peers.mean()) ** 2) / (len(peers) - 1)) + 1e-6
    total = 0.0
    for token in np.flatnonzero(batch.mask):
        advantage = advantages[batch.rollout_index[token]]
        weight = min(np.exp(batch.proximal[token] - batch.rollout[token]), algorithm.importance_cap)
        ratio = np.exp(batch.trainer[token] - batch.proximal[token])
        clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
        total += -weight * min(ratio * advantage, clipped * advantage)
        total += algorithm.kl_coef * batch.kl[token]
    return total / batch.mask.sum()


def loss_by_code(batch: Batch, algorithm: GRPO, trainer: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    advantages = algorithm.advantages(torch.tensor(REWARDS), torch.tensor(GROUPS)).double()
    mask = torch.tensor(batch.mask)
    inputs = PolicyLossInputs(
        trainer_logprobs_T=trainer,
        proximal_logprobs_T=torch.tensor(batch.proximal),
        rollout_logprobs_T=torch.tensor(batch.rollout),
        advantages_T=advantages[torch.tensor(batch.rollout_index)],
        loss_mask_T=mask,
        kl_T=kl,
    )
    return token_mean(algorithm.token_losses(inputs).loss_T, mask, int(mask.sum()))


ALGORITHMS = [
    GRPO(),
    GRPO(normalize_std=False, kl_coef=0.3),
    GRPO(clip_low=0.1, clip_high=0.15, importance_cap=1.1, kl_coef=0.01),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_equals_an_independent_computation(algorithm: GRPO) -> None:
    batch = make_batch()
    loss = loss_by_code(batch, algorithm, torch.tensor(batch.trainer), torch.tensor(batch.kl))
    # Advantages are handed over in float32.
    assert float(loss) == pytest.approx(loss_by_hand(batch, algorithm), rel=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_equals_finite_differences(algorithm: GRPO) -> None:
    batch = make_batch()
    trainer = torch.tensor(batch.trainer, requires_grad=True)
    kl = torch.tensor(batch.kl, requires_grad=algorithm.needs_reference)
    loss_by_code(batch, algorithm, trainer, kl).backward()
    for values, leaf in ((batch.trainer, trainer), (batch.kl, kl)):
        if leaf.grad is None:
            continue
        for token in range(len(values)):
            middle, losses = values[token], []
            for step in (1e-6, -1e-6):
                values[token] = middle + step
                losses.append(loss_by_hand(batch, algorithm))
            values[token] = middle
            assert float(leaf.grad[token]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-8)


def test_a_kl_penalty_without_a_kl_is_refused() -> None:
    zeros = torch.zeros(2)
    inputs = PolicyLossInputs(zeros, zeros, zeros, zeros, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="no KL to the reference"):
        GRPO(kl_coef=0.1).token_losses(inputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_high", 0.0),
        ("importance_cap", 0.5),
        ("importance_cap", float("inf")),
        ("kl_coef", -0.1),
        ("kl_coef", float("nan")),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{name} is out of range"):
        make_algorithm("grpo", **{name: value})
