"""Rows of a microbatch for tests of algorithms alone, without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from moerl.algorithms.grpo import GRPO
from moerl.algorithms.policy import PolicyLoss, PolicyRows
from moerl.algorithms.sequences import Sequences
from moerl.contract.batch import BatchTotals

GRPO_VALUES = Path(__file__).parents[1] / "configs" / "algorithm" / "grpo.yaml"


def grpo(**changes: Any) -> GRPO:
    """GRPO with the values that it has when nothing else is said, and these changes."""
    return GRPO.model_validate(yaml.safe_load(GRPO_VALUES.read_text(encoding="utf-8")) | changes)


def policy_rows(trainer_T: Tensor, *, lengths: Sequence[int] | None = None, **given: Tensor) -> PolicyRows:
    """One microbatch that is the whole batch: zeros for what is not given, and every row trained.

    Args:
        lengths: rows of each sequence; one sequence where not given.
        given: proximal_T, rollout_T, advantages_T, mask_T, entropy_T, kl_T.
    """
    zeros_T = torch.zeros_like(trainer_T.detach())
    mask_T = given.get("mask_T", torch.ones(len(trainer_T), dtype=torch.bool))
    num_rows_N = torch.tensor([len(trainer_T)] if lengths is None else list(lengths))
    sequences = Sequences(num_rows_N)
    return PolicyRows(
        trainer_logprobs_T=trainer_T,
        proximal_logprobs_T=given.get("proximal_T", zeros_T),
        rollout_logprobs_T=given.get("rollout_T", zeros_T),
        advantages_T=given.get("advantages_T", zeros_T),
        loss_mask_T=mask_T,
        entropy_T=given.get("entropy_T", zeros_T),
        sequences=sequences,
        totals=BatchTotals(float(mask_T.sum()), float(len(sequences.row_ids()[mask_T].unique()))),
        kl_T=given.get("kl_T"),
    )


class SequenceObjective:
    """A loss that couples all tokens of a sequence: the mean over sequences of `exp(mean log-ratio)^2 mean(A)`.

    Reported as `losses_T`: for each row the sum of the log-ratios of its sequence.
    """

    reference_kl = None

    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        totals_T = rows.sequence_sum(rows.trainer_logprobs_T - rows.proximal_logprobs_T)
        lengths_T = rows.sequence_lengths()
        terms_T = (2.0 * totals_T / lengths_T).exp() * rows.advantages_T / lengths_T
        loss = terms_T.masked_fill(~rows.loss_mask_T, 0.0).sum() / rows.totals.num_sequences
        return PolicyLoss(loss, losses_T=totals_T)
