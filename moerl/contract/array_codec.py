"""How arrays become bytes on the wire, and back: exact, little-endian, every length checked first.

Expert ids travel layer by layer, since expert popularity differs between layers and the entropy coder then adapts to
each. Kept ids travel as differences within a row, split into byte planes: their high bytes are nearly all zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.frame import Buffer
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Returns the little-endian bytes of an array, without a copy if it is contiguous and little-endian already."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view(np.uint8))


def read_array(data: Buffer, dtype: type[Any] | np.dtype[Any], count: int, field: str) -> NDArray[Any]:
    """Returns a fresh, aligned [count] array of native `dtype`.

    Raises:
        ContractError: `array_length_wrong`.
    """
    native = np.dtype(dtype)
    require_length(data, count * native.itemsize, field)
    return np.frombuffer(data, native.newbyteorder("<")).astype(native)


def require_length(data: Buffer, num_bytes: int, field: str) -> None:
    """Raises `array_length_wrong` for data of another length."""
    agrees = len(data) == num_bytes
    require(agrees, Reason.ARRAY_LENGTH_WRONG, field, f"{len(data)} bytes", f"{num_bytes} bytes")


def pack_flags(flags: NDArray[np.bool_]) -> memoryview:
    """Packs bool [n] into ceil(n / 8) bytes."""
    return memoryview(np.packbits(flags, bitorder="little"))


def read_flags(data: Buffer, count: int, field: str) -> NDArray[np.bool_]:
    """Returns bool [count]. Spare bits of the last byte must be zero."""
    require_length(data, (count + 7) // 8, field)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
    require(not bits[count:].any(), Reason.ARRAY_LENGTH_WRONG, field, "flags beyond the end", count)
    return bits[:count].copy()


def pack_runs(values: NDArray[np.int32]) -> tuple[memoryview, memoryview]:
    """Returns the run-length code of a non-empty int32 [n]: values int32 [runs] and lengths uint32 [runs]."""
    changes = (values[1:] != values[:-1]).nonzero()[0]
    ends = np.empty(len(changes) + 1, np.int64)
    ends[:-1], ends[-1] = changes + 1, len(values)
    lengths = ends.astype(np.uint32)
    lengths[1:] -= lengths[:-1]
    return array_bytes(values[ends - 1]), array_bytes(lengths)


def read_runs(values: Buffer, lengths: Buffer, count: int, field: str) -> NDArray[np.int32]:
    """Returns int32 [count] from its run-length code; compares the total before it expands anything."""
    num_runs = len(lengths) // 4
    require(num_runs <= count, Reason.ARRAY_LENGTH_WRONG, field, f"{num_runs} runs", f"at most {count} tokens")
    run_lengths = read_array(lengths, np.uint32, num_runs, f"{field} lengths").astype(np.int64)
    run_values = read_array(values, np.int32, num_runs, f"{field} values")
    total = int(run_lengths.sum())
    require(total == count, Reason.ARRAY_LENGTH_WRONG, field, f"{total} tokens", count)
    return np.repeat(run_values, run_lengths)


def expert_planes(expert_ids: NDArray[Any]) -> Iterator[memoryview]:
    """Yields the bytes of [S-1, L, K] layer by layer, [S-1, K] each; a part is valid until the next is asked for."""
    words = _as_words(expert_ids)
    plane = np.empty((len(words), words.shape[2]), words.dtype)
    data = memoryview(plane.reshape(-1).view(np.uint8))
    for layer in range(words.shape[1]):
        # One buffer throughout: fresh ones of this size cost more in page faults than the copy itself.
        np.copyto(plane, words[:, layer])
        yield data


def read_expert_planes(data: Buffer, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns a fresh, contiguous [S-1, L, K] array of `dtype` from the bytes of [L, S-1, K]."""
    num_rows, num_layers, top_k = shape
    require_length(data, math.prod(shape) * dtype.itemsize, "expert_ids")
    planes = np.frombuffer(data, dtype.newbyteorder("<")).reshape(num_layers, num_rows, top_k)
    # Always a copy: a view, which one layer or one row would allow, keeps the whole payload in memory.
    words = np.array(_as_words(planes).swapaxes(0, 1), order="C")
    return words.view(planes.dtype).astype(dtype, copy=False)


def _as_words(array_ABK: NDArray[Any]) -> NDArray[Any]:
    """Returns little-endian [A, B, n] in words as wide as the bytes of a row allow: several times faster to
    transpose."""
    little = np.ascontiguousarray(array_ABK, array_ABK.dtype.newbyteorder("<"))
    row_bytes = little.shape[2] * little.itemsize
    return little.view(f"u{math.gcd(row_bytes, 8)}")


def pack_kept_ids(offsets: NDArray[np.int64], ids: NDArray[np.int32]) -> memoryview:
    """Packs ids into byte planes [4, nnz] of the differences within each row (the first id of a row stands as it
    is)."""
    deltas = ids.copy()
    deltas[1:] -= ids[:-1]
    row_starts = offsets[:-1][offsets[1:] > offsets[:-1]]
    deltas[row_starts] = ids[row_starts]
    planes = np.frombuffer(array_bytes(deltas), np.uint8).reshape(-1, deltas.itemsize).T
    return memoryview(np.ascontiguousarray(planes).reshape(-1))


def read_kept_ids(data: Buffer, offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns int32 [nnz]. Computes modulo 2^32, so it is exact for any content: a wrong id stays wrong for the
    invariants to find."""
    count = int(offsets[-1])
    require_length(data, 4 * count, "kept.ids")
    planes = np.frombuffer(data, np.uint8).reshape(4, count)
    deltas = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
    running = np.zeros(count + 1, np.uint32)
    np.cumsum(deltas, dtype=np.uint32, out=running[1:])
    del deltas
    running[1:] -= np.repeat(running[offsets[:-1]], offsets[1:] - offsets[:-1])
    return running[1:].view(np.int32)
