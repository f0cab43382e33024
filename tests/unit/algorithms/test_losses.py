"""The clipped policy loss, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from moerl.algorithms.losses import PolicyLossInputs, clipped_policy_loss


def one_token(ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float, bool]:
    """Loss, gradient with respect to the trainer's log-prob, and whether it was clipped (0.2 below, 0.3 above)."""
    trainer = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    inputs = PolicyLossInputs(
        trainer_logprobs_T=trainer,
        proximal_logprobs_T=zero,
        rollout_logprobs_T=zero,
        advantages_T=torch.tensor([advantage], dtype=torch.float64),
        loss_mask_T=torch.ones(1, dtype=torch.bool),
    )
    loss = clipped_policy_loss(inputs, torch.tensor([weight], dtype=torch.float64), 0.2, 0.3)
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


def test_masked_tokens_add_nothing_whatever_they_hold() -> None:
    trainer = torch.tensor([0.0, 500.0, float("nan")], requires_grad=True)
    inputs = PolicyLossInputs(
        trainer_logprobs_T=trainer,
        proximal_logprobs_T=torch.zeros(3),
        rollout_logprobs_T=torch.zeros(3),
        advantages_T=torch.tensor([1.0, -1.0, 1.0]),
        loss_mask_T=torch.tensor([True, False, False]),
    )
    loss = clipped_policy_loss(inputs, torch.ones(3), 0.2, 0.3)
    loss.loss_T.sum().backward()
    assert loss.loss_T.tolist() == [-1.0, 0.0, 0.0]
    assert loss.clipped_T.tolist() == [False, False, False]
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [-1.0, 0.0, 0.0]


def test_gradients_flow_to_the_trainers_logprobs_alone() -> None:
    leaves = [torch.tensor([0.1, -0.2]).requires_grad_() for _ in range(5)]
    trainer, proximal, rollout, advantages, weights = leaves
    inputs = PolicyLossInputs(trainer, proximal, rollout, advantages, torch.ones(2, dtype=torch.bool))
    clipped_policy_loss(inputs, weights, 0.2, 0.3).loss_T.sum().backward()
    assert trainer.grad is not None
    assert all(leaf.grad is None for leaf in leaves[1:])
