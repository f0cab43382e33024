"""Rows with a finite top-k sampled on a CPU, one after the other, by the semantics of `moerl.rollout.sampler`: of a few
hundred rows a chain of tensor operations takes longer to start than to compute.

Runs inside the embedded rollout engine, on the host. What is ranked and drawn depends on its own row alone, bit for
bit. Shape legend as there: N = rows, V = vocabulary, C = candidates of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moerl.kernels.host import exponential

ROUNDING = 1e-6
"""Least amount by which a float32 logarithm may be too large."""
RELATIVE_ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""The same, relative to the terms of the difference that it is."""
_SUMS = {"reassoc", "contract", "nsz"}


class Cuts[T](NamedTuple):
    """Sampling parameters of N rows: arrays on the host, tensors on a device."""

    temperature: T
    """float32 [N]; 1 for a greedy row."""
    top_p: T
    """float64 [N]; 1 for a greedy row."""
    min_p: T
    """float64 [N]; 0 for a greedy row."""
    top_k: T
    """int64 [N]; 0 if the full vocabulary is open, 1 for a greedy row."""
    greedy: T
    """bool [N]."""


class Draws[T](NamedTuple):
    """One token for each of N rows: arrays on the host, which `sample_rows` writes, or tensors on a device."""

    token_ids: T
    """int64 [N]."""
    rollout_logprobs: T
    """float32 [N], nats, within the kept set; 0 for a greedy row."""
    kept_logmass: T
    """float32 [N], nats; 0 if nothing was cut, for a greedy row, and without capture."""
    log_z: T
    """float32 [N]; not finite if the logits of a row are broken."""
    kept_sizes: T
    """int64 [N]; 0 if nothing was cut, and without capture."""
    kept_ids: T
    """int32 [sum of `kept_sizes`]: kept sets one after the other, ascending within a row. Room behind the last one if
    `sample_rows` writes them, or on a device."""


StepResult = Draws[NDArray[Any]]
"""Samples of one forward pass, on the host."""


@njit(error_model="numpy", nogil=True, cache=True)
def sample_rows(logits: Any, cuts: Any, uniforms: Any, draws: Any) -> int:
    """Draws one token per row; returns how many kept ids there are.

    logits: float32 [N, V]; uniforms: float64 [N]; no row has top_k 0.
    """
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
        count = _ranked(z, values, ids, min(cuts.top_k[r], num_vocab))
        largest = np.float64(values[0])
        total = _weigh(z, values, weights, count)
        draws.log_z[r] = np.float32(largest + np.log(total))
        allowed = cuts.top_p[r] * total if cuts.top_p[r] < 1.0 else np.inf
        size = _kept_size(values[:count], weights, draws.log_z[r], cuts.min_p[r], allowed)
        kept_ids = draws.kept_ids[end : end + size]
        kept = _keep(z, values[0], values[size - 1], ids[size - 1], kept_ids, weights)
        end += size
        drawn = _drawn(weights, size, uniforms[r] * kept)
        draws.token_ids[r], draws.kept_sizes[r] = kept_ids[drawn], size
        draws.rollout_logprobs[r] = min(np.float32(np.log(weights[drawn]) - np.log(kept)), np.float32(0.0))
        mass = np.float32(largest + np.log(kept) - draws.log_z[r])
        # All of the vocabulary is summed up in two orders; the mass is exactly one.
        is_whole = size == num_vocab or cuts.greedy[r]
        rounding = max(ROUNDING, RELATIVE_ROUNDING * abs(draws.log_z[r]))
        draws.kept_logmass[r] = np.float32(0.0) if is_whole or 0 < mass <= rounding else mass
    return end


@njit(error_model="numpy", cache=True)
def _keep(z: Any, largest: Any, last_value: Any, last_id: int, kept_ids: Any, weights: Any) -> Any:
    """Lists the tokens that rank no lower than the last one that stays, by ascending id, and their weights; returns the
    sum of these. A broken row has none."""
    size, total = 0, 0.0
    for v in range(z.shape[0]):
        if z[v] > last_value or (z[v] == last_value and v <= last_id):
            weights[size] = np.exp(np.float64(z[v]) - np.float64(largest))
            kept_ids[size] = v
            total += weights[size]
            size += 1
    return total


@njit(error_model="numpy", cache=True)
def _kept_size(values: Any, weights: Any, log_z: Any, min_p: Any, allowed: Any) -> int:
    """Returns how many of the candidates stay, at least one; allowed: most weight before one that does."""
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
    """Returns the first of `size` at which the running sum of weights exceeds the target.

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
    """Finds the `count` largest logits in descending order, equal ones by ascending id; returns how many are above
    -inf, at least 1.

    A heap of the largest so far, the lowest rank at its root: sorting and selecting of Numba's own take ten seconds to
    compile.
    """
    found = 0
    for v in range(z.shape[0]):
        if found < count and z[v] > -np.inf:
            place = found
            while place > 0 and z[v] <= values[(place - 1) // 2]:
                parent = (place - 1) // 2
                values[place], ids[place] = values[parent], ids[parent]
                place = parent
            values[place], ids[place] = z[v], v
            found += 1
        elif found == count and z[v] > values[0]:
            _sink(values, ids, found, z[v], v)
    for last in range(found - 1, 0, -1):
        value, name = values[last], ids[last]
        values[last], ids[last] = values[0], ids[0]
        _sink(values, ids, last, value, name)
    if found == 0:  # a broken row, which its normaliser tells
        values[0], ids[0] = np.float32(np.nan), 0
    return max(found, 1)


@njit(error_model="numpy", cache=True)
def _sink(values: Any, ids: Any, count: int, value: Any, name: int) -> None:
    """Puts an entry in place of the root of a heap."""
    place = 0
    while True:
        child = 2 * place + 1
        if child + 1 < count and _ranks_below(values[child + 1], ids[child + 1], values[child], ids[child]):
            child += 1
        if child >= count or not _ranks_below(values[child], ids[child], value, name):
            break
        values[place], ids[place] = values[child], ids[child]
        place = child
    values[place], ids[place] = value, name


@njit(error_model="numpy", cache=True)
def _ranks_below(value: Any, name: int, other_value: Any, other_name: int) -> Any:
    return value < other_value or (value == other_value and name > other_name)


@njit(fastmath=_SUMS, error_model="numpy", cache=True)
def _weigh(z: Any, values: Any, weights: Any, count: int) -> Any:
    """Computes weights = exp(values - max z), in float64; returns the sum of exp(z - max z) over the vocabulary, to
    1e-7 of what lies outside of the candidates."""
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
