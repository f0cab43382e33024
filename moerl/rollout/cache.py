"""The key-value cache of continuous batching: one slot per running sequence, each at its own length.

Runs inside the embedded rollout engine. Running rows always fill slots 0..n-1, so that a step reads a view of the
cache (no gather, no copy) and the tail of a batch costs what its few rows cost; `copy` closes the gaps that
finished rows leave. Shape legend: N = rows of a step, G = key-value heads, Q = new tokens, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

_BLOCK = 128
"""Tokens that capacity is rounded up to multiples of, up to `max_tokens`: growing copies all of the cache."""


class SlotCache(Cache):
    """A transformers cache over [num_slots, G, capacity, D] tensors, one pair per layer.

    Each forward pass is announced with `begin_prefill` or `begin_decode`. Capacity grows by doubling, up to
    max_tokens.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._positions_N: Tensor | None = None
        self._rows_N: Tensor | None = None

    def begin_prefill(self, slots: Tensor, num_tokens: int) -> None:
        """Has the next pass write prompts of (padded) length num_tokens, one per row, into slots (int64)."""
        self.reserve(num_tokens)
        self._slots, self._positions_N = slots, None

    def begin_decode(self, positions_N: Tensor, num_tokens: int) -> None:
        """Has the next pass write one token per row into slots 0..N-1, at positions_N (int64), all below num_tokens."""
        self.reserve(num_tokens)
        self._positions_N = positions_N
        self._rows_N = torch.arange(len(positions_N), device=positions_N.device)

    def layers_of(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Returns keys and values of every layer, float32 [num_slots, G, capacity, D], with room for num_tokens.

        Args:
            shapes: G and D of every layer.
        """
        self.reserve(num_tokens)
        for number in range(len(self._keys), len(shapes)):
            num_heads, size = shapes[number]
            for pool in (self._keys, self._values):
                pool.append(torch.zeros(self.num_slots, num_heads, self.capacity, size))
        return list(zip(self._keys, self._values, strict=True))

    def copy(self, sources: Tensor, targets: Tensor, num_tokens: int) -> None:
        """Copies the first num_tokens tokens of the source slots to the target slots (int64, disjoint)."""
        if len(sources) == 0:
            return
        for cached in (*self._keys, *self._values):
            cached[targets, :, :num_tokens] = cached[sources, :, :num_tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values, [N, G, Q, D], of a layer; returns those to attend to, [N, G, capacity, D].

        A prompt attends to itself alone, so a prefill gets its own states back.
        """
        if layer_idx == len(self._keys):
            self._keys.append(self._new_like(key_states))
            self._values.append(self._new_like(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._positions_N is None:
            keys[self._slots, :, : key_states.shape[2]] = key_states
            values[self._slots, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        keys[self._rows_N, :, self._positions_N] = key_states[:, :, 0]
        values[self._rows_N, :, self._positions_N] = value_states[:, :, 0]
        num_rows = key_states.shape[0]
        return keys[:num_rows], values[:num_rows]

    def _new_like(self, states: Tensor) -> Tensor:
        _, num_heads, _, head_size = states.shape
        # Zeros, not what memory holds: a masked place has weight 0, and 0 * NaN would still be NaN.
        return states.new_zeros(self.num_slots, num_heads, self.capacity, head_size)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for so many tokens in every slot; what is there stays. Growing replaces the tensors, of which
        earlier views then show the old ones."""
        if num_tokens <= self.capacity:
            return
        used = self.capacity
        wanted = max(2 * used, -(-num_tokens // _BLOCK) * _BLOCK)
        self.capacity = max(num_tokens, min(wanted, self.max_tokens))
        for pool in (self._keys, self._values):
            for layer, old in enumerate(pool):
                pool[layer] = self._new_like(old)
                pool[layer][:, :, :used] = old
