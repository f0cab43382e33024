"""A decoder layer on rows of tokens, compiled by Numba for the CPU it runs on.

Runs inside the embedded rollout engine, on the host; numpy arrays of float32. Every sum runs in an order that depends
on the model's sizes and on the length of its own row alone, so rows are independent of one another, bit for bit; those
of products run over blocks of `ROWS` rows, of which there are whole ones. Numbers that are not finite stay that: what
is broken must reach the sampler, which refuses it.

Shape legend: R = rows, whole blocks; H = hidden size, Q = query heads, G = key-value heads, D = head size, T = tokens
that a row sees, C = tokens that the cache has room for, E = experts, F = width of an expert, K = experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from moerl.kernels.host import exponential
from moerl.rollout.blocks import ROWS

_SUMS = {"reassoc", "contract", "nsz"}
"""Terms may be added up in the order of the machine's vectors, which is the same for every row."""

_CONTRACT = {"contract"}


@njit(error_model="numpy", cache=True)
def rounded(x: Any, halves: bool) -> Any:
    """Returns x, rounded to the nearest bfloat16, ties to even, if `halves`."""
    if not halves:
        return x
    bits = np.float32(x).view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nearest = np.uint32((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
    return nearest if x == x else x


@njit(fastmath=_SUMS, error_model="numpy", cache=True)
def norm(x: Any, weight: Any, eps: Any, out: Any, halves: bool) -> None:
    """Computes RMSNorm of one row: out = weight * x / sqrt(mean(x^2) + eps), rounded."""
    squares = np.float32(0.0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = rounded(weight[i] * (x[i] * scale), halves)


@njit(error_model="numpy", cache=True, nogil=True)
def norm_rows(stream: Any, weight: Any, eps: Any, out: Any, halves: bool) -> None:
    """Rounds the residual stream [R, H] in place, and writes its norm, [R, H]; both may be the same memory."""
    for r in range(stream.shape[0]):
        for i in range(stream.shape[1]):
            stream[r, i] = rounded(stream[r, i], halves)
        norm(stream[r], weight, eps, out[r], halves)


@njit(fastmath=_SUMS, error_model="numpy", cache=True, nogil=True)
def project(x: Any, weight: Any, out: Any, start: int, stop: int, halves: bool) -> None:
    """Computes out[r] = weight x[r], rounded, for rows start to stop, in whole blocks.

    x [R, I], weight [O, I], out [R, O].

    A block of 4 x 4 results is what the registers of a CPU hold; weights are read once.
    """
    num_in, num_out = x.shape[1], weight.shape[0]
    whole = num_out // 4 * 4
    for o in range(0, whole, 4):
        for r in range(start, stop, 4):
            a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = np.float32(0.0)
            a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = np.float32(0.0)
            for i in range(num_in):
                x0, x1, x2, x3 = x[r, i], x[r + 1, i], x[r + 2, i], x[r + 3, i]
                w0, w1, w2, w3 = weight[o, i], weight[o + 1, i], weight[o + 2, i], weight[o + 3, i]
                a00 += x0 * w0
                a01 += x0 * w1
                a02 += x0 * w2
                a03 += x0 * w3
                a10 += x1 * w0
                a11 += x1 * w1
                a12 += x1 * w2
                a13 += x1 * w3
                a20 += x2 * w0
                a21 += x2 * w1
                a22 += x2 * w2
                a23 += x2 * w3
                a30 += x3 * w0
                a31 += x3 * w1
                a32 += x3 * w2
                a33 += x3 * w3
            out[r, o], out[r, o + 1], out[r, o + 2], out[r, o + 3] = a00, a01, a02, a03
            out[r + 1, o], out[r + 1, o + 1], out[r + 1, o + 2], out[r + 1, o + 3] = a10, a11, a12, a13
            out[r + 2, o], out[r + 2, o + 1], out[r + 2, o + 2], out[r + 2, o + 3] = a20, a21, a22, a23
            out[r + 3, o], out[r + 3, o + 1], out[r + 3, o + 2], out[r + 3, o + 3] = a30, a31, a32, a33
    for o in range(whole, num_out):
        for r in range(start, stop):
            a = np.float32(0.0)
            for i in range(num_in):
                a += x[r, i] * weight[o, i]
            out[r, o] = a
    if halves:
        for r in range(start, stop):
            for o in range(num_out):
                out[r, o] = rounded(out[r, o], True)


@njit(fastmath=_CONTRACT, error_model="numpy", cache=True)
def rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Computes RoPE of one head: its first half and its second are turned together; all [D]."""
    half = x.shape[0] // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        out[i] = a * cos[i] - b * sin[i]
        out[i + half] = b * cos[i + half] + a * sin[i + half]


@njit(fastmath=_SUMS, error_model="numpy", cache=True)
def attend(query: Any, keys: Any, values: Any, scale: Any, scores: Any, out: Any) -> None:
    """Computes out = softmax(q k^T * scale) v; query [D], keys [T, D], values [T, V], out [V], scores [at least T] for
    work."""
    num_seen, size = keys.shape
    width = values.shape[1]
    largest = np.float32(-np.inf)
    for t in range(num_seen):
        score = np.float32(0.0)
        for d in range(size):
            score += query[d] * keys[t, d]
        scores[t] = score * scale
        largest = scores[t] if scores[t] > largest else largest
    for t in range(num_seen):
        scores[t] = exponential(scores[t] - largest)
    total = np.float32(0.0)
    for t in range(num_seen):
        total += scores[t]
    for d in range(width):
        out[d] = np.float32(0.0)
    for t in range(num_seen):
        weight = scores[t]
        for d in range(width):
            out[d] += weight * values[t, d]
    for d in range(width):
        out[d] /= total


@njit(error_model="numpy", cache=True, nogil=True)
def attend_each(given: Any, seen: Any, scale: Any, out: Any, start: int, stop: int) -> None:
    """Computes out[n, q, h] by `attend`: query q of head h to the first seen[n, q] tokens, of sequences start to stop.

    given: queries [N, Q heads, queries, D], keys [N, G, C, D], values [N, G, C, V]; out [N, queries, Q heads, V].
    """
    queries, keys, values = given
    num_heads, num_queries = queries.shape[1], queries.shape[2]
    scores, heads = np.empty(keys.shape[2], np.float32), num_heads // keys.shape[1]
    for n in range(start, stop):
        for head in range(num_heads):
            for q in range(num_queries):
                k, v = keys[n, head // heads, : seen[n, q]], values[n, head // heads, : seen[n, q]]
                attend(queries[n, head, q], k, v, scale, scores, out[n, q, head])


@njit(error_model="numpy", cache=True, nogil=True)
def silu(x: Any, out: Any, start: int, stop: int) -> None:
    """Computes out = x / (1 + exp(-x)) of rows start to stop; [R, I] both, as in the functions of numbers below."""
    for r in range(start, stop):
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] / (np.float32(1.0) + exponential(-x[r, i]))


@njit(error_model="numpy", cache=True, nogil=True)
def sigmoid(x: Any, out: Any, start: int, stop: int) -> None:
    """Computes out = 1 / (1 + exp(-x))."""
    for r in range(start, stop):
        for i in range(x.shape[1]):
            out[r, i] = np.float32(1.0) / (np.float32(1.0) + exponential(-x[r, i]))


@njit(error_model="numpy", cache=True, nogil=True)
def cosine(x: Any, out: Any, start: int, stop: int) -> None:
    """Computes out = cos(x)."""
    for r in range(start, stop):
        for i in range(x.shape[1]):
            out[r, i] = np.cos(x[r, i])


@njit(error_model="numpy", cache=True, nogil=True)
def sine(x: Any, out: Any, start: int, stop: int) -> None:
    """Computes out = sin(x)."""
    for r in range(start, stop):
        for i in range(x.shape[1]):
            out[r, i] = np.sin(x[r, i])


@njit(error_model="numpy", cache=True)
def choose(logits_RE: Any, ids_RK: Any, weights_RK: Any, normalized: bool, halves: bool) -> None:
    """Chooses the K experts with the largest softmax(logits), the largest first and of equal ones the smaller number;
    their weights are divided by their sum if `normalized`, and rounded. Writes over the logits."""
    num_rows, num_experts = logits_RE.shape
    for r in range(num_rows):
        p = logits_RE[r]
        largest, total, chosen = np.float32(-np.inf), np.float32(0.0), np.float32(0.0)
        for e in range(num_experts):
            largest = p[e] if p[e] > largest else largest
        for e in range(num_experts):
            p[e] = exponential(p[e] - largest)
            total += p[e]
        for c in range(ids_RK.shape[1]):
            best = 0
            for e in range(1, num_experts):
                best = e if p[e] > p[best] else best
            ids_RK[r, c], weights_RK[r, c] = best, p[best] / total
            chosen += weights_RK[r, c]
            p[best] = np.float32(-1.0)
        for c in range(ids_RK.shape[1]):
            weight = weights_RK[r, c] / chosen if normalized else weights_RK[r, c]
            weights_RK[r, c] = rounded(weight, halves)


@njit(error_model="numpy", cache=True)
def experts(x: Any, ids_RK: Any, weights_RK: Any, matrices: Any, out: Any, halves: bool) -> None:
    """Computes out[r] = sum over k of weights[r, k] * down(silu(gate(x)) * up(x)) of expert ids[r, k], rounded.

    x, out [R, H]; matrices: gates, then up [E, 2F, H], and down [E, H, F]. Rows are sorted by expert, each of which
    gets whole blocks; what fills the last one up is 0.
    """
    gate_up, down = matrices
    num_rows, hidden = x.shape
    num_experts, width, num_chosen = down.shape[0], down.shape[2], ids_RK.shape[1]
    starts = np.zeros(num_experts + 1, np.int64)
    for r in range(num_rows):
        for c in range(num_chosen):
            starts[ids_RK[r, c] + 1] += 1
    for e in range(num_experts):
        starts[e + 1] = starts[e] + (starts[e + 1] + ROWS - 1) // ROWS * ROWS
    num_sorted, free = starts[num_experts], starts.copy()
    rows, places = np.zeros((num_sorted, hidden), np.float32), np.empty((num_rows, num_chosen), np.int64)
    for r in range(num_rows):
        for c in range(num_chosen):
            place = free[ids_RK[r, c]]
            free[ids_RK[r, c]] += 1
            places[r, c] = place
            for i in range(hidden):
                rows[place, i] = x[r, i]
    inner, gated = np.empty((num_sorted, 2 * width), np.float32), np.empty((num_sorted, width), np.float32)
    for e in range(num_experts):
        project(rows, gate_up[e], inner, starts[e], starts[e + 1], False)
    for place in range(num_sorted):
        for i in range(width):
            gate, up = inner[place, i], inner[place, width + i]
            gated[place, i] = rounded(gate / (np.float32(1.0) + exponential(-gate)) * up, halves)
    for e in range(num_experts):
        project(gated, down[e], rows, starts[e], starts[e + 1], False)
    for r in range(num_rows):
        for i in range(hidden):
            out[r, i] = np.float32(0.0)
        for c in range(num_chosen):
            weight, place = weights_RK[r, c], places[r, c]
            for i in range(hidden):
                out[r, i] += weight * rows[place, i]
        for i in range(hidden):
            out[r, i] = rounded(out[r, i], halves)


@njit(error_model="numpy", cache=True, nogil=True)
def self_attention(stream: Any, places: Any, cache: Any, weights: Any, settings: Any) -> None:
    """Computes the first half of a layer for one token per row; adds to the residual stream, writes the cache.

    Args:
        stream: float32 [R, H].
        places: of each row its slot in the cache and the position of its token, int64 [R]; their RoPE's cosines and
            sines, float32 [R, D].
        cache: keys and values, float32 [slots, G, C, D].
        weights: of the norm [H], queries [Q D, H], keys and values [G D, H], norms of queries and keys [D], output
            [H, Q D].
        settings: what attention scores are multiplied by, eps of the norms (float32 both); whether the weights of
            chosen experts are divided by their sum; whether numbers are rounded to bfloat16.
    """
    slots, positions, cos, sin = places
    keys, values = cache
    before, of_queries, of_keys, of_values, query_norm, key_norm, output = weights
    scale, eps, _, halves = settings
    num_rows, hidden = stream.shape
    num_groups, size = keys.shape[1], keys.shape[3]
    num_heads = of_queries.shape[0] // size
    x = np.empty((num_rows, hidden), np.float32)
    norm_rows(stream, before, eps, x, halves)
    q, attended = np.empty((num_rows, num_heads * size), np.float32), np.empty((num_rows, num_heads * size), np.float32)
    k, v = np.empty((num_rows, num_groups * size), np.float32), np.empty((num_rows, num_groups * size), np.float32)
    project(x, of_queries, q, 0, num_rows, halves)
    project(x, of_keys, k, 0, num_rows, halves)
    project(x, of_values, v, 0, num_rows, halves)
    scores, normed, turned = np.empty(keys.shape[2], np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    for r in range(num_rows):
        newest = positions[r]
        for g in range(num_groups):
            seen_keys, seen_values = keys[slots[r], g, : newest + 1], values[slots[r], g, : newest + 1]
            norm(k[r, g * size : (g + 1) * size], key_norm, eps, normed, halves)
            rotate(normed, cos[r], sin[r], seen_keys[newest])
            for d in range(size):
                seen_values[newest, d] = v[r, g * size + d]
            for head in range(g * (num_heads // num_groups), (g + 1) * (num_heads // num_groups)):
                at = slice(head * size, (head + 1) * size)
                norm(q[r, at], query_norm, eps, normed, halves)
                rotate(normed, cos[r], sin[r], turned)
                attend(turned, seen_keys, seen_values, scale, scores, attended[r, at])
        for i in range(num_heads * size):
            attended[r, i] = rounded(attended[r, i], halves)
    project(attended, output, x, 0, num_rows, halves)
    stream += x


@njit(error_model="numpy", cache=True, nogil=True)
def mixture(stream: Any, weights: Any, settings: Any, ids_RK: Any) -> None:
    """Computes the second half of a layer with experts, whose ids it writes; arguments as of `self_attention`.

    Args:
        weights: of the norm [H], router [E, H], gates and up [E, 2F, H], down [E, H, F].
        ids_RK: int64 [R, K].
    """
    after, router, gate_up, down = weights
    _, eps, normalized, halves = settings
    num_rows, hidden = stream.shape
    x, out = np.empty((num_rows, hidden), np.float32), np.empty((num_rows, hidden), np.float32)
    norm_rows(stream, after, eps, x, halves)
    logits, of_experts = np.empty((num_rows, router.shape[0]), np.float32), np.empty(ids_RK.shape, np.float32)
    project(x, router, logits, 0, num_rows, halves)
    choose(logits, ids_RK, of_experts, normalized, halves)
    experts(x, ids_RK, of_experts, (gate_up, down), out, halves)
    stream += out


@njit(error_model="numpy", cache=True, nogil=True)
def gated_mlp(stream: Any, weights: Any, settings: Any) -> None:
    """Computes the second half of a layer without experts; arguments as of `self_attention`.

    Args:
        weights: of the norm [H], gate and up [I, H], down [H, I].
    """
    after, of_gates, of_ups, down = weights
    _, eps, _, halves = settings
    num_rows, hidden = stream.shape
    width = down.shape[1]
    x, out = np.empty((num_rows, hidden), np.float32), np.empty((num_rows, hidden), np.float32)
    norm_rows(stream, after, eps, x, halves)
    gates, ups = np.empty((num_rows, width), np.float32), np.empty((num_rows, width), np.float32)
    project(x, of_gates, gates, 0, num_rows, halves)
    project(x, of_ups, ups, 0, num_rows, halves)
    for r in range(num_rows):
        for i in range(width):
            gate = gates[r, i]
            gates[r, i] = rounded(gate / (np.float32(1.0) + exponential(-gate)) * ups[r, i], halves)
    project(gates, down, out, 0, num_rows, halves)
    stream += out
