"""REINFORCE with a baseline: the mean reward of the step."""

from moerl.algorithms.toolbox import PolicyLoss, token_mean


def reinforce(rows, *, scale):
    losses_T = -scale * rows.advantages_T * rows.trainer_logprobs_T
    return PolicyLoss(token_mean(losses_T, rows.loss_mask_T, rows.totals.num_tokens), losses_T)


def centred(batch):
    return batch.rewards_B - batch.rewards_B.mean()
