"""Each trainer rank's share of a microbatch: its context-parallel rows, its MoE layers, its slice of routing rows.

Pure numpy; any process. The controller cuts shares before it sends anything, so that no rank receives routing rows or
kept sets that it does not use. Shape legend: T = rows of the whole microbatch, t = rows of one context-parallel rank,
r = routing rows of one rank (t / tensor), L = MoE layers of the model, l = those of one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moerl.contract.batch import FLAG_ROWS, FLOAT_ROWS, INT_ROWS, Microbatch, unscored
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import KeptSets
from moerl.errors import ReplayError


def context_rows(cu_seqlens: NDArray[np.integer], size: int, rank: int) -> NDArray[np.int64]:
    """Returns int64 [t]: the rows of the whole microbatch that context-parallel rank `rank` of `size` has, in the
    rank's order.

    Every sequence is cut into 2 x size equal chunks; rank c takes chunk c, then chunk 2 x size - 1 - c, sequence by
    sequence, which balances causal attention.

    Raises:
        ReplayError: a sequence is not a multiple of 2 x size rows.
    """
    if size == 1:
        return np.arange(int(cu_seqlens[-1]), dtype=np.int64)
    lengths = np.diff(cu_seqlens).astype(np.int64)
    if (lengths % (2 * size)).any():
        raise ReplayError(
            "a packed sequence cannot be cut for context parallelism",
            seen=f"{int(lengths[(lengths % (2 * size)).argmax()])} rows",
            expected=f"a multiple of 2 x context = {2 * size}",
            remedy="pack with the sequence multiple of this layout",
        )
    chunks = lengths // (2 * size)
    starts = cu_seqlens[:-1].astype(np.int64)
    firsts = np.stack([starts + rank * chunks, starts + (2 * size - 1 - rank) * chunks], axis=1).reshape(-1)
    counts = np.repeat(chunks, 2)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(firsts - before, counts)


def cut_share(batch: Microbatch, layout: RankCoordinates) -> Microbatch:
    """Returns the share that one rank has of a whole microbatch; `batch` itself if the rank has all of it.

    `cu_seqlens`, `rollout_keys`, prefixes and checksums other than of routing stay those of the whole microbatch.
    Ranks that do not score get neither kept sets nor what the loss alone needs.
    """
    dims = layout.dims
    if dims.context == dims.tensor == 1 and layout.moe_layers is None and layout.is_last_stage:
        return batch
    rows = context_rows(batch.cu_seqlens, dims.context, layout.context_rank)
    layers = slice(None) if layout.moe_layers is None else list(layout.moe_layers)
    num_slices, mine = layout.routing_slice
    per_slice = len(rows) // num_slices
    routing_rows = rows[mine * per_slice : (mine + 1) * per_slice]
    per_row = ("sample_index", *INT_ROWS, *FLOAT_ROWS, *FLAG_ROWS)
    share = replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in per_row},
        scores={name: values[rows] for name, values in batch.scores.items()},
        expert_ids=None if batch.expert_ids is None else batch.expert_ids[routing_rows][:, layers],
        routing_checksums=None if batch.routing_checksums is None else batch.routing_checksums[layers],
        kept=batch.kept.take(rows) if layout.is_last_stage else KeptSets.empty(len(rows)),
    )
    return share if layout.is_last_stage else replace(share, **unscored(share.num_rows), scores={})


def routing_bytes(batches: Sequence[Microbatch]) -> int:
    """Returns the bytes of routing in these shares, uncompressed: expert ids, and a bit per row that tells whether they
    count."""
    return sum(batch.expert_ids.nbytes + (batch.num_rows + 7) // 8 for batch in batches if batch.expert_ids is not None)


def own_routing_bytes(batches: Sequence[Microbatch], layout: RankCoordinates) -> float:
    """Returns the part of `routing_bytes` that a rank cannot do without: samples' rows in the rank's slice and layers.

    batches: the rank's shares, as `cut_share` made them or a frame brought them.
    """
    total = 0.0
    for batch in batches:
        if batch.expert_ids is None:
            continue
        is_real = ~batch.is_pad
        num_slices, mine = layout.routing_slice
        per_slice = batch.num_rows // num_slices
        row_bytes = batch.expert_ids[0].nbytes
        total += int(is_real[mine * per_slice : (mine + 1) * per_slice].sum()) * row_bytes + int(is_real.sum()) / 8
    return total
