"""The running sequences of the embedded engine: per-slot buffers that become records when a row finishes.

Runs inside the embedded rollout engine, on the host; numpy only. Running rows fill slots 0..n-1. A decode step
writes whole columns of preallocated arrays; the only work per row happens once, when it finishes. Shape legend:
B = slots, P = tokens a slot can hold, n = running rows, m = rows admitted or finished together, S, L, K as in the
data contract.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.rollout.sampler_kernel import StepResult
from moerl.rollout.segments import Segment, trajectory_values

_MIN_CAPACITY = 1 << 16
"""Kept ids that a pool has room for at first."""
_POOL_SLACK = 1 << 20
"""Kept ids of finished rows that may stay in the pool before it is cleaned."""


_PER_TOKEN = (
    *("token_ids", "_rollout_logprobs", "_kept_logmass", "_policy_versions"),
    *("_kept_starts", "_kept_sizes", "_expert_ids"),
)
"""Attributes of a table that hold something for every token of every slot."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """Request that sits in a slot, and its times in seconds of `time.perf_counter`."""

    request: RolloutRequest
    """Request of the row."""
    asked_at: float
    """Time at which it was asked for."""
    admitted_at: float
    """Time at which it got the slot."""


class KeptPool:
    """Kept sets one after the other in one int32 array; the caller remembers the start and the size of each."""

    def __init__(self) -> None:
        self._ids = np.empty(_MIN_CAPACITY, np.int32)
        self.num_used = 0

    def append(self, ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds the sets that lie one after the other in ids; returns their starts, int64 [len(sizes)]."""
        end = self.num_used + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self.num_used] = self._ids[: self.num_used]
            self._ids = grown
        self._ids[self.num_used : end] = ids
        starts = self.num_used + np.cumsum(sizes) - sizes
        self.num_used = end
        return starts

    def take(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the named sets, one after the other, as a new array."""
        shift = starts - (np.cumsum(sizes) - sizes)
        return self._ids[np.repeat(shift, sizes) + np.arange(int(sizes.sum()))]

    def keep_only(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drops every other set and frees their memory; returns the new starts."""
        kept = self.take(starts, sizes)
        self._ids = np.empty(max(_MIN_CAPACITY, 2 * len(kept)), np.int32)
        self.num_used = 0
        return self.append(kept, sizes)


class SlotTable:
    """State of up to num_slots running sequences of at most max_tokens tokens each."""

    def __init__(self, spec: ModelSpec, num_slots: int, max_tokens: int) -> None:
        shape = (num_slots, max_tokens)
        self.num_slots = num_slots
        self._spec = spec
        self._occupants: list[Occupant] = []
        self._pool = KeptPool()
        self._num_dead_ids = 0
        self.lengths = np.zeros(num_slots, np.int64)
        self.token_ids = np.empty(shape, np.int32)
        self._rollout_logprobs = np.empty(shape, np.float32)
        self._kept_logmass = np.empty(shape, np.float32)
        self._policy_versions = np.empty(shape, np.int32)
        self._kept_starts = np.empty(shape, np.int64)
        self._kept_sizes = np.empty(shape, np.int64)
        layers, experts_per_token = spec.num_moe_layers, spec.experts_per_token
        self._expert_ids = np.empty((*shape, layers, experts_per_token), spec.expert_dtype)
        self._max_lengths = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self._stop_ids = np.full((num_slots, 1), -1, np.int64)

    def reserve(self, max_tokens: int) -> None:
        """Gives every slot room for so many tokens; what is there stays."""
        missing = max_tokens - self.token_ids.shape[1]
        if missing <= 0:
            return
        for name in _PER_TOKEN:
            array = getattr(self, name)
            wider = np.empty((array.shape[0], max_tokens, *array.shape[2:]), array.dtype)
            wider[:, : array.shape[1]] = array
            setattr(self, name, wider)

    @property
    def num_running(self) -> int:
        return len(self._occupants)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._occupants)

    @property
    def requests(self) -> list[RolloutRequest]:
        """The running requests, in slot order."""
        return [occupant.request for occupant in self._occupants]

    def admit(self, requests: Sequence[RolloutRequest], asked_at: Sequence[float]) -> slice:
        """Puts the requests into the next free slots, in order; returns those slots. asked_at: time of each."""
        now = time.perf_counter()
        first = self.num_running
        for slot, (request, asked) in enumerate(zip(requests, asked_at, strict=True), start=first):
            self._occupants.append(Occupant(request, asked, now))
            num_prompt = len(request.prompt_ids)
            self.lengths[slot] = num_prompt
            self._max_lengths[slot] = num_prompt + request.max_new_tokens
            self.seeds[slot] = request.sampling.seed % 2**64
            self.token_ids[slot, :num_prompt] = request.prompt_ids
            self._kept_starts[slot, :num_prompt] = 0
            self._kept_sizes[slot, :num_prompt] = 0
            missing = len(request.stop_ids) - self._stop_ids.shape[1]
            if missing > 0:
                self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
            self._stop_ids[slot] = -1
            self._stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        return slice(first, self.num_running)

    def write_prompt_routing(self, rows: slice, expert_ids: NDArray[Any]) -> None:
        """Writes expert_ids [m, padded prompt length, L, K]; what lies past a row's prompt is overwritten later."""
        self._expert_ids[rows, : expert_ids.shape[1]] = expert_ids

    def write_decode_routing(self, expert_ids: NDArray[Any]) -> None:
        """Writes expert_ids [n, L, K] of the newest token of every running row."""
        rows = np.arange(self.num_running)
        self._expert_ids[rows, self.lengths[: self.num_running] - 1] = expert_ids

    def newest(self, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the newest token of every running row and its position, int64 [num_rows] each; rows above the running
        ones have token 0 at position 0, in slots that are free."""
        n = self.num_running
        tokens, positions = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        positions[:n] = self.lengths[:n] - 1
        tokens[:n] = self.token_ids[np.arange(n), positions[:n]]
        return tokens, positions

    def append(self, rows: slice, step: StepResult, policy_version: int) -> None:
        """Appends one sampled token to each of the rows."""
        at = (np.arange(rows.start, rows.stop), self.lengths[rows])
        self.token_ids[at] = step.token_ids
        self._rollout_logprobs[at] = step.rollout_logprobs
        self._kept_logmass[at] = step.kept_logmass
        self._policy_versions[at] = policy_version
        self._kept_starts[at] = self._pool.append(step.kept_ids, step.kept_sizes)
        self._kept_sizes[at] = step.kept_sizes
        self.lengths[rows] += 1

    def stopped(self) -> NDArray[np.bool_]:
        """Returns bool [n]: the newest token is a stop id of its request."""
        n = self.num_running
        last = self.token_ids[np.arange(n), self.lengths[:n] - 1]
        return (self._stop_ids[:n] == last[:, None]).any(axis=1)

    def full(self) -> NDArray[np.bool_]:
        """Returns bool [n]: max_new_tokens were sampled."""
        n = self.num_running
        return self.lengths[:n] >= self._max_lengths[:n]

    def values(self, slot: int, reason: FinishReason) -> dict[str, Any]:
        """Returns the `Trajectory` fields of a running row, as it stands; copies, final dtypes."""
        occupant = self._occupants[slot]
        request, now = occupant.request, time.perf_counter()
        num_tokens = int(self.lengths[slot])
        sampled = (slot, slice(len(request.prompt_ids), num_tokens))
        kept_sizes = self._kept_sizes[sampled]
        segment = Segment(
            token_ids=self.token_ids[sampled],
            rollout_logprobs=self._rollout_logprobs[sampled],
            kept_logmass=self._kept_logmass[sampled],
            policy_versions=self._policy_versions[sampled],
            kept_sizes=kept_sizes,
            kept_ids=self._pool.take(self._kept_starts[sampled], kept_sizes),
            expert_ids=self._expert_ids[slot, request.known_rows : num_tokens - 1],
        )
        timings = {
            "waiting_seconds": occupant.admitted_at - occupant.asked_at,
            "sampling_seconds": now - occupant.admitted_at,
        }
        return trajectory_values(request, [segment], reason, self._spec) | {"attempt": 0, "timings": timings}

    def release(self, done: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Frees the rows marked in done, bool [n], and closes the gaps with the last running rows.

        Returns:
            sources, targets: int64 slots; the caller moves its own per-slot state (the cache) the same way.
        """
        n = self.num_running
        num_left = n - int(done.sum())
        targets = np.flatnonzero(done[:num_left])
        sources = num_left + np.flatnonzero(~done[num_left:])
        used = int(self.lengths[:n].max(initial=0))
        self._num_dead_ids += int(self._kept_sizes[:n, :used][self._is_sampled(n, used) & done[:, None]].sum())
        for name in _PER_TOKEN:
            array = getattr(self, name)
            array[targets, :used] = array[sources, :used]
        for array in (self.lengths, self._max_lengths, self.seeds, self._stop_ids):
            array[targets] = array[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._occupants[target] = self._occupants[source]
        del self._occupants[num_left:]
        self._clean_pool()
        return sources, targets

    def _is_sampled(self, num_rows: int, num_tokens: int) -> NDArray[np.bool_]:
        """Returns bool [num_rows, num_tokens]: the place holds a token (prompt tokens have empty kept sets)."""
        return np.arange(num_tokens) < self.lengths[:num_rows, None]

    def _clean_pool(self) -> None:
        if self._num_dead_ids <= max(_POOL_SLACK, self._pool.num_used // 2):
            return
        n = self.num_running
        used = int(self.lengths[:n].max(initial=0))
        alive = self._is_sampled(n, used)
        starts, sizes = self._kept_starts[:n, :used], self._kept_sizes[:n, :used]
        starts[alive] = self._pool.keep_only(starts[alive], sizes[alive])
        self._num_dead_ids = 0
