"""The clipped policy loss, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from policy_rows import grpo, policy_rows

from moerl.algorithms.losses import clipped_policy_loss, log_ratio


def one_token(ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float, bool]:
    """Loss, gradient with respect to the trainer's log-prob, and whether it was clipped (0.2 below, 0.3 above)."""
    trainer = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    rows = policy_rows(trainer, advantages_T=torch.tensor([advantage], dtype=torch.float64))
    loss = clipped_policy_loss(rows, torch.tensor([weight], dtype=torch.float64), log_ratio(rows), 0.2, 0.3)
    (gradient,) = torch.autograd.grad(loss.loss_T.sum(), trainer)
    return float(loss.loss_T.detach()), float(gradient), bool(loss.clipped_T)


@pytest.mark.parametrize(
    ("ratio", "advantage", "effective_ratio", "clipped"),
    [
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, 1.3, True),
        (0.5, 2.0, 0.5, False),
        (1.5, -2.0, 1.5, False),
        (0.5, -2.0, 0.8, True),
        (0.9, -2.0, 0.9, False),
    ],
)
def test_clipping_stops_the_gradient_only_where_the_ratio_has_gone_far_enough(
    ratio: float, advantage: float, effective_ratio: float, clipped: bool
) -> None:
    loss, gradient, was_clipped = one_token(ratio, advantage, weight=0.5)
    assert loss == pytest.approx(-0.5 * effective_ratio * advantage)
    assert gradient == pytest.approx(0.0 if clipped else -0.5 * ratio * advantage)
    assert was_clipped is clipped


LARGE = [71.0, 88.0, 89.0, 500.0, 1e30, math.inf]


def far_token(log_ratio: float, advantage: float, rollout: float = 0.0) -> tuple[float, float, bool]:
    """Does the same as `one_token`, in float32 and through GRPO, weighted by importance with a cap of 2."""
    trainer = torch.tensor([log_ratio], requires_grad=True)
    rows = policy_rows(trainer, rollout_T=torch.tensor([rollout]), advantages_T=torch.tensor([advantage]))
    loss = grpo(clip_low=0.2, clip_high=0.3, importance_cap=2.0).compute_loss(rows)
    assert loss.clipped_T is not None
    (gradient,) = torch.autograd.grad(loss.loss, trainer)
    return float(loss.loss.detach()), float(gradient), bool(loss.clipped_T)


@pytest.mark.parametrize("log_ratio", LARGE)
def test_a_ratio_beyond_float32_is_clipped_like_any_other(log_ratio: float) -> None:
    loss, gradient, clipped = far_token(log_ratio, 1.5)
    assert (loss, gradient, clipped) == (pytest.approx(-1.3 * 1.5), 0.0, True)
    assert far_token(log_ratio, 0.0) == (0.0, 0.0, False)
    assert far_token(-log_ratio, -1.5) == (pytest.approx(0.8 * 1.5), 0.0, True)
    assert far_token(-log_ratio, 1.5) == (pytest.approx(0.0, abs=1e-29), pytest.approx(0.0, abs=1e-29), False)


@pytest.mark.parametrize("log_ratio", LARGE)
def test_where_nothing_clips_a_ratio_beyond_float32_it_stays_finite_and_keeps_its_sign(log_ratio: float) -> None:
    loss, gradient, clipped = far_token(log_ratio, -1.5)
    assert not clipped
    assert 1e30 < loss == gradient < math.inf
    # A token that the engine found far more likely than the trainer has no weight, whatever its ratio.
    assert far_token(log_ratio, -1.5, rollout=200.0) == (0.0, 0.0, False)


@pytest.mark.parametrize("advantage", [2.5, -2.5])
@pytest.mark.parametrize("log_ratio", [-20.0, -1.0, -0.1, 0.0, 0.2, 1.0, 20.0, 70.0])
def test_values_and_gradients_in_float32_are_those_of_float64(log_ratio: float, advantage: float) -> None:
    loss, gradient, _ = far_token(log_ratio, advantage)

    def formula(at: float) -> float:
        ratio = math.exp(at)
        return -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)

    slope = (formula(log_ratio + 1e-6) - formula(log_ratio - 1e-6)) / 2e-6
    assert loss == pytest.approx(formula(log_ratio), rel=1e-5)
    assert gradient == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_masked_tokens_add_nothing_whatever_they_hold() -> None:
    trainer = torch.tensor([0.0, 500.0, float("nan")], requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([True, False, False])
    rows = policy_rows(trainer, advantages_T=advantages, mask_T=mask)
    loss = clipped_policy_loss(rows, torch.ones(3), log_ratio(rows), 0.2, 0.3)
    loss.loss_T.sum().backward()
    assert loss.loss_T.tolist() == [-1.0, 0.0, 0.0]
    assert loss.clipped_T.tolist() == [False, False, False]
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [-1.0, 0.0, 0.0]


def test_gradients_flow_to_the_trainers_logprobs_alone() -> None:
    leaves = [torch.tensor([0.1, -0.2]).requires_grad_() for _ in range(5)]
    trainer, proximal, rollout, advantages, weights = leaves
    rows = policy_rows(trainer, proximal_T=proximal, rollout_T=rollout, advantages_T=advantages)
    clipped_policy_loss(rows, weights, log_ratio(rows), 0.2, 0.3).loss_T.sum().backward()
    assert trainer.grad is not None
    assert all(leaf.grad is None for leaf in leaves[1:])
