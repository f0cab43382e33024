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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.routing import mix
from moerl.contract.trajectory import SamplingParams
from moerl.errors import EngineError
from moerl.rollout.sampler_kernel import Cuts, Draws, StepResult, sample_rows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of N rows."""

    cuts: Cuts[NDArray[Any]]
    """Parameters of each row."""
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
        cuts = Cuts(
            temperature=np.array(temperature, np.float32),
            top_p=np.array(top_p, np.float64),
            min_p=np.array(min_p, np.float64),
            top_k=np.array(top_k, np.int64),
            greedy=np.array([p.is_greedy for p in params], np.bool_),
        )
        return cls(cuts, max_top_k=max(top_k), any_open=min(top_k) == 0, any_top_p=min(top_p) < 1.0)

    def rows(self, index: NDArray[np.int64]) -> RowParams:
        """Returns the named rows, with the bounds of all of them."""
        return replace(self, cuts=Cuts(*(each[index] for each in self.cuts)))


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
) -> StepResult:
    """Draws one token per row, on a CPU (elsewhere: `moerl.rollout.device_sampler`).

    Args:
        logits_NV: any float dtype [N, V]; computed on in float32.
        params: of the same N rows.
        uniforms_N: float64 [N] in [0, 1), from `seeded_uniforms`.
        capture: list the kept sets. The draws are the same without.

    Raises:
        EngineError: A row of logits has no finite normaliser (NaN or +inf, or nothing but -inf).
    """
    if not params.any_open:
        return _sample_cut(logits_NV, params, uniforms_N, capture)
    if params.max_top_k == 0:
        return _sample_open(logits_NV, params, uniforms_N)
    is_open = params.cuts.top_k == 0
    cut, uncut = np.flatnonzero(~is_open), np.flatnonzero(is_open)
    of_cut = _sample_cut(logits_NV[cut], params.rows(cut), uniforms_N[cut], capture)
    of_open = _sample_open(logits_NV[uncut], params.rows(uncut), uniforms_N[uncut])
    order = np.argsort(np.concatenate([cut, uncut]))
    # Open rows list nothing, so kept ids keep their order.
    *by_row, _ = zip(of_cut, of_open, strict=True)
    return Draws(*(np.concatenate(each)[order] for each in by_row), kept_ids=of_cut.kept_ids)


def _sample_open(logits_NV: Tensor, params: RowParams, u_N: NDArray[np.float64]) -> StepResult:
    """Samples rows with the full vocabulary: nothing is listed."""
    z_NV = logits_NV.float() / torch.from_numpy(params.cuts.temperature)[:, None]
    log_z_N = torch.logsumexp(z_NV, dim=-1)
    require_finite(log_z_N.numpy())
    cdf_NV = torch.exp(z_NV - log_z_N[:, None]).cumsum(-1, dtype=torch.float64)
    # The first token whose cumulated weight exceeds u * total; its own weight is above 0. u is at most 1 - 2**-53, so
    # in float64 u * total rounds to less than total: never past the last weight.
    target_N = torch.from_numpy(u_N) * cdf_NV[:, -1]
    token_ids = torch.searchsorted(cdf_NV, target_N[:, None], right=True)
    logprobs = z_NV.gather(1, token_ids)[:, 0] - log_z_N
    return Draws(
        token_ids=token_ids[:, 0].numpy(),
        rollout_logprobs=logprobs.clamp_(max=0.0).numpy(),
        kept_logmass=np.zeros(len(u_N), np.float32),
        log_z=log_z_N.numpy(),
        kept_sizes=np.zeros(len(u_N), np.int64),
        kept_ids=np.zeros(0, np.int32),
    )


def _sample_cut(logits_NV: Tensor, params: RowParams, u_N: NDArray[np.float64], capture: bool) -> StepResult:
    """Samples rows with a finite top-k."""
    num_rows, num_vocab = logits_NV.shape
    draws = StepResult(
        token_ids=np.empty(num_rows, np.int64),
        rollout_logprobs=np.empty(num_rows, np.float32),
        kept_logmass=np.empty(num_rows, np.float32),
        log_z=np.empty(num_rows, np.float32),
        kept_sizes=np.empty(num_rows, np.int64),
        kept_ids=np.empty(num_rows * min(params.max_top_k, num_vocab), np.int32),
    )
    logits = logits_NV.float().contiguous().numpy()
    num_kept = sample_rows(logits, params.cuts, u_N, draws)
    require_finite(draws.log_z)
    if not capture:
        draws.kept_logmass[:], draws.kept_sizes[:], num_kept = 0.0, 0, 0
    return Draws(*draws[:-1], kept_ids=draws.kept_ids[:num_kept])


def require_finite(log_z_N: NDArray[np.float32]) -> None:
    """Raises `EngineError` if a normaliser of N rows is not finite."""
    broken = np.flatnonzero(~np.isfinite(log_z_N))
    if len(broken):
        raise EngineError(
            "sampler: logits without a finite normaliser",
            seen=f"rows {broken[:8].tolist()} of {len(log_z_N)}",
            expected="finite logits",
            remedy="the weights are broken (NaN or infinite); reload them and look at the last update",
        )
