"""Core attention and rotary embedding of packed (THD) sequences without Transformer Engine, some of which begin with
rows that others share.

Megatron's own local core attention rejects packed sequences, and its unfused rotary embedding loops over them in
Python. A sequence may go on from the first rows of an earlier one, its prefix: it then attends to these rows too, and
its positions go on from theirs (`moerl.batching.prefixes`). The rows of each sequence are found once per microbatch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moerl.contract.batch import Microbatch
from moerl.contract.shares import context_rows
from moerl.kernels.host import turned


@dataclass(frozen=True, slots=True)
class _Padded:
    """Rows of n packed sequences of similar length as one padded batch.

    rows: int64 [n * longest], rows of the packed tensor; padding repeats the last of its sequence, which is finite and
    whose result nobody reads. real: int64 [m], places in `rows` that are no padding.
    """

    rows: Tensor
    real: Tensor
    num_sequences: int

    def pad(self, packed: Tensor) -> Tensor:
        """Pads rows: [T, H, D] -> [n, H, longest, D]."""
        return packed.index_select(0, self.rows).view(self.num_sequences, -1, *packed.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """Removes padding: [n, H, longest, D] -> [m, H, D], sequence by sequence."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.real)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of similar length, attended to in one call. positions: int64 [n, 1, longest query, 1] of the queries
    among the keys of their sequence; None if queries are all the keys. members: int64 [n], numbers of the sequences."""

    members: NDArray[np.int64]
    queries: _Padded
    keys: _Padded
    positions: Tensor | None

    def mask(self) -> Tensor | None:
        """Returns bool [n, 1, longest query, longest key]: True where a query sees a key. None if a causal mask does
        the same."""
        if self.positions is None:
            return None
        return torch.arange(len(self.keys.rows) // self.keys.num_sequences) <= self.positions


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Places of this context-parallel rank's rows in the packed sequences of a microbatch."""

    positions: Tensor
    """int64 [t]; positions of the rows in their sequences."""
    groups: tuple[_Group, ...]
    """All sequences."""
    order: Tensor
    """int64 [t]; place of each row's result among those of the groups."""
    turns: Any = field(default_factory=WeakTensorKeyDictionary)
    """Cosines and sines of RoPE at `positions`, float32 [t, 1, D] each, by the angles that Megatron hands down."""

    def turn(self, t: Tensor, angles: Tensor) -> Tensor:
        """Returns RoPE of [t, H, D] at the positions of the rows; angles: [longest, 1, 1, D]."""
        if angles not in self.turns:
            at = angles[self.positions].squeeze(1)
            self.turns[angles] = at.cos(), at.sin()
        return _Turned.apply(t, *self.turns[angles])

    @classmethod
    def of(cls, batch: Microbatch, size: int, rank: int) -> PackedRows:
        """Returns the rows of context-parallel rank `rank` of `size`. batch: whole, or the share of a rank."""
        cu_seqlens, prefix_of, before = batch.cu_seqlens, batch.prefix_of, batch.rows_before
        starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
        all_positions = np.arange(int(cu_seqlens[-1])) - np.repeat(starts - before, lengths)
        positions = all_positions[context_rows(cu_seqlens, size, rank)]
        prefix_starts = starts if prefix_of is None else starts[np.maximum(prefix_of, 0)]
        groups, rows = [], [np.zeros(0, np.int64)]
        for members in _similar(lengths, before):
            keys = _padded(starts[members], lengths[members], prefix_starts[members], before[members])
            if size == 1 and not before[members].any():
                group = _Group(members, keys, keys, None)
            else:
                none = np.zeros_like(members)
                queries = _padded(starts[members] // size, lengths[members] // size, none, none)
                seen_by = torch.from_numpy(positions)[queries.rows].view(len(members), 1, -1, 1)
                group = _Group(members, queries, keys, seen_by)
            groups.append(group)
            rows.append(group.queries.rows[group.queries.real].numpy())
        return cls(torch.from_numpy(positions), tuple(groups), torch.from_numpy(np.argsort(np.concatenate(rows))))


_INTERLEAVED = ("rotary_interleaved", "mla_rotary_interleaved")
"""Options of Megatron's RoPE whose pairs are no halves."""

_packed: Any = WeakTensorKeyDictionary()
"""`PackedRows` by the `cu_seqlens` that Megatron hands down; its rotary embedding gets nothing else."""


def seen_rows(batch: Microbatch, *, size: int, rank: int) -> tuple[NDArray[np.int64], ...]:
    """Returns every pair of a sequence and a row that its attention reads: numbers of the sequences, rows of the whole
    microbatch, and positions at which the sequences read them. Arguments as in `describe`."""
    if batch.prefix_of is None:
        cu_seqlens = batch.cu_seqlens
        lengths = np.diff(cu_seqlens).astype(np.int64)
        rows = np.arange(int(cu_seqlens[-1]))
        starts = np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
        return np.repeat(np.arange(len(lengths)), lengths), rows, rows - starts
    found = []
    for group in PackedRows.of(batch, size, rank).groups:
        real, rows = group.keys.real.numpy(), group.keys.rows.numpy()
        number, position = np.divmod(real, len(rows) // len(group.members))
        found.append((group.members[number], rows[real], position))
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


def describe(cu_seqlens: Tensor, batch: Microbatch, *, size: int, rank: int) -> None:
    """Registers the sequences of a microbatch, before its forward pass.

    Args:
        cu_seqlens: its `cu_seqlens` as they go into `PackedSeqParams`; a copy of this tensor is not found.
        size, rank: of context parallelism.
    """
    _packed[cu_seqlens] = PackedRows.of(batch, size, rank)


def _similar(lengths: NDArray[np.int64], before: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Returns indices of sequences of similar length, with and without their prefix: each up to the same power of two,
    so that padding at most doubles their rows."""
    buckets = np.ceil(np.log2(np.stack([np.maximum(lengths, 1), lengths + before], 1).clip(1))).astype(np.int64)
    kinds = np.unique(buckets[lengths > 0], axis=0)
    return [np.flatnonzero((buckets == kind).all(1) & (lengths > 0)) for kind in kinds]


def _padded(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    prefix_starts: NDArray[np.int64],
    prefix_lengths: NDArray[np.int64],
) -> _Padded:
    totals = prefix_lengths + lengths
    columns = np.arange(int(totals.max()))[None, :]
    at = np.minimum(columns, totals[:, None] - 1)
    inside = at < prefix_lengths[:, None]
    rows = np.where(inside, prefix_starts[:, None] + at, (starts - prefix_lengths)[:, None] + at)
    real = np.flatnonzero(columns < totals[:, None])
    return _Padded(torch.from_numpy(rows.reshape(-1)), torch.from_numpy(real), len(starts))


class PackedAttention(nn.Module):
    """Causal core attention on scaled_dot_product_attention, with grouped-query attention and shared prefixes.

    Sequences are padded in groups of similar length: a trailing padding column is never seen by a causal query of its
    own sequence. Under context parallelism every rank gathers all keys and values, and attends with the queries of its
    own zig-zag rows.
    """

    def __init__(
        self, config: Any, *args: Any, softmax_scale: float | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attends: query [t, H, D], key and value [t, Hkv, D] -> [t, H * D]; t rows of this rank."""
        cu_seqlens = kwargs["packed_seq_params"].cu_seqlens_q
        packed = _packed[cu_seqlens]
        if self.context_group.size() > 1:
            key, value = (_gather_context(each, cu_seqlens, self.context_group) for each in (key, value))
        parts = []
        for group in packed.groups:
            mask = group.mask()
            padded = nn.functional.scaled_dot_product_attention(
                group.queries.pad(query),
                group.keys.pad(key),
                group.keys.pad(value),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            parts.append(group.queries.unpad(padded))
        return torch.cat(parts).index_select(0, packed.order).flatten(1)


def _gather_context(local: Tensor, cu_seqlens: Tensor, group: Any) -> Tensor:
    """Gathers [t, ...] of every context-parallel rank as [T, ...] in the order of the sequences; differentiable."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(local.contiguous(), group=group)
    bounds, size = cu_seqlens.numpy(), group.size()
    order = torch.from_numpy(np.concatenate([context_rows(bounds, size, rank) for rank in range(size)]))
    return gathered.index_select(0, torch.argsort(order))


class _Turned(torch.autograd.Function):
    """RoPE of the two halves of each head, x cos + (-x2, x1) sin; backward turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(gradients[0], cos, sin, -1), None, None


def replace_packed_rope() -> None:
    """Applies RoPE to all packed sequences in one call, at the positions of their rows."""
    rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    original = rope._apply_rotary_pos_emb_thd

    def apply(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or cu_seqlens not in _packed:
            return original(t, cu_seqlens, freqs, *args, **kwargs)
        packed = _packed[cu_seqlens]
        options = {k: v for k, v in kwargs.items() if k not in ("cp_group", "multi_latent_attention")}
        is_plain = options.get("mscale", 1.0) == 1.0 and not any(options.get(name) for name in _INTERLEAVED)
        if is_plain and t.dtype == torch.float32 and freqs.shape[-1] == t.shape[-1]:
            return packed.turn(t, freqs)
        return rope._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[packed.positions], **options).squeeze(1)

    rope._apply_rotary_pos_emb_thd = apply
