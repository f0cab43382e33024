"""Rows with a finite top-k sampled on a CPU, one after the other, by the semantics of `moerl.rollout.sampler`: of a few
hundred rows a chain of tensor operations takes longer to start than to compute.

Runs inside the embedded rollout engine, on the host. What is ranked and drawn depends on its own row alone, bit for
bit. Shape legend as there: N = rows, V = vocabulary, C = candidates of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moerl.kernels.host import exponential

_FEW = 64
"""Candidates that are kept in order while a row is read; more are selected and then sorted."""
ROUNDING = 1e-6
"""Least amount by which a float32 logarithm may be too large."""
RELATIVE_ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""The same, relative to the terms of the difference that it is."""
_SUMS = {"reassoc", "contract", "nsz"}


class Cuts(NamedTuple):
    """What is asked of N rows.

    temperature: float32 [N]. top_p, min_p: float64 [N]. top_k: int64 [N], at least 1. greedy: bool [N].
    """

    temperature: Any
    top_p: Any
    min_p: Any
    top_k: Any
    greedy: Any


class Draws(NamedTuple):
    """What is written.

    token_ids: int64 [N]. logprobs, kept_mass: float32 [N]. log_z: float32 [N], not finite where the row is broken.
    kept_sizes: int64 [N]. kept_ids: int32, room for all kept sets one after the other.
    """

    token_ids: Any
    logprobs: Any
    kept_mass: Any
    log_z: Any
    kept_sizes: Any
    kept_ids: Any


@njit(error_model="numpy", nogil=True, cache=True)
def sample_rows(logits: Any, cuts: Any, uniforms: Any, draws: Any) -> int:
    """Draws one token per row; how many kept ids there are. logits: float32 [N, V]; uniforms: float64 [N]."""
    num_rows, num_vocab = logits.shape
    most = 1
    for r in range(num_rows):
        most = max(most, min(cuts.top_k[r], num_vocab))
    z = np.empty(num_vocab, np.float32)
    values, ids, weights = np.empty(most, np.float32), np.empty(most, np.int64), np.empty(most, np.float64)
    end = 0
    for r in range(num_rows):
        for v in range(num_vocab):
            z[v] = logits[r, v] / cuts.temperature[r]
        count = min(cuts.top_k[r], num_vocab)
        count = _ranked(z, values, ids, count) if count <= _FEW else _selected(z, values, ids, count)
        largest = np.float64(values[0])
        total = _weigh(z, values, weights, count)
        draws.log_z[r] = np.float32(largest + np.log(total))
        allowed = cuts.top_p[r] * total if cuts.top_p[r] < 1.0 else np.inf
        size = _kept_size(values[:count], weights, draws.log_z[r], cuts.min_p[r], allowed)
        _sort_by_id(ids, weights, size)
        kept = 0.0
        for i in range(size):
            draws.kept_ids[end + i] = ids[i]
            kept += weights[i]
        end += size
        drawn = _drawn(weights, size, uniforms[r] * kept)
        draws.token_ids[r], draws.kept_sizes[r] = ids[drawn], size
        draws.logprobs[r] = min(np.float32(np.log(weights[drawn]) - np.log(kept)), np.float32(0.0))
        mass = np.float32(largest + np.log(kept) - draws.log_z[r])
        # All of the vocabulary is summed up in two orders; the mass is exactly one.
        is_whole = size == num_vocab or cuts.greedy[r]
        rounding = max(ROUNDING, RELATIVE_ROUNDING * abs(draws.log_z[r]))
        draws.kept_mass[r] = np.float32(0.0) if is_whole or 0 < mass <= rounding else mass
    return end


@njit(error_model="numpy", cache=True)
def _kept_size(values: Any, weights: Any, log_z: Any, min_p: Any, allowed: Any) -> int:
    """How many of the candidates stay, at least one; allowed: most weight before one that does."""
    size, before = 0, 0.0
    while size < values.shape[0] and before <= allowed and weights[size] >= min_p:
        # Ids whose probability is 0 in float32 are never drawn.
        if not np.exp(np.float32(values[size] - log_z)) > 0:
            break
        before += weights[size]
        size += 1
    return max(size, 1)


@njit(error_model="numpy", cache=True)
def _drawn(weights: Any, size: int, target: Any) -> int:
    """The first of `size` at which the running sum of weights exceeds the target.

    A uniform number is at most 1 - 2^-53: times the sum of all it rounds to less than that.
    """
    below = 0.0
    for i in range(size):
        below += weights[i]
        if below > target:
            return i
    return size - 1


@njit(error_model="numpy", cache=True)
def _ranked(z: Any, values: Any, ids: Any, count: int) -> int:
    """The `count` largest logits in descending order, equal ones by ascending id; how many there are above -inf."""
    found = 0
    last = np.float32(-np.inf)
    for v in range(z.shape[0]):
        if z[v] > last:
            place = min(found, count - 1)
            while place > 0 and values[place - 1] < z[v]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = z[v], v
            found = min(found + 1, count)
            if found == count:
                last = values[count - 1]
    return _at_least_one(values, ids, found)


@njit(error_model="numpy", cache=True)
def _selected(z: Any, values: Any, ids: Any, count: int) -> int:
    """The same for many of them."""
    num_vocab = z.shape[0]
    threshold = np.partition(z, num_vocab - count)[num_vocab - count]
    found = 0
    for above in (True, False):
        for v in range(num_vocab):
            is_one = z[v] > threshold if above else z[v] == threshold and z[v] > -np.inf
            if is_one and found < count:
                values[found], ids[found] = z[v], v
                found += 1
    order = np.argsort(-values[:found], kind="mergesort")
    values[:found], ids[:found] = values[:found][order], ids[:found][order]
    return _at_least_one(values, ids, found)


@njit(error_model="numpy", cache=True)
def _at_least_one(values: Any, ids: Any, found: int) -> int:
    if found == 0:  # a broken row, which its normaliser tells
        values[0], ids[0] = np.float32(np.nan), 0
    return max(found, 1)


@njit(fastmath=_SUMS, error_model="numpy", cache=True)
def _weigh(z: Any, values: Any, weights: Any, count: int) -> Any:
    """weights = exp(values - max z), in float64; the sum of exp(z - max z) over the vocabulary, to 1e-7 of what lies
    outside of the candidates."""
    largest = values[0]
    candidates = others = 0.0
    for v in range(z.shape[0]):
        others += np.float64(exponential(z[v] - largest))
    for i in range(count):
        weights[i] = np.exp(np.float64(values[i]) - np.float64(largest))
        candidates += weights[i]
        others -= np.float64(exponential(values[i] - largest))
    if count == z.shape[0]:
        return candidates
    # No comparison that would make 0 of NaN.
    return candidates if others < 0 else candidates + others


@njit(error_model="numpy", cache=True)
def _sort_by_id(ids: Any, weights: Any, size: int) -> None:
    if size > _FEW:
        order = np.argsort(ids[:size])
        ids[:size], weights[:size] = ids[:size][order], weights[:size][order]
        return
    for i in range(1, size):
        name, weight, place = ids[i], weights[i], i
        while place > 0 and ids[place - 1] > name:
            ids[place], weights[place] = ids[place - 1], weights[place - 1]
            place -= 1
        ids[place], weights[place] = name, weight
