"""The sampling distribution of the embedded engine: kept sets, draws and log-probs, as pure tensor functions.

Runs wherever the embedded rollout engine runs. Shape legend: N = rows (sequences) of one step, V = vocabulary,
C = candidates, the largest logits of a row in descending order, M = the largest kept set of the step.

For one row with logits z, temperature T and p = softmax(z / T), the semantics are those of SGLang's torch path:

1. top-k and top-p are applied *jointly* to p: a token stays where its rank is below top_k and the mass of the
   tokens ranked before it does not exceed top_p, which is compared in float64, and not at all where top_p is 1;
2. then a token stays where p >= min_p * max(p);
3. what is left, S = {w > 0}, is renormalised, and the token is drawn from it.

Equal logits are ranked by ascending token id, so a kept set does not depend on how a sort breaks ties. The draw is
the inverse distribution function over S in ascending token id at a uniform number that depends on the request's
seed and the token's position alone: neither batchmates nor scheduling change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.routing import mix
from moerl.contract.trajectory import SamplingParams
from moerl.errors import EngineError
from moerl.rollout.sampler_kernel import RELATIVE_ROUNDING, ROUNDING, Cuts, Draws, sample_rows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of N rows.

    temperature: float32 [N]. top_p, min_p: float64 [N] (greedy rows hold temperature 1, top_p 1 and top_k 1).
    top_k: int64 [N], 0 where the full vocabulary is open. greedy: bool [N]. max_top_k: the largest top_k. any_open:
    some row has top_k 0. any_top_p: some row has a top_p below 1.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    greedy: Tensor
    max_top_k: int
    any_open: bool
    any_top_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        """One row per element of `params`."""
        top_k = [1 if p.is_greedy else (p.effective_top_k or 0) for p in params]
        temperature = [1.0 if p.is_greedy else p.temperature for p in params]
        top_p = [1.0 if p.is_greedy else p.top_p for p in params]
        min_p = [0.0 if p.is_greedy else p.min_p for p in params]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float64, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            greedy=torch.tensor([p.is_greedy for p in params], dtype=torch.bool, device=device),
            max_top_k=max(top_k),
            any_open=min(top_k) == 0,
            any_top_p=min(top_p) < 1.0,
        )

    def rows(self, index: Tensor) -> RowParams:
        """The named rows (int64 or bool index), with the bounds of all of them."""
        return RowParams(
            self.temperature[index],
            self.top_p[index],
            self.min_p[index],
            self.top_k[index],
            self.greedy[index],
            self.max_top_k,
            self.any_open,
            self.any_top_p,
        )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step sampled.

    token_ids: int64 [N]. rollout_logprobs, kept_logmass: float32 [N], nats, as in the data contract (both 0 for a
    greedy row). truncated: bool [N]. kept_ids: int32 [nnz], the kept sets of the truncated rows one after the
    other, ascending within a row; kept_sizes: int64 [N], 0 where nothing was cut. Without capture the last three
    are empty, and kept_logmass is 0.
    """

    token_ids: Tensor
    rollout_logprobs: Tensor
    kept_logmass: Tensor
    truncated: Tensor
    kept_ids: Tensor
    kept_sizes: Tensor


def seeded_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per row: 53 bits of splitmix64 keyed by seed, counted by position.

    Args:
        seeds: uint64 [N], the seeds of the requests.
        positions: int64 [N], index in its trajectory of the token to be drawn.
    """
    counter = positions.astype(np.uint64) + np.uint64(1)
    bits = mix(mix(seeds + _GOLDEN) + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits_NV: Tensor, params: RowParams, uniforms_N: NDArray[np.float64], *, capture: bool = True
) -> SamplerOutput:
    """Draws one token per row.

    Args:
        logits_NV: any float dtype [N, V]; computed on in float32.
        params: of the same N rows.
        uniforms_N: float64 [N] in [0, 1), from `seeded_uniforms`.
        capture: list the kept sets. The draws are the same without.

    Raises:
        EngineError: A row of logits has no finite normaliser (NaN or +inf, or nothing but -inf).
    """
    u_N = torch.from_numpy(uniforms_N).to(logits_NV.device)
    if not params.any_open:
        return _sample_cut(logits_NV, params, u_N, capture)
    if params.max_top_k == 0:
        return _sample_open(logits_NV, params, u_N)
    is_open = params.top_k == 0
    cut = (~is_open).nonzero()[:, 0]
    uncut = is_open.nonzero()[:, 0]
    if len(cut) == 0:
        return _sample_open(logits_NV, params, u_N)
    if len(uncut) == 0:
        return _sample_cut(logits_NV, params, u_N, capture)
    return _join(
        _sample_cut(logits_NV[cut], params.rows(cut), u_N[cut], capture),
        _sample_open(logits_NV[uncut], params.rows(uncut), u_N[uncut]),
        torch.argsort(torch.cat([cut, uncut])),
    )


def _tempered(logits_NV: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Logits float32 [N, V] over their temperature, and their normaliser, the log of the sum of their exponentials."""
    z_NV = logits_NV.float() / params.temperature[:, None]
    log_z_N = torch.logsumexp(z_NV, dim=-1)
    _require_finite(log_z_N)
    return z_NV, log_z_N


def _sample_open(logits_NV: Tensor, params: RowParams, u_N: Tensor) -> SamplerOutput:
    """Rows with the full vocabulary: nothing is listed."""
    z_NV, log_z_N = _tempered(logits_NV, params)
    token_ids = _draw(torch.exp(z_NV - log_z_N[:, None]).cumsum(-1, dtype=torch.float64), u_N)
    logprobs = z_NV.gather(1, token_ids[:, None])[:, 0] - log_z_N
    return SamplerOutput(
        token_ids=token_ids,
        rollout_logprobs=logprobs.clamp_(max=0.0),
        kept_logmass=torch.zeros_like(log_z_N),
        truncated=torch.zeros_like(token_ids, dtype=torch.bool),
        kept_ids=torch.zeros(0, dtype=torch.int32, device=z_NV.device),
        kept_sizes=torch.zeros_like(token_ids),
    )


def _sample_cut(logits_NV: Tensor, params: RowParams, u_N: Tensor, capture: bool) -> SamplerOutput:
    """Rows with a finite top-k."""
    on = _sample_cut_on_host if logits_NV.device.type == "cpu" else _sample_cut_on_device
    return on(logits_NV, params, u_N, capture)


def _sample_cut_on_host(logits_NV: Tensor, params: RowParams, u_N: Tensor, capture: bool) -> SamplerOutput:
    num_rows, num_vocab = logits_NV.shape
    token_ids, sizes_N = (torch.empty(num_rows, dtype=torch.int64) for _ in range(2))
    logprobs, kept_logmass, log_z_N = (torch.empty(num_rows) for _ in range(3))
    kept_ids = torch.empty(num_rows * min(params.max_top_k, num_vocab), dtype=torch.int32)
    asked = (params.temperature, params.top_p, params.min_p, params.top_k, params.greedy)
    cuts = Cuts(*(each.numpy() for each in asked))
    made = (token_ids, logprobs, kept_logmass, log_z_N, sizes_N, kept_ids)
    draws = Draws(*(each.numpy() for each in made))
    num_kept = sample_rows(logits_NV.float().contiguous().numpy(), cuts, u_N.numpy(), draws)
    if not np.isfinite(draws.log_z).all():
        _require_finite(log_z_N)
    if not capture:
        kept_logmass, sizes_N, num_kept = torch.zeros_like(kept_logmass), torch.zeros_like(sizes_N), 0
    return SamplerOutput(
        token_ids=token_ids,
        rollout_logprobs=logprobs,
        kept_logmass=kept_logmass,
        truncated=torch.full_like(params.greedy, capture),
        kept_ids=kept_ids[:num_kept],
        kept_sizes=sizes_N,
    )


def _sample_cut_on_device(logits_NV: Tensor, params: RowParams, u_N: Tensor, capture: bool) -> SamplerOutput:
    """Only the largest max_top_k logits (and one more, to see ties) are looked at."""
    z_NV, log_z_N = _tempered(logits_NV, params)
    num_vocab = z_NV.shape[1]
    values_NC, ids_NC = z_NV.topk(min(params.max_top_k + 1, num_vocab), dim=-1)
    sizes_N = _kept_sizes(z_NV, values_NC, log_z_N, params)
    width = int(sizes_N.max())
    kept_NM = torch.arange(width, device=z_NV.device)[None, :] < sizes_N[:, None]
    ids_NM = torch.where(kept_NM, ids_NC[:, :width], num_vocab)
    _break_ties(z_NV, values_NC, sizes_N, ids_NM)
    ids_NM = ids_NM.sort(dim=-1).values
    z_NM = z_NV.gather(1, ids_NM.clamp(max=num_vocab - 1))
    # Relative to the largest logit: no weight is above 1, and the largest kept one is.
    relative_NM = torch.where(kept_NM, z_NM - values_NC[:, :1], -torch.inf).double()
    # A running sum, whose last number does not depend on how wide the widest kept set of the step is.
    cdf_NM = relative_NM.exp().cumsum(-1)
    log_kept_N = cdf_NM[:, -1].log()
    columns = _draw(cdf_NM, u_N)[:, None]
    logprobs = (relative_NM.gather(1, columns)[:, 0] - log_kept_N).float()
    if capture:
        # Where everything was kept, both sums run over the same terms in another order: the mass is exactly one.
        nothing_lost = params.greedy | (sizes_N == num_vocab)
        kept_logmass = (values_NC[:, 0] + log_kept_N - log_z_N).float().masked_fill_(nothing_lost, 0.0)
        kept_ids = ids_NM[kept_NM].to(torch.int32)
    else:
        kept_logmass = torch.zeros_like(log_z_N)
        kept_ids = torch.zeros(0, dtype=torch.int32, device=z_NV.device)
    return SamplerOutput(
        token_ids=ids_NM.gather(1, columns)[:, 0],
        rollout_logprobs=logprobs.clamp_(max=0.0).masked_fill_(params.greedy, 0.0),
        kept_logmass=_clamp_rounding(kept_logmass, log_z_N),
        truncated=torch.full_like(params.greedy, capture),
        kept_ids=kept_ids,
        kept_sizes=sizes_N if capture else torch.zeros_like(sizes_N),
    )


def _kept_sizes(z_NV: Tensor, values_NC: Tensor, log_z_N: Tensor, params: RowParams) -> Tensor:
    """How many of the largest tokens stay: int64 [N], at least 1. Every rule keeps a prefix of the ranking."""
    num_vocab = z_NV.shape[1]
    weights_NC = (values_NC - values_NC[:, :1].double()).exp()
    rank_C = torch.arange(values_NC.shape[1], device=values_NC.device)
    keep_NC = rank_C[None, :] < params.top_k[:, None].clamp(max=num_vocab)
    keep_NC &= weights_NC >= params.min_p[:, None]
    # Ids whose probability is 0 in float32 are never drawn.
    keep_NC &= torch.exp(values_NC - log_z_N[:, None]) > 0
    if params.any_top_p:
        before_NC = weights_NC.cumsum(-1) - weights_NC
        allowed_N1 = params.top_p[:, None] * _total_weight(z_NV, values_NC, weights_NC)
        # No sum is compared where top_p is 1: whatever rounding made of it would cut off the tail.
        keep_NC &= (before_NC <= allowed_N1) | (params.top_p[:, None] >= 1.0)
    return keep_NC.sum(-1).clamp_(min=1)


def _total_weight(z_NV: Tensor, values_NC: Tensor, weights_NC: Tensor) -> Tensor:
    """float64 [N, 1]: sum over the vocabulary of exp(z - max z); to 1e-7 of what lies outside of the candidates."""
    total_N1 = weights_NC.sum(-1, keepdim=True)
    if values_NC.shape[1] == z_NV.shape[1]:
        return total_N1
    largest_N1 = values_NC[:, :1]
    sums = [(z - largest_N1).exp().sum(-1, keepdim=True, dtype=torch.float64) for z in (z_NV, values_NC)]
    return total_N1 + (sums[0] - sums[1]).clamp_(min=0.0)


def _break_ties(z_NV: Tensor, values_NC: Tensor, sizes_N: Tensor, ids_NM: Tensor) -> None:
    """Where the last kept logit equals the first dropped one, keeps the smaller token ids (in place, in ids_NM).

    topk leaves the choice among equals open. The kept set of such a row is: all ids above the threshold value, and
    the smallest ids at it.
    """
    num_vocab = z_NV.shape[1]
    threshold_N = values_NC.gather(1, sizes_N[:, None] - 1)[:, 0]
    next_N = values_NC.gather(1, sizes_N[:, None].clamp(max=values_NC.shape[1] - 1))[:, 0]
    tied = ((threshold_N == next_N) & (sizes_N < num_vocab)).nonzero()[:, 0]
    if len(tied) == 0:
        return
    z_TV, threshold_T, sizes_T = z_NV[tied], threshold_N[tied, None], sizes_N[tied]
    above_TV = z_TV > threshold_T
    at_TV = z_TV == threshold_T
    room_T = sizes_T - above_TV.sum(-1)
    chosen_TV = above_TV | (at_TV & (at_TV.cumsum(-1) <= room_T[:, None]))
    row_T, id_T = chosen_TV.nonzero(as_tuple=True)
    starts_T = sizes_T.cumsum(0) - sizes_T
    column_T = torch.arange(len(row_T), device=z_NV.device) - starts_T[row_T]
    ids_NM[tied[row_T], column_T] = id_T


def _draw(cdf_NM: Tensor, u_N: Tensor) -> Tensor:
    """Column of the draw, int64 [N]: the first whose cumulated weight (float64) exceeds u * total; its own weight is
    above 0."""
    # u is at most 1 - 2**-53, so in float64 u * total rounds to less than total: never past the last weight.
    target_N = u_N * cdf_NM[:, -1]
    return torch.searchsorted(cdf_NM, target_N[:, None], right=True)[:, 0]


def _clamp_rounding(logs: Tensor, terms: Tensor) -> Tensor:
    """Differences of float32 numbers of the size of `terms` that lie above 0 by no more than rounding become 0; larger
    ones are left for the contract to refuse."""
    bounds = (RELATIVE_ROUNDING * terms.abs()).clamp_(min=ROUNDING)
    return torch.where((logs > 0) & (logs <= bounds), torch.zeros_like(logs), logs)


def _join(cut: SamplerOutput, uncut: SamplerOutput, order: Tensor) -> SamplerOutput:
    """Rows of both parts, back in the order of the batch. Open rows list nothing, so kept_ids keep their order."""
    return SamplerOutput(
        token_ids=torch.cat([cut.token_ids, uncut.token_ids])[order],
        rollout_logprobs=torch.cat([cut.rollout_logprobs, uncut.rollout_logprobs])[order],
        kept_logmass=torch.cat([cut.kept_logmass, uncut.kept_logmass])[order],
        truncated=torch.cat([cut.truncated, uncut.truncated])[order],
        kept_ids=cut.kept_ids,
        kept_sizes=torch.cat([cut.kept_sizes, uncut.kept_sizes])[order],
    )


def _require_finite(log_z_N: Tensor) -> None:
    broken = (~torch.isfinite(log_z_N)).nonzero()[:, 0]
    if len(broken):
        raise EngineError(
            "sampler: logits without a finite normaliser",
            seen=f"rows {broken[:8].tolist()} of {len(log_z_N)}",
            expected="finite logits",
            remedy="the weights are broken (NaN or infinite); reload them and look at the last update",
        )
