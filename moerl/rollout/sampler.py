"""The sampling distribution of the embedded engine: kept sets, draws and log-probs, as pure tensor functions.

Runs inside the embedded rollout engine, on the host. Shape legend: N = rows (sequences) of one step, V = vocabulary,
M = columns that are drawn from.

For one row with logits z, temperature T and p = softmax(z / T), the semantics are those of SGLang's torch path:

1. top-k and top-p are applied *jointly* to p: a token stays if its rank is below top_k and the mass of the
   tokens ranked before it does not exceed top_p, which is compared in float64, and not at all if top_p is 1;
2. then a token stays if p >= min_p * max(p);
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
from moerl.rollout.sampler_kernel import Cuts, Draws, sample_rows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of N rows."""

    temperature: Tensor
    """float32 [N]; 1 for a greedy row."""
    top_p: Tensor
    """float64 [N]; 1 for a greedy row."""
    min_p: Tensor
    """float64 [N]; 0 for a greedy row."""
    top_k: Tensor
    """int64 [N]; 0 if the full vocabulary is open, 1 for a greedy row."""
    greedy: Tensor
    """bool [N]."""
    max_top_k: int
    """The largest top_k, of these rows or of the rows that they were chosen from."""
    any_open: bool
    """True if some row has top_k 0, of the same rows as `max_top_k`."""
    any_top_p: bool
    """True if some row has a top_p below 1, of the same rows as `max_top_k`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> RowParams:
        """Makes one row per element of `params`."""
        top_k = [1 if p.is_greedy else (p.effective_top_k or 0) for p in params]
        temperature = [1.0 if p.is_greedy else p.temperature for p in params]
        top_p = [1.0 if p.is_greedy else p.top_p for p in params]
        min_p = [0.0 if p.is_greedy else p.min_p for p in params]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32),
            top_p=torch.tensor(top_p, dtype=torch.float64),
            min_p=torch.tensor(min_p, dtype=torch.float64),
            top_k=torch.tensor(top_k, dtype=torch.int64),
            greedy=torch.tensor([p.is_greedy for p in params], dtype=torch.bool),
            max_top_k=max(top_k),
            any_open=min(top_k) == 0,
            any_top_p=min(top_p) < 1.0,
        )

    def rows(self, index: Tensor) -> RowParams:
        """Returns the named rows (int64 or bool index), with the bounds of all of them."""
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
    """Samples of one step. Without capture no row is truncated."""

    token_ids: Tensor
    """int64 [N]."""
    rollout_logprobs: Tensor
    """float32 [N], nats, as in the data contract; 0 for a greedy row."""
    kept_logmass: Tensor
    """float32 [N], nats, as in the data contract; 0 for a greedy row, and without capture."""
    truncated: Tensor
    """bool [N]."""
    kept_ids: Tensor
    """int32 [nnz]; kept sets of the truncated rows one after the other, ascending within a row."""
    kept_sizes: Tensor
    """int64 [N]; 0 if nothing was cut, and without capture."""


def seeded_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Makes uniform numbers in [0, 1), one per row: 53 bits of splitmix64 keyed by seed, counted by position.

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
    """Draws one token per row, on a CPU (elsewhere: `moerl.rollout.device_sampler`).

    Args:
        logits_NV: any float dtype [N, V]; computed on in float32.
        params: of the same N rows.
        uniforms_N: float64 [N] in [0, 1), from `seeded_uniforms`.
        capture: list the kept sets. The draws are the same without.

    Raises:
        EngineError: A row of logits has no finite normaliser (NaN or +inf, or nothing but -inf).
    """
    u_N = torch.from_numpy(uniforms_N)
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
    """Returns logits, float32 [N, V], over their temperature, and their normaliser, the log of the sum of their
    exponentials."""
    z_NV = logits_NV.float() / params.temperature[:, None]
    log_z_N = torch.logsumexp(z_NV, dim=-1)
    require_finite(log_z_N)
    return z_NV, log_z_N


def _sample_open(logits_NV: Tensor, params: RowParams, u_N: Tensor) -> SamplerOutput:
    """Samples rows with the full vocabulary: nothing is listed."""
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
    """Samples rows with a finite top-k."""
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
        require_finite(log_z_N)
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


def _draw(cdf_NM: Tensor, u_N: Tensor) -> Tensor:
    """Returns the column of the draw, int64 [N]: the first whose cumulated weight (float64) exceeds u * total; its own
    weight is above 0."""
    # u is at most 1 - 2**-53, so in float64 u * total rounds to less than total: never past the last weight.
    target_N = u_N * cdf_NM[:, -1]
    return torch.searchsorted(cdf_NM, target_N[:, None], right=True)[:, 0]


def _join(cut: SamplerOutput, uncut: SamplerOutput, order: Tensor) -> SamplerOutput:
    """Puts rows of both parts back in the order of the batch. Open rows list nothing, so kept_ids keep their order."""
    return SamplerOutput(
        token_ids=torch.cat([cut.token_ids, uncut.token_ids])[order],
        rollout_logprobs=torch.cat([cut.rollout_logprobs, uncut.rollout_logprobs])[order],
        kept_logmass=torch.cat([cut.kept_logmass, uncut.kept_logmass])[order],
        truncated=torch.cat([cut.truncated, uncut.truncated])[order],
        kept_ids=cut.kept_ids,
        kept_sizes=torch.cat([cut.kept_sizes, uncut.kept_sizes])[order],
    )


def require_finite(log_z_N: Tensor) -> None:
    """Raises `EngineError` if a normaliser of N rows is not finite."""
    broken = (~torch.isfinite(log_z_N)).nonzero()[:, 0]
    if len(broken):
        raise EngineError(
            "sampler: logits without a finite normaliser",
            seen=f"rows {broken[:8].tolist()} of {len(log_z_N)}",
            expected="finite logits",
            remedy="the weights are broken (NaN or infinite); reload them and look at the last update",
        )
