"""Rows of a microbatch for tests of algorithms alone, without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor

from moerl.algorithms.group_policy import GroupPolicy
from moerl.algorithms.policy import PolicyLoss, PolicyRows, RewardedBatch, SampledTokens, Sequences
from moerl.algorithms.registry import AlgorithmConfig
from moerl.contract.batch import BatchTotals

FOLDER = Path(__file__).parents[1] / "configs" / "algorithm"
PRESETS = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "custom")
LONGEST = 12
"""Tokens of the longest response, in presets that ask for it."""


def preset(name: str, **changes: Any) -> GroupPolicy:
    """An algorithm with the values of its file, and these changes."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").replace("${rollout.max_new_tokens}", str(LONGEST))
    values = yaml.safe_load(text.replace("overlong_buffer: 16", "overlong_buffer: 4"))
    algorithm = TypeAdapter(AlgorithmConfig).validate_python(values | changes)
    algorithm.check(group_size=8, minibatches=4)
    assert isinstance(algorithm, GroupPolicy)
    return algorithm


def rewarded_batch(rewards: Sequence[float], groups: Sequence[int], num_tokens: Sequence[int]) -> RewardedBatch:
    """Rollouts of one agent and one turn each, every one an episode."""
    size, num_sampled = len(rewards), sum(num_tokens)
    return RewardedBatch(
        rewards_B=torch.tensor(rewards),
        group_index_B=torch.tensor(groups),
        episode_index_B=torch.arange(size),
        num_tokens_B=torch.tensor(num_tokens),
        truncated_B=torch.zeros(size, dtype=torch.bool),
        agent_index_B=torch.zeros(size, dtype=torch.int64),
        turn_index_N=torch.zeros(num_sampled, dtype=torch.int64),
        turn_rewards_N=torch.zeros(num_sampled),
    )


def grpo(**changes: Any) -> GroupPolicy:
    """GRPO with the values that it has when nothing else is said, and these changes."""
    return preset("grpo", **changes)


def policy_rows(trainer_T: Tensor, *, lengths: Sequence[int] | None = None, **given: Tensor) -> PolicyRows:
    """One microbatch that is the whole batch: zeros for what is not given, and every row trained.

    Args:
        lengths: rows of each sequence; one sequence where not given.
        given: proximal_T, rollout_T, advantages_T, mask_T, entropy_T, kl_T, draws_T.
    """
    zeros_T = torch.zeros_like(trainer_T.detach())
    mask_T = given.get("mask_T", torch.ones(len(trainer_T), dtype=torch.bool))
    num_rows_N = torch.tensor([len(trainer_T)] if lengths is None else list(lengths))
    sequences, rollout_T = Sequences(num_rows_N), given.get("rollout_T", zeros_T)
    tokens = SampledTokens(given.get("advantages_T", zeros_T)[mask_T].detach(), rollout_T[mask_T].detach())
    even_T = torch.rand(len(mask_T), generator=torch.Generator().manual_seed(len(mask_T)))
    return PolicyRows(
        trainer_logprobs_T=trainer_T,
        proximal_logprobs_T=given.get("proximal_T", zeros_T),
        rollout_logprobs_T=rollout_T,
        advantages_T=given.get("advantages_T", zeros_T),
        loss_mask_T=mask_T,
        entropy_T=given.get("entropy_T", zeros_T),
        sequences=sequences,
        totals=BatchTotals(
            float(mask_T.sum()), float(len(sequence_of_rows(sequences)[mask_T].unique())), facts_of_presets(tokens)
        ),
        draws_T=given.get("draws_T", even_T),
        kl_T=given.get("kl_T"),
    )


def sequence_of_rows(sequences: Sequences) -> Tensor:
    """Returns the number of each row's sequence in the microbatch: int64 [T]."""
    return torch.arange(len(sequences.num_rows_N)).repeat_interleave(sequences.num_rows_N)


def facts_of_presets(tokens: SampledTokens, **changes: Any) -> dict[str, float]:
    """Returns the facts of the batch that the presets clip_cov and kl_cov compute from these tokens."""
    return {
        key: value
        for name in ("clip_cov", "kl_cov")
        for key, value in preset(name, **changes).batch_facts(tokens).items()
    }


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
