"""Modules that a user could have written."""

GRPO_BY_HAND = """
import torch

from moerl.algorithms.toolbox import PolicyLoss


def loss(rows, *, clip_low, clip_high, importance_cap, kl_coef):
    mask = rows.loss_mask_T
    weights = torch.exp(rows.proximal_logprobs_T - rows.rollout_logprobs_T).clamp(max=importance_cap)
    ratio = torch.exp((rows.trainer_logprobs_T - rows.proximal_logprobs_T).masked_fill(~mask, 0.0))
    plain, clipped = ratio * rows.advantages_T, ratio.clamp(1 - clip_low, 1 + clip_high) * rows.advantages_T
    losses = (-weights * torch.minimum(plain, clipped)).masked_fill(~mask, 0.0)
    losses = losses + kl_coef * rows.kl_T.masked_fill(~mask, 0.0)
    return PolicyLoss(losses.sum() / rows.totals.num_tokens, losses, (clipped < plain) & mask)


def advantages(batch):
    rewards, result = batch.rewards_B.double(), torch.zeros(len(batch.rewards_B))
    for group in batch.group_index_B.unique():
        peers = batch.group_index_B == group
        own = rewards[peers]
        if (own != own[0]).any():
            result[peers] = ((own - own.mean()) / (own.std() + 1e-6)).float()
    return result
"""
"""GRPO, written down again."""
