"""The whole GRPO loss against an independent numpy computation, and its seam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from policy_rows import grpo, policy_rows, rewarded_batch
from pydantic import ValidationError

from moerl.algorithms.grpo import GRPO
from moerl.algorithms.policy import RewardedBatch
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
    advantages = algorithm.compute_advantages(rewarded()).double()
    rows = policy_rows(
        trainer,
        lengths=LENGTHS,
        proximal_T=torch.tensor(batch.proximal),
        rollout_T=torch.tensor(batch.rollout),
        advantages_T=advantages[torch.tensor(batch.rollout_index)],
        mask_T=torch.tensor(batch.mask),
        kl_T=kl,
    )
    return algorithm.compute_loss(rows).loss


def rewarded() -> RewardedBatch:
    return rewarded_batch(REWARDS.tolist(), GROUPS.tolist(), LENGTHS)


ALGORITHMS = [
    grpo(),
    grpo(normalize_std=False, kl_coef=0.3),
    grpo(clip_low=0.1, clip_high=0.15, importance_cap=1.1, kl_coef=0.01),
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
    kl = torch.tensor(batch.kl, requires_grad=algorithm.reference_kl is not None)
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
    with pytest.raises(ConfigError, match="no KL to the reference"):
        grpo(kl_coef=0.1).compute_loss(policy_rows(torch.zeros(2)))


def test_a_reference_is_asked_for_where_the_kl_has_a_weight() -> None:
    assert grpo(kl_coef=0.1, kl_support="full").reference_kl == "full"
    assert grpo(kl_coef=0.0, kl_support="full").reference_kl is None


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
    with pytest.raises(ValidationError, match=name):
        grpo(**{name: value})
