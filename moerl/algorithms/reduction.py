"""Reductions of token losses to the number that is differentiated. Runs in trainer processes, once per microbatch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from moerl.algorithms.policy import PolicyRows
from moerl.contract.reasons import Reason
from moerl.errors import ContractError


def token_mean(loss_T: Tensor, loss_mask_T: Tensor, denominator: float) -> Tensor:
    """Returns `sum of loss over trained tokens / denominator`.

    With the same denominator everywhere, the sum of the results over all microbatches and data-parallel ranks is
    the mean over all trained tokens of the batch, so the gradient depends neither on packing nor on layout
    (token-level loss: DAPO, Yu et al. 2025, arXiv:2503.14476). Gradients are to be summed, not averaged,
    over ranks.

    Args:
        loss_T: float. loss_mask_T: bool; True on trained tokens.
        denominator: number of trained tokens of the whole batch, over all microbatches and data-parallel
            ranks.

    Raises:
        ContractError: the denominator is not positive.
    """
    if not denominator > 0:
        raise ContractError(
            Reason.NO_TRAINED_TOKEN,
            field="loss_mask",
            seen=f"denominator {denominator}",
            expected="at least one trained token in the batch",
            remedy="skip a batch that has nothing to train on before the forward pass",
        )
    return loss_T.masked_fill(~loss_mask_T, 0.0).sum() / denominator


def reduced(
    loss_T: Tensor, rows: PolicyRows, how: Literal["token_mean", "sequence_mean", "constant"], length: int | None
) -> Tensor:
    """Returns this rank's part of the loss of the batch; parts are added over microbatches and ranks.

    token_mean: `sum of loss / trained tokens`. sequence_mean: the mean over responses of the mean over their
    tokens (GRPO as first published, GSPO). constant: `sum of loss / (responses x length)`, so that a token weighs the
    same in every response and every batch (Dr. GRPO, arXiv:2503.20783). Tokens and responses are those of the whole
    batch.

    Raises:
        ContractError: nothing is trained.
    """
    match how:
        case "token_mean":
            return token_mean(loss_T, rows.loss_mask_T, rows.totals.num_tokens)
        case "sequence_mean":
            return token_mean(loss_T / rows.sequence_lengths(), rows.loss_mask_T, rows.totals.num_sequences)
        case "constant":
            return token_mean(loss_T, rows.loss_mask_T, rows.totals.num_sequences * (length or 0))
