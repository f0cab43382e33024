"""The score that training uses: log-probs under the distribution each token was really drawn from.

Runs in trainer processes. Rows that list a kept set are renormalised over the listed ids, which costs one
gather of those logits and no [T, V] tensor forward; rows without a list are scored over the whole
vocabulary, in chunks.
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.kernels.checks import check_listed, check_temperatures
from moerl.kernels.full import score_full
from moerl.kernels.kept import KeptRows, segment_log_softmax, segment_sum
from moerl.kernels.vocab_parallel import VocabShard, check_logits, compute_dtype, gather_kept_logits


@dataclass(frozen=True, slots=True, eq=False)
class SupportScores:
    """Scores under the support each token was drawn from; 0 on rows not selected.

    logprobs_T: float32 [T], nats, differentiable; log-prob of the target.
    entropy_T: float32 [T], nats, without gradient; entropy of the support's distribution.
    kept_logprobs: float32 [N], nats, differentiable; log-prob of every listed id (for `kl_kept`).
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    kept_logprobs: Tensor


def score_support(
    logits_TVp: Tensor,
    target_ids_T: Tensor,
    kept: KeptRows,
    temperatures_T: Tensor,
    shard: VocabShard,
    select_T: Tensor | None = None,
) -> SupportScores:
    """Log-prob of each target under the distribution it was drawn from, with gradients.

    With `z = logits / temperature`: `z_a - logsumexp(z[kept])` on rows that list a kept set,
    `z_a - logsumexp(z)` over the whole vocabulary on the others.

    Args:
        logits_TVp: this rank's logits, any float dtype; not written to.
        target_ids_T: int64 global ids.
        kept: the kept sets of the same rows.
        temperatures_T: float, > 0 on scored rows.
        shard: the columns this rank holds.
        select_T: bool; rows to score (the sampled ones). All where None.

    Raises:
        ContractError: shapes disagree, a listed id or target lies outside the vocabulary, a listed set does
            not hold its target exactly once, or a scored row's temperature is not positive.
    """
    check_logits(logits_TVp, shard, target_ids=target_ids_T, temperatures=temperatures_T, kept=kept.truncated)
    open_T = ~kept.truncated
    entries = None
    if select_T is not None:
        check_logits(logits_TVp, shard, select=select_T)
        open_T = open_T & select_T
        entries = select_T[kept.rows].nonzero().flatten()
    open_R = open_T.nonzero().flatten()
    num_listed = len(kept.rows) if entries is None else len(entries)
    if num_listed or not len(open_R):
        # Also with nothing to score: the result must hang on the logits for backward to run on every rank.
        scores = _score_listed(logits_TVp, target_ids_T, kept, temperatures_T, shard, entries)
    else:
        zeros_T = logits_TVp.new_zeros(len(logits_TVp), dtype=compute_dtype(logits_TVp))
        scores = SupportScores(zeros_T, zeros_T, zeros_T.new_zeros(len(kept.rows)))
    if not len(open_R):
        return scores
    full = score_full(logits_TVp, target_ids_T, temperatures_T, shard, rows_R=open_R)
    return SupportScores(
        scores.logprobs_T.index_add(0, open_R, full.logprobs_T),
        scores.entropy_T.index_add(0, open_R, full.entropy_T),
        scores.kept_logprobs,
    )


def _score_listed(
    logits_TVp: Tensor,
    target_ids_T: Tensor,
    kept: KeptRows,
    temperatures_T: Tensor,
    shard: VocabShard,
    entries: Tensor | None,
) -> SupportScores:
    """Scores of listed rows; `entries`: positions among the N listed ids to look at (all where None)."""
    rows, ids = (kept.rows, kept.ids) if entries is None else (kept.rows[entries], kept.ids[entries])
    is_target = ids == target_ids_T[rows]
    check_listed(rows, ids, is_target, kept, shard.vocab_size)
    temperatures = temperatures_T[rows]
    check_temperatures(temperatures)
    z = gather_kept_logits(logits_TVp, rows, ids, shard)
    logprobs = segment_log_softmax(z / temperatures.to(z.dtype), rows, kept.num_rows)
    target_logprobs_T = segment_sum(logprobs.masked_fill(~is_target, 0), rows, kept.num_rows)
    with torch.no_grad():
        entropy_T = -segment_sum(logprobs.exp() * logprobs, rows, kept.num_rows)
    if entries is not None:
        logprobs = logprobs.new_zeros(len(kept.rows)).index_add(0, entries, logprobs)
    return SupportScores(target_logprobs_T, entropy_T, logprobs)
