"""The sampler of a device: as `moerl.rollout.sampler`, with shapes that do not depend on values.

Runs inside the embedded rollout engine if its model is on a device. No operation here makes the host wait, so a step
can be recorded (`moerl.rollout.recorded`); what was drawn stays on the device. Shape legend as there: N = rows, V =
vocabulary; W = `Kinds.width`, candidates of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.rollout.sampler import RowParams
from moerl.rollout.sampler_kernel import RELATIVE_ROUNDING, ROUNDING, Cuts, Draws

_LOW = 0xFFFFFFFF
"""The lower half of a rank: what is left of the vocabulary behind a token."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of rows in a step: all of their parameters that shapes and operations of the step depend on."""

    width: int
    """Candidates of a row with a finite top-k, a power of two or V; 0 if there is no such row."""
    any_open: bool
    """True if some row has the full vocabulary."""
    any_top_p: bool
    """True if some row has a top-p below 1."""

    @classmethod
    def of(cls, params: RowParams, vocab_size: int) -> Kinds:
        width = 1 << (params.max_top_k - 1).bit_length() if params.max_top_k else 0
        return cls(min(width, vocab_size), params.any_open, params.any_top_p)


def draw_rows(logits_NV: Tensor, cuts: Cuts[Tensor], uniforms_N: Tensor, kinds: Kinds) -> Draws[Tensor]:
    """Draws one token per row, by the semantics of `moerl.rollout.sampler`.

    Args:
        logits_NV: any float dtype [N, V]; computed on in float32.
        uniforms_N: float64 [N] in [0, 1).

    Returns:
        All that was drawn; kept ids, int32 [N * W], are 0 behind the last set.
    """
    # Without a negative zero, which would rank below zero.
    z_NV = logits_NV.float() / cuts.temperature[:, None] + 0.0
    log_z_N = z_NV.logsumexp(-1)
    if kinds.width == 0:
        return _draw_open(z_NV, log_z_N, uniforms_N)
    cut = _draw_cut(z_NV, log_z_N, cuts, uniforms_N, kinds)
    if not kinds.any_open:
        return cut
    uncut, is_open = _draw_open(z_NV, log_z_N, uniforms_N), cuts.top_k == 0
    return Draws(
        torch.where(is_open, uncut.token_ids, cut.token_ids),
        torch.where(is_open, uncut.rollout_logprobs, cut.rollout_logprobs),
        cut.kept_logmass.masked_fill(is_open, 0.0),
        log_z_N,
        cut.kept_sizes,
        cut.kept_ids,
    )


def _draw_open(z_NV: Tensor, log_z_N: Tensor, uniforms_N: Tensor) -> Draws[Tensor]:
    """Draws from the full vocabulary; nothing is listed."""
    cdf_NV = torch.exp(z_NV - log_z_N[:, None]).cumsum(-1, dtype=torch.float64)
    tokens_N1 = _columns(cdf_NV, uniforms_N)
    logprobs_N = z_NV.gather(1, tokens_N1)[:, 0] - log_z_N
    return Draws(
        tokens_N1[:, 0],
        logprobs_N.clamp(max=0.0),
        torch.zeros_like(log_z_N),
        log_z_N,
        torch.zeros_like(log_z_N, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int32, device=z_NV.device),
    )


def _draw_cut(z_NV: Tensor, log_z_N: Tensor, cuts: Cuts[Tensor], uniforms_N: Tensor, kinds: Kinds) -> Draws[Tensor]:
    """Draws from kept sets; of rows with an open vocabulary nothing is listed, and the rest is of no use."""
    num_vocab, width = z_NV.shape[1], kinds.width
    values_NW, ranked_NW = _ranked(z_NV, width)
    sizes_N = _kept_sizes(z_NV, values_NW, log_z_N, cuts, kinds)
    places_W = torch.arange(width, device=z_NV.device)
    kept_NW = places_W < sizes_N[:, None]
    ids_NW = torch.where(kept_NW, ranked_NW, num_vocab).sort(dim=-1).values
    z_NW = z_NV.gather(1, ids_NW.clamp(max=num_vocab - 1))
    # Relative to the largest logit: no weight is above 1, and the largest kept one is.
    relative_NW = torch.where(kept_NW, z_NW - values_NW[:, :1], -torch.inf).double()
    cdf_NW = relative_NW.exp().cumsum(-1)
    log_kept_N = cdf_NW[:, -1].log()
    columns_N1 = _columns(cdf_NW, uniforms_N)
    logprobs_N = (relative_NW.gather(1, columns_N1)[:, 0] - log_kept_N).float()
    # If everything was kept, both sums run over the same terms in another order: the mass is exactly one.
    nothing_lost = cuts.greedy | (sizes_N == num_vocab)
    logmass_N = (values_NW[:, 0] + log_kept_N - log_z_N).float().masked_fill(nothing_lost, 0.0)
    listed_N = sizes_N.masked_fill(cuts.top_k == 0, 0)
    return Draws(
        ids_NW.gather(1, columns_N1)[:, 0],
        logprobs_N.clamp(max=0.0).masked_fill(cuts.greedy, 0.0),
        _without_rounding(logmass_N, log_z_N),
        log_z_N,
        listed_N,
        _listed(ids_NW, listed_N),
    )


def _ranked(z_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Finds the `width` largest logits in descending order, equal ones by ascending id: float32 and int64 [N, W].

    The bits of a float order as an integer once those of negative numbers are turned round. Behind them stands how far
    the id is from the end of the vocabulary, so that no two ranks are equal.
    """
    bits_NV = z_NV.view(torch.int32)
    order_NV = bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)
    behind_V = torch.arange(z_NV.shape[1] - 1, -1, -1, device=z_NV.device)
    ranks_NW = ((order_NV.long() << 32) | behind_V).topk(width, dim=-1).values
    ids_NW = z_NV.shape[1] - 1 - (ranks_NW & _LOW)
    return z_NV.gather(1, ids_NW), ids_NW


def _kept_sizes(z_NV: Tensor, values_NW: Tensor, log_z_N: Tensor, cuts: Cuts[Tensor], kinds: Kinds) -> Tensor:
    """Counts the largest tokens that stay: int64 [N], at least 1. Every rule keeps a prefix of the ranking."""
    weights_NW = (values_NW - values_NW[:, :1].double()).exp()
    rank_W = torch.arange(kinds.width, device=z_NV.device)
    keep_NW = rank_W < cuts.top_k[:, None]
    keep_NW = keep_NW & (weights_NW >= cuts.min_p[:, None])
    # Ids whose probability is 0 in float32 are never drawn.
    keep_NW = keep_NW & (torch.exp(values_NW - log_z_N[:, None]) > 0)
    if kinds.any_top_p:
        before_NW = weights_NW.cumsum(-1) - weights_NW
        allowed_N1 = cuts.top_p[:, None] * _total_weight(z_NV, values_NW, weights_NW)
        # No sum is compared if top_p is 1: rounding would cut off the tail.
        keep_NW = keep_NW & ((before_NW <= allowed_N1) | (cuts.top_p[:, None] >= 1.0))
    return keep_NW.sum(-1).clamp(min=1)


def _total_weight(z_NV: Tensor, values_NW: Tensor, weights_NW: Tensor) -> Tensor:
    """Sums exp(z - max z) over the vocabulary: float64 [N, 1]; to 1e-7 of what lies outside of the candidates."""
    total_N1 = weights_NW.sum(-1, keepdim=True)
    if values_NW.shape[1] == z_NV.shape[1]:
        return total_N1
    largest_N1 = values_NW[:, :1]
    sums = [(z - largest_N1).exp().sum(-1, keepdim=True, dtype=torch.float64) for z in (z_NV, values_NW)]
    return total_N1 + (sums[0] - sums[1]).clamp(min=0.0)


def _columns(cdf_NM: Tensor, uniforms_N: Tensor) -> Tensor:
    """Finds the column of the draw, int64 [N, 1]: the first whose cumulated weight (float64) exceeds u * total.

    u is at most 1 - 2**-53, so u * total rounds to less than total: the draw never goes past the last weight, unless
    the row is broken; such a row must not read outside of its memory either.
    """
    targets_N1 = (uniforms_N * cdf_NM[:, -1])[:, None]
    return torch.searchsorted(cdf_NM, targets_N1, right=True).clamp(max=cdf_NM.shape[1] - 1)


def _listed(ids_NW: Tensor, sizes_N: Tensor) -> Tensor:
    """Lists the first `sizes_N` ids of every row, one row after the other: int32 [N * W], 0 behind the last one."""
    num_rows, width = ids_NW.shape
    places_W = torch.arange(width, device=ids_NW.device)
    starts_N = sizes_N.cumsum(0) - sizes_N
    # What is not kept goes to one place behind the list.
    targets_NW = torch.where(places_W < sizes_N[:, None], starts_N[:, None] + places_W, num_rows * width)
    flat = torch.zeros(num_rows * width + 1, dtype=torch.int32, device=ids_NW.device)
    flat.scatter_(0, targets_NW.flatten(), ids_NW.flatten().int())
    return flat[:-1]


def _without_rounding(logs: Tensor, terms: Tensor) -> Tensor:
    """Replaces differences of float32 numbers of the size of `terms` that lie above 0 by no more than rounding by 0;
    larger ones are left for the contract to refuse."""
    bounds = (RELATIVE_ROUNDING * terms.abs()).clamp(min=ROUNDING)
    return torch.where((logs > 0) & (logs <= bounds), torch.zeros_like(logs), logs)
