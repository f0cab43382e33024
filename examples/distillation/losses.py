"""On-policy distillation: the advantage of a token is the teacher's log-prob of it, less the policy's own."""

from moerl.algorithms.toolbox import PolicyLoss, token_mean


def distil(rows):
    advantages_T = rows.scores_T["teacher"] - rows.rollout_logprobs_T
    losses_T = -advantages_T * rows.trainer_logprobs_T
    return PolicyLoss(token_mean(losses_T, rows.loss_mask_T, rows.totals.num_tokens), losses_T)
